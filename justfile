# A short name for each step. `just` comes from apt, brew, or: pip install rust-just.

set shell := ["bash", "-euo", "pipefail", "-c"]
set positional-arguments

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

# list the recipes
default:
    @just --list --unsorted

# make .venv and install this clone into it, with what tests and checks need
setup:
    python3 -m venv .venv
    .venv/bin/pip install -q -e '.[test,dev]'

# check this machine by using it
doctor *args:
    rmsnorm doctor "$@"

# judge forward, dx and dgamma: the main job
verify *args:
    rmsnorm verify "$@"

# check first and second derivatives in float64
gradcheck *args:
    rmsnorm gradcheck "$@"

# predict what a kernel mistake does, then run it
exercise *args:
    rmsnorm exercise "$@"

# train a small network through the kernel, beside the reference
train *args:
    rmsnorm train "$@"

# time implementations against each other (needs a GPU)
bench *args:
    rmsnorm bench "$@"

# draw a run's figures and its page (the newest run, or those named)
report *args:
    rmsnorm report "$@"

# re-check a run directory (the newest, or the one named)
audit *args:
    rmsnorm audit "$@"

# remove run directories, after asking
clean *args:
    rmsnorm clean "$@"

# run the tests, or those named
test *args:
    pytest "$@"

# thousands of drawn cases: kernels, configurations, damaged files. FUZZ=nightly is 2000 a test, about an hour
fuzz *args:
    FUZZ=nightly pytest tests/reported/test_fuzz.py tests/config/test_random.py tests/rundir/test_damage.py "$@"

# run all that CI runs, in an environment of its own
check:
    bash .ci/run

# every command once, on small sizes, with the teaching kernel
lesson:
    rmsnorm doctor
    rmsnorm verify --config configs/minimum.toml
    rmsnorm gradcheck --config configs/minimum.toml
    rmsnorm exercise --config configs/minimum.toml
    rmsnorm train --config configs/minimum.toml
    if rmsnorm doctor --device cuda >/dev/null 2>&1; then rmsnorm bench --config configs/minimum.toml; \
        else echo "bench is left out: it needs a GPU, since the interpreter's times say nothing about one"; fi
    rmsnorm report
    rmsnorm audit
    rmsnorm clean --dry-run

engine := if `command -v podman || true` != "" { "podman" } else { "docker" }
gpu := if path_exists("/dev/nvidiactl") == "true" { "--device nvidia.com/gpu=all" } else { "" }
user := if engine == "podman" { "--userns keep-id" } else { "--user " + `id -u` + ":" + `id -g` }

# build the container image
image:
    {{ engine }} build -t rmsnorm -f Containerfile .

# run a command in the container, with the GPU if there is one: just container verify
container *args:
    {{ engine }} run --rm {{ gpu }} {{ user }} -v "$PWD:/work" rmsnorm "$@"
