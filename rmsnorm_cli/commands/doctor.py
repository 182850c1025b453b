"""`rmsnorm doctor`: check this machine by using it, part by part, and say what to do about each part that fails.

Whatever could crash or hang runs in a process of its own: imports, the compiler, and one kernel on each device whose
results are compared with numbers worked out by hand.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rmsnorm_cli import environment
from rmsnorm_cli.console import Console
from rmsnorm_cli.errors import EnvironmentProblem, RmsnormError
from rmsnorm_cli.results import STATUSES, Outcome, Table

SECONDS = 180  # for one probe; compiling the first kernel takes a few
INSTALL = f"install with: {environment.INSTALL}"
COMPILER = "install a C compiler (apt-get install gcc libc6-dev), or name one in CC"
HEADERS = "install Python's headers (apt-get install python3-dev; official Python images have them)"
WRITABLE = "choose a folder that can be written"


@dataclass(frozen=True)
class Check:
    """One row: what was tried, how it came out, what was found, what to do; `needed` by the device asked for."""

    check: str
    status: Literal["ok", "missing", "wrong"]
    found: str
    remedy: str = ""
    needed: bool = True


@dataclass(frozen=True)
class Unusable(Outcome):
    """The outcome of a machine on which the device asked for does not work: exit 4."""

    @property
    def exit_code(self) -> int:
        """Return the exit code of an environment's fault."""
        return EnvironmentProblem.exit_code


def doctor(*, device: str | None = None, runs_dir: Path, console: Console) -> Outcome:
    """Check everything that the commands need on `device` (auto, cuda, cuda:N, interpreter) and in `runs_dir`.

    Raises ConfigError for a device that is no device. The outcome's exit code is 4 where a needed part fails.
    """
    asked = device or "auto"
    environment.cuda_index(asked)
    gpu = asked if asked.startswith("cuda") else "cuda"
    tasks: list[Callable[[], Check]] = [
        lambda: Check("python", "ok", platform.python_version()),
        lambda: importing("torch"),
        lambda: importing("triton"),
        lambda: importing("numpy"),
        compiler,
        headers,
        lambda: kernel("interpreter"),
        lambda: kernel(gpu),
    ]
    folders = [
        writable("runs folder", runs_dir, "--runs-dir"),
        writable("Triton cache", triton_cache(runs_dir), "TRITON_CACHE_DIR"),
    ]
    with console.progress("doctor", len(tasks)) as progress, ThreadPoolExecutor(max_workers=2) as pool:
        checks = []
        for check in pool.map(lambda task: task(), tasks):
            checks.append(check)
            progress.advance(text=check.check)
    return diagnosis(asked, [*checks, *folders, *peers()])


def diagnosis(asked: str, checks: Sequence[Check]) -> Outcome:
    """Decide which device works, mark the rows it needs, and return table, counts and exit code."""
    execution = chosen(asked, checks)
    idle = {"kernel on the interpreter"} if execution == "cuda" else {"kernel on CUDA", "C compiler", "Python.h"}
    if execution == "interpreter":
        idle.add("Triton cache")
    rows = [replace(check, needed=check.needed and check.check not in idle) for check in checks]
    faults = [row for row in rows if row.needed and row.status != "ok"]
    counts: dict[str, int] = dict.fromkeys(map(str, STATUSES), 0)
    counts["passed"] = sum(row.status == "ok" for row in rows)
    counts["failed"] = len(faults)
    counts["skipped"] = len(rows) - counts["passed"] - counts["failed"]
    summary = {"asked": asked, "checks": [asdict(row) for row in rows], "environment": environment.versions()}
    note = f"--device {asked} means {execution} here and " + (
        "works" if not faults else "does not work: " + "; ".join(f"{row.check}: {row.remedy}" for row in faults)
    )
    kind = Unusable if faults else Outcome
    return kind(
        "error" if faults else "passed", execution, counts, summary, tables=(shown(rows, execution),), notes=(note,)
    )


def chosen(asked: str, checks: Sequence[Check]) -> Literal["cuda", "interpreter"]:
    """Return what `choose_device` would take: CUDA for `auto` if it initialises, even if kernels then fail on it."""
    if asked == "interpreter" or (asked == "auto" and environment.interpreter_is_set()):
        return "interpreter"
    there = any(check.check == "kernel on CUDA" and check.status != "missing" for check in checks)
    return "cuda" if asked != "auto" or there else "interpreter"


def shown(rows: Sequence[Check], execution: str) -> Table:
    """Return the rows as a table."""
    cells = []
    for row in rows:
        ok = row.status == "ok"
        status = row.status if row.needed or ok else f"{row.status} (not needed)"
        cells.append((row.check, status, row.found, "" if ok else row.remedy))
    caption = "A kernel that computes right here says that the machine works, not that the kernels are right: verify."
    return Table(f"doctor ({execution})", ("check", "status", "found", "remedy"), tuple(cells), caption)


def importing(package: str) -> Check:
    """Import a package in a process of its own."""
    if not environment.is_there(package):
        return Check(package, "missing", "not installed", INSTALL)
    code, out, problem = python(f"import {package}; print({package}.__version__)")
    if code == 0:
        return Check(package, "ok", out.strip().splitlines()[-1])
    return Check(package, "wrong", problem, f"reinstall it: {environment.INSTALL}")


def compiler() -> Check:
    """Compile and run a trivial program with the compiler that Triton would take."""
    found = c_compiler()
    if found is None:
        return Check("C compiler", "missing", "neither CC nor gcc nor clang", COMPILER)
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "trivial")
        problem = compiled(found, "int main(void) { return 42; }", "-o", program)
        if problem is None and attempt([program])[0] == 42:
            return Check("C compiler", "ok", first_line(attempt([found, "--version"])[1]) or found)
    return Check("C compiler", "wrong", problem or f"what {found} compiled does not run", COMPILER)


def headers() -> Check:
    """Compile a file that includes Python.h, as Triton's launcher does."""
    found = c_compiler()
    scheme = sysconfig.get_default_scheme()
    include = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]  # Triton's choice
    if found is None:
        return Check("Python.h", "missing", "no compiler to try it with", COMPILER)
    if not (Path(include) / "Python.h").is_file():
        return Check("Python.h", "missing", f"not in {include}", HEADERS)
    source = '#include "Python.h"\nint version(void) { return PY_MAJOR_VERSION; }'
    with tempfile.TemporaryDirectory() as folder:
        problem = compiled(found, source, f"-I{include}", "-c", "-o", str(Path(folder) / "header.o"))
    return Check("Python.h", "wrong" if problem else "ok", problem or include, HEADERS if problem else "")


def c_compiler() -> str | None:
    """Return the C compiler that Triton would take, or None."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def compiled(compiler: str, source: str, *options: str) -> str | None:
    """Compile C source from standard input; return what went wrong in one line, or None."""
    code, _, problem = attempt([compiler, "-x", "c", "-", *options], given=source)
    return None if code == 0 else problem


def kernel(asked: str) -> Check:
    """Run one kernel on a device in a process of its own and compare its results."""
    name = "kernel on the interpreter" if asked == "interpreter" else "kernel on CUDA"
    call = f"from rmsnorm_cli.commands.doctor import probe; probe({asked!r})"
    with tempfile.TemporaryDirectory() as cache:  # a kernel compiled last week says nothing of today's compiler
        code, out, problem = python(call, TRITON_CACHE_DIR=cache)
    try:
        told = json.loads(out.strip().splitlines()[-1])
        remedy = no_gpu() if asked != "interpreter" and "no CUDA device" in told["found"] else told["remedy"]
        return Check(name, told["status"], told["found"], remedy)
    except (ValueError, LookupError, TypeError):
        return Check(
            name,
            "wrong",
            problem or f"no answer, exit code {code}",
            "run it again; if it stays, reinstall torch and triton",
        )


def no_gpu() -> str:
    """Return what to do where CUDA finds no device."""
    driver = environment.driver_version()
    if driver:
        return f"the driver is {driver}: update it for this torch, or make a GPU visible (CUDA_VISIBLE_DEVICES)"
    return "install NVIDIA's driver, or pass a GPU into the container (podman run --device nvidia.com/gpu=all)"


def probe(asked: str) -> None:
    """Choose the device, run the teaching kernel on it and print one line of JSON; for a process of its own."""
    try:
        device = environment.choose_device(asked)
    except RmsnormError as error:
        text, _, remedy = str(error).removeprefix(f"device {asked}: ").partition("; ")
        print(json.dumps({"status": "missing", "found": text, "remedy": remedy or INSTALL}))
        return
    try:
        wrong = miscalculated(device.torch_device)
    except Exception as error:  # any way in which a compiler or a driver can fail is a row, not the end
        text = f"{device.name}: {type(error).__name__}: {first_line(str(error))}"
        remedy = "check the rows above for the compiler and the headers; if they are ok, update the driver or triton"
        print(json.dumps({"status": "wrong", "found": text, "remedy": remedy}))
        return
    facts = environment.snapshot(device)
    about = device.name + (f", driver {facts['driver']}, CUDA {facts['versions']['cuda']}" if facts["driver"] else "")
    remedy = "this installation computes wrong numbers: do not use it; reinstall torch and triton" if wrong else ""
    print(json.dumps({"status": "wrong" if wrong else "ok", "found": wrong or about, "remedy": remedy}))


def miscalculated(torch_device: str) -> str | None:
    """Return how the teaching kernel's results differ from those worked out by hand, or None."""
    import torch

    from rmsnorm_cli.kernels import rms_norm

    def ours(values: Sequence[float]) -> list[float]:
        x = torch.tensor([list(values)], device=torch_device)
        y = rms_norm(x, torch.ones(len(values), device=torch_device), 1e-6, impl="rowwise")
        return [float(value) for value in y[0]]

    for values, right in (([3.0, 4.0], [0.848528, 1.131371]), ([1.0] * 257, [0.9999995] * 257)):
        got = ours(values)
        far = next((pair for pair in zip(got, right, strict=True) if not abs(pair[0] - pair[1]) < 2e-6), None)
        if far:
            return f"a row of {len(values)} gives {far[0]!r} where {far[1]} is right"
    return None


def triton_cache(runs_dir: Path) -> Path:
    """Return where compiled kernels go."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or runs_dir / environment.CACHE / "triton")


def writable(name: str, folder: Path, option: str) -> Check:
    """Write a file in a folder, made for it and removed again where it is not there yet."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
        free = shutil.disk_usage(folder).free
        return Check(name, "ok", f"{folder}, {free / 1024**3:.1f} GiB free")
    except OSError as error:
        return Check(name, "wrong", f"{folder}: {error.strerror}", f"{WRITABLE}: {option}")
    finally:
        with suppress(OSError):  # the first that is not empty, or that another has removed, ends it
            for path in made:
                path.rmdir()


def peers() -> list[Check]:
    """Look for other people's kernels: for comparison only, so none is needed."""
    found = []
    for name, package in environment.OPTIONAL.items():
        version = environment.version_of(package)
        status: Literal["ok", "missing"] = "ok" if version else "missing"
        found.append(Check(f"optional: {name}", status, version or "not installed", f"pip install {package}", False))
    return found


def python(code: str, **extra: str) -> tuple[int | None, str, str]:
    """Run Python code in a process of its own, where this package is and the current folder is not on the path."""
    settings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = [str(Path(environment.__file__).parents[1]), *filter(None, [settings.get("PYTHONPATH")])]
    settings["PYTHONPATH"] = os.pathsep.join(path)
    return attempt([sys.executable, "-P", "-c", code], settings=settings | extra)


def attempt(
    command: Sequence[str], given: str = "", settings: Mapping[str, Any] | None = None
) -> tuple[int | None, str, str]:
    """Run a command; return exit code (None: none), its output, and in one line what went wrong."""
    try:
        done = subprocess.run(
            command,
            input=given.encode(),
            capture_output=True,
            timeout=SECONDS,
            env=None if settings is None else dict(settings),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, "", f"no answer in {SECONDS} s"
    except OSError as error:
        return None, "", f"{command[0]}: {error.strerror}"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    problem = f"crashed with signal {-done.returncode}" if done.returncode < 0 else lines[-1][:200] if lines else ""
    return done.returncode, done.stdout.decode("utf-8", "replace"), problem or f"exit code {done.returncode}"


def first_line(text: str) -> str:
    """Return the first line of a text, at most 200 characters."""
    lines = text.strip().splitlines()
    return lines[0][:200] if lines else ""
