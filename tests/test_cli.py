"""The command line as a user meets it: real processes, exit codes, and what stands on which stream.

No device is named, so that what runs is a GPU where there is one and Triton's interpreter elsewhere.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rmsnorm_cli.kernels.peers import PACKAGES

ROOT = Path(__file__).parents[1]
COMMANDS = ("verify", "gradcheck", "train", "bench", "exercise", "clean", "doctor", "report", "audit")
RUNNING = ("verify", "gradcheck", "train", "bench", "exercise")
SMALL = ("verify", "--dtype", "float32", "--rows", "1,3", "--cols", "2,5", "--only", "forward")


def rmsnorm(*arguments, cwd, **environment):
    """Run the tool in a process of its own, with the folder `cwd` as the user's."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RMSNORM_", "GITHUB_", "TRITON_"))}
    return subprocess.run(
        [sys.executable, "-m", "rmsnorm_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=clean | environment,
        timeout=300,
    )


def runs(folder: Path) -> list[Path]:
    """Return the run directories that exist."""
    return [p for p in (folder / "runs").glob("2*") if p.is_dir() and not p.is_symlink()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_its_brackets_kept(command, tmp_path):
    done = rmsnorm(command, "--help", cwd=tmp_path, GITHUB_ACTIONS="true")
    assert done.returncode == 0
    assert "--json" in done.stdout
    assert "\x1b" not in done.stdout


def test_help_is_quick_and_loads_no_torch(tmp_path):
    start = time.perf_counter()
    done = rmsnorm("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert time.perf_counter() - start < 2.0, (
        "the figure on an idle machine is 0.1 s; torch alone takes longer than this"
    )


def test_the_version_names_tool_torch_triton_and_cuda(tmp_path):
    done = rmsnorm("--version", cwd=tmp_path)
    assert done.returncode == 0
    for word in ("rmsnorm", "torch", "triton", "CUDA"):
        assert word in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("verfy",), ("verify", "--colls", "3"), ("verify", "--eps"), ("clean", "--keep", "-1"), ("audit", "a", "b"),
        ("exercise", "layernorm"),
    ],
)  # fmt: skip
def test_wrong_usage_is_exit_2_in_one_sentence_that_names_the_help(arguments, tmp_path):
    done = rmsnorm(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert re.search(rf"; see: rmsnorm( {arguments[0]})? --help\n$", done.stderr)
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.case("B83")
def test_three_configuration_errors_come_at_once_with_their_lines(tmp_path):
    """An unknown key, a wrong type and an unknown table: all named with line and remedy, and nothing was begun."""
    (tmp_path / "bad.toml").write_text('[operator]\neps = "1e-6"\n\n[verify]\ncolls = [3]\n\n[verfy]\nrows = [1]\n')
    done = rmsnorm("verify", "--config", "bad.toml", cwd=tmp_path)
    assert done.returncode == 2
    for expected in ("bad.toml:2: operator.eps", "bad.toml:5: verify.colls", "cols", "bad.toml:7: verfy"):
        assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", RUNNING)
def test_a_dry_run_prints_the_resolved_toml_and_does_nothing(command, tmp_path):
    import tomllib

    done = rmsnorm(command, "--dry-run", "--seed", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(done.stdout)["run"]["seed"] == 5
    assert not (tmp_path / "runs").exists()


@pytest.mark.case("B86")
def test_a_small_verification_passes_and_leaves_a_whole_run_directory(tmp_path, device):
    done = rmsnorm(*SMALL, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["command"] == "verify"
    assert document["status"] == "passed"
    assert document["execution"] == ("interpreter" if device == "cpu" else "cuda")
    assert document["counts"]["passed"] > 0
    assert {scope["scope"] for scope in document["scopes"]} == {"forward"}
    (directory,) = runs(tmp_path)
    held = {path.name for path in directory.iterdir()}
    assert {"run.json", "config.toml", "env.json", "metrics.jsonl", "junit.xml", "log.txt", "SHA256SUMS"} <= held
    assert (tmp_path / "runs" / "latest").resolve() == directory.resolve()
    recorded = json.loads((directory / "run.json").read_text())
    assert recorded["status"] == "passed"
    assert recorded["exit_code"] == 0


def test_the_recorded_configuration_repeats_the_run(tmp_path):
    assert rmsnorm(*SMALL, "--quiet", cwd=tmp_path).returncode == 0
    (first,) = runs(tmp_path)
    again = rmsnorm("verify", "--config", first / "config.toml", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    (second,) = set(runs(tmp_path)) - {first}
    assert (first / "metrics.jsonl").read_text() == (second / "metrics.jsonl").read_text()


@pytest.mark.case("B68")
def test_a_wrong_kernel_fails_with_exit_1_and_says_where(tmp_path):
    (tmp_path / "mine.py").write_text("def identity(x, gamma, eps):\n    return x * gamma\n")
    done = rmsnorm(*SMALL, "--impl", "mine:identity", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["status"] == "failed"
    assert document["counts"]["failed"] > 0
    assert "no normalisation" in done.stderr.lower()


@pytest.mark.case("B68")
def test_a_filter_that_matches_nothing_is_never_a_pass(tmp_path):
    beyond = ("verify", "--impl", "rowwise", "--cols", "5000", "--only", "forward", "--json")
    done = rmsnorm(*beyond, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["status"] == "inconclusive"


def test_an_unknown_implementation_is_a_usage_error_and_a_missing_package_is_not(tmp_path):
    unknown = rmsnorm(*SMALL, "--impl", "rowise", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "rowwise" in unknown.stderr, "the nearest name is offered"
    if importlib.util.find_spec("liger_kernel") is None:
        missing = rmsnorm(*SMALL, "--impl", "liger", cwd=tmp_path)
        assert missing.returncode == 4
        assert "pip install liger-kernel" in missing.stderr


@pytest.mark.case("B86")
def test_code_of_a_user_that_cannot_be_read_is_refused_before_a_run_is_made(tmp_path):
    (tmp_path / "mine.py").write_text("def norm(x, gamma, eps):\n    retrun x\n")
    done = rmsnorm("verify", "--impl", "mine.py:norm", "--impl", "absent:norm", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: run.impl: mine.py:2: invalid syntax: retrun x; correct that line",
        "error: run.impl: there is no module absent in the current folder or among the installed packages; "
        "name one that is there, or path/file.py:callable",
    ]
    assert not (tmp_path / "runs").exists()


def test_the_last_line_says_what_was_done_where_nothing_is_counted(tmp_path):
    assert rmsnorm("exercise", "--list", cwd=tmp_path).stdout.splitlines()[-1].endswith("are listed, none was run")
    (tmp_path / "runs").mkdir()
    swept = rmsnorm("clean", "--dry-run", cwd=tmp_path)
    assert swept.stdout.splitlines()[-1] == "clean: passed: nothing to remove"


def test_errors_under_json_are_one_document_too(tmp_path):
    for arguments in (("verify", "--set", "verify.colls=[1]"), ("verify", "--nonsense"), ("audit", "nowhere")):
        done = rmsnorm(*arguments, "--json", cwd=tmp_path)
        document = json.loads(done.stdout)
        assert document["status"] == "error"
        assert document["errors"]
        assert done.returncode == document["exit_code"] != 0


def test_asking_for_a_gpu_where_there_is_none_is_exit_4(tmp_path):
    done = rmsnorm("verify", "--device", "cuda", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 4
    assert "interpreter" in done.stderr
    assert not runs(tmp_path)


def test_a_reader_that_leaves_early_does_not_end_the_run(tmp_path):
    """`rmsnorm verify | head -c 1` still leaves a finished run."""
    command = f"{sys.executable} -m rmsnorm_cli {' '.join(SMALL)} | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    (directory,) = runs(tmp_path)
    assert json.loads((directory / "run.json").read_text())["status"] == "passed"
    assert "BrokenPipe" not in done.stderr


def test_github_gets_annotations_and_a_summary(tmp_path):
    (tmp_path / "mine.py").write_text("def identity(x, gamma, eps):\n    return x * gamma\n")
    summary = tmp_path / "summary.md"
    done = rmsnorm(
        *SMALL, "--impl", "mine:identity", cwd=tmp_path, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary)
    )
    assert "::error title=" in done.stdout
    assert "| --- |" in summary.read_text()


def test_an_unforeseen_error_is_exit_3_without_a_traceback(tmp_path):
    """Typer's own code for it would be 1, which means that a check failed."""
    breaker = (
        "import rmsnorm_cli.config as c; c.load = lambda *a, **k: 1 / 0\n"
        "from rmsnorm_cli.cli import main; main(['verify'])"
    )
    done = subprocess.run([sys.executable, "-c", breaker], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 3
    assert "internal error: ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.case("B77")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_with_its_own_exit_code_and_status(number, code, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "rmsnorm_cli", "verify", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    deadline = time.monotonic() + 120
    while not any((run / "metrics.jsonl").stat().st_size for run in runs(tmp_path) if (run / "metrics.jsonl").exists()):
        assert time.monotonic() < deadline, "the run never began"
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    document = json.loads(out)
    (directory,) = runs(tmp_path)
    recorded = json.loads((directory / "run.json").read_text())
    assert document["status"] == recorded["status"] == "interrupted"
    assert document["exit_code"] == recorded["exit_code"] == code
    assert document["run_dir"] == f"runs/{directory.name}"
    assert "Traceback" not in err


TINY = ("train", "--impl", "reference", "--optimizer", "adam", "--width", "17", "--batch", "8")
FEW = ("--set", "train.twins=1", "--set", "train.seed_noise_runs=0", "--set", "data.train=64")


def test_a_resumed_run_takes_a_larger_number_of_steps_and_no_other_change(tmp_path):
    """Six steps, then to twelve, equal twelve at once; fewer steps or another seed are refused before anything."""
    assert rmsnorm(*TINY, *FEW, "--steps", "6", cwd=tmp_path).returncode in (0, 1)
    (first,) = runs(tmp_path)
    fewer = rmsnorm("train", "--resume", first.name, "--steps", "5", cwd=tmp_path)
    assert fewer.returncode == 2
    assert "--steps: 5" in fewer.stderr
    other = rmsnorm("train", "--resume", first.name, "--seed", "1", "--set", "train.batch=4", cwd=tmp_path)
    assert other.returncode == 2
    assert "run.seed" in other.stderr
    assert "train.batch=4" in other.stderr
    more = rmsnorm("train", "--resume", first.name, "--steps", "12", cwd=tmp_path)
    assert more.returncode in (0, 1), more.stderr
    whole = rmsnorm(*TINY, *FEW, "--steps", "12", "--name", "whole", cwd=tmp_path)
    assert whole.returncode in (0, 1), whole.stderr
    (second,) = set(runs(tmp_path)) - {first}

    def losses(run):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return sorted((r["optimizer"], r["path"], r["step"], r["loss"]) for r in records if "loss" in r)

    assert losses(first) == losses(second)
    assert rmsnorm("audit", first, cwd=tmp_path).returncode == 0


def test_a_signal_while_the_command_line_is_parsed_keeps_its_code_and_document(tmp_path):
    code = (
        "import os, signal, rmsnorm_cli.cli as c\n"
        "c.words = lambda given: os.kill(os.getpid(), signal.SIGTERM)\n"
        "c.main(['verify', '--dry-run', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 143
    assert json.loads(done.stdout)["exit_code"] == 143


@pytest.mark.case("B68")
def test_a_dtype_named_and_never_judged_is_not_a_pass(tmp_path):
    """An implementation that takes one of the two named dtypes: half of what was asked was judged."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def norm(x, gamma, eps):\n"
        "    if x.dtype != torch.float32:\n"
        "        raise ValueError('float32 alone')\n"
        "    return torch.nn.functional.rms_norm(x, x.shape[-1:], gamma, eps)\n"
    )
    asked = ("verify", "--impl", "mine:norm", "--rows", "1", "--cols", "3", "--only", "forward")
    assert rmsnorm(*asked, "--dtype", "float32", cwd=tmp_path).returncode == 0
    both = rmsnorm(*asked, "--dtype", "float32,float16", "--json", cwd=tmp_path)
    assert both.returncode == 1
    assert json.loads(both.stdout)["status"] == "inconclusive"
    assert "float32 alone" in both.stderr


def test_a_prediction_that_is_none_is_refused_before_a_run_is_made(tmp_path):
    done = rmsnorm("exercise", "--predict", "foo=1,sum=nan", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("exercise.predict") == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.interpreter  # the device on which `bench --wall` times PyTorch's own code by this machine's clock
def test_bench_compares_with_the_latest_run_before_it(tmp_path):
    """`latest-bench` means the run before, not the one that asks; a run that is not there is refused at once."""
    wall = ("bench", "--wall", "--device", "interpreter", "--impl", "torch", "--shape", "4x8", "--dtype", "float32")
    wall += ("--perimeter", "forward", "--samples", "4", "--calls", "2", "--warmup", "2")
    nothing = rmsnorm(*wall, "--compare", "latest-bench", cwd=tmp_path)
    assert nothing.returncode == 2
    assert not (tmp_path / "runs").exists()
    rmsnorm(*wall, cwd=tmp_path)
    (first,) = runs(tmp_path)
    again = rmsnorm(*wall, "--compare", "latest-bench", "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["compared"]["run"] == first.name, again.stderr


@pytest.mark.parametrize(
    "words", ["verify", "verify --dry-run", "clean --dry-run", "doctor", "report", "exercise --list"]
)
def test_a_current_folder_that_was_removed_is_named(words, tmp_path):
    """Every path begins there: 'No such file or directory' names none of them, and nothing to remove is no answer."""
    gone = tmp_path / "gone"
    gone.mkdir()
    start = f'cd "{gone}" && rmdir "{gone}" && exec "$@"'
    call = ["sh", "-c", start, "sh", sys.executable, "-P", "-m", "rmsnorm_cli", *words.split()]
    done = subprocess.run(call, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 4
    assert "the current folder was removed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.case("B82")
@pytest.mark.parametrize("command", ["verify", "bench"])
@pytest.mark.parametrize("package", ["liger", "quack", "fla"])
def test_a_package_that_is_missing_is_refused_before_anything_is_made(package, command, tmp_path):
    if importlib.util.find_spec(PACKAGES[package].module.partition(".")[0]):
        pytest.skip(f"{package} is installed here")
    done = rmsnorm(command, "--impl", f"torch,{package}", cwd=tmp_path)
    assert done.returncode == 4
    assert "pip install" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_that_no_shell_has_seen_is_the_home_folder(tmp_path):
    """In a TOML file or behind = it reaches the tool as it is; a folder called ~ is a trap for the next rm."""
    (tmp_path / "settings.toml").write_text('run.dir = "~/mine"\n')
    home = tmp_path / "home"
    home.mkdir()
    small = ("--impl=reference", "--set=gradcheck.rows=[1]", "--set=gradcheck.cols=[2]")
    for where, named in (("--config=settings.toml", "mine"), ("--runs-dir=~/yours", "yours")):
        done = rmsnorm("gradcheck", where, *small, cwd=tmp_path, HOME=str(home))
        assert done.returncode == 0, done.stderr
        assert (home / named / "latest-gradcheck" / "run.json").exists()
    listed = rmsnorm("clean", "--runs-dir=~/mine", "--dry-run", cwd=tmp_path, HOME=str(home))
    assert "-gradcheck" in listed.stdout + listed.stderr
    assert not (tmp_path / "~").exists()
