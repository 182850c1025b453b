"""`rmsnorm doctor`: each part is tried, each failure is a row with its remedy, exit 4 is about the device asked for."""

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from rmsnorm_cli import environment
from rmsnorm_cli.commands import doctor as module
from rmsnorm_cli.commands.doctor import Check, diagnosis, doctor
from rmsnorm_cli.console import Console
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.results import Outcome

GOOD = [
    Check(name, "ok", "")
    for name in ("python", "torch", "triton", "numpy", "C compiler", "Python.h", "kernel on the interpreter")
] + [Check("kernel on CUDA", "ok", ""), Check("runs folder", "ok", ""), Check("Triton cache", "ok", "")]


def but(name: str, status: Any = "wrong", *others: Check) -> list[Check]:
    """Return a good machine with one part that is not."""
    checks = [Check(name, status, "found this", "do that") if check.check == name else check for check in GOOD]
    return [{other.check: other for other in others}.get(check.check, check) for check in checks]


NO_GPU = Check("kernel on CUDA", "missing", "no CUDA device is usable on this machine", "get one")


def test_on_this_machine_every_part_is_tried(tmp_path, device, interpreter_runs):
    """The whole of it, for real: each row has a verdict, the device found works, the interpreter where it can."""
    outcome = doctor(device="auto", runs_dir=tmp_path / "runs", console=Console(json=False, quiet=True))
    rows = {row["check"]: row for row in outcome.summary["checks"]}
    works = device != "cpu" or interpreter_runs
    assert (outcome.status, outcome.exit_code) == (("passed", 0) if works else ("error", 4))
    assert outcome.execution == ("cuda" if device.startswith("cuda") else "interpreter")
    assert {check.check for check in GOOD} <= set(rows)
    assert (rows["kernel on the interpreter"]["status"] == "ok") is interpreter_runs
    assert all(row["remedy"] for row in rows.values() if row["status"] != "ok")
    assert not (tmp_path / "runs").exists(), "looking must leave nothing behind"


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_is_compiled_and_its_result_compared(tmp_path):
    """The row names the card and its driver, and a card that is not there is exit 4."""
    quiet = Console(json=False, quiet=True)
    outcome = doctor(device="cuda:0", runs_dir=tmp_path / "runs", console=quiet)
    (row,) = [row for row in outcome.summary["checks"] if row["check"] == "kernel on CUDA"]
    assert (row["status"], outcome.exit_code) == ("ok", 0)
    assert environment.driver_version() in row["found"]
    assert doctor(device="cuda:99", runs_dir=tmp_path / "runs", console=quiet).exit_code == 4


def test_a_word_that_is_no_device_is_a_usage_error(tmp_path):
    with pytest.raises(ConfigError, match="auto, cuda"):
        doctor(device="gpu", runs_dir=tmp_path, console=Console())


@pytest.mark.parametrize(
    ("asked", "checks", "execution", "code"),
    [
        ("auto", GOOD, "cuda", 0),
        ("auto", but("kernel on CUDA", "missing"), "interpreter", 0),
        ("auto", but("kernel on CUDA", "wrong"), "cuda", 4),
        ("cuda", but("kernel on CUDA", "missing"), "cuda", 4),
        ("cuda:3", but("kernel on CUDA", "missing"), "cuda", 4),
        ("cuda", but("C compiler", "missing"), "cuda", 4),
        ("cuda", but("Python.h", "missing"), "cuda", 4),
        ("cuda", but("Triton cache"), "cuda", 4),
        ("cuda", but("kernel on the interpreter"), "cuda", 0),
        ("interpreter", but("kernel on CUDA", "missing"), "interpreter", 0),
        ("interpreter", but("kernel on CUDA", "wrong"), "interpreter", 0),
        ("interpreter", but("kernel on the interpreter"), "interpreter", 4),
        ("interpreter", but("C compiler", "missing"), "interpreter", 0),
        ("interpreter", but("Triton cache"), "interpreter", 0),
        ("interpreter", but("numpy", "missing"), "interpreter", 4),
        ("auto", but("C compiler", "missing", NO_GPU), "interpreter", 0),
        ("auto", but("runs folder", "wrong", NO_GPU), "interpreter", 4),
    ],
)
def test_the_exit_code_is_about_the_device_that_was_asked_for(monkeypatch, asked, checks, execution, code):
    """A part that this device does not need is reported and forgiven; one that it needs is exit 4 and in the note."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    outcome = diagnosis(asked, checks)
    assert (outcome.execution, outcome.exit_code) == (execution, code)
    assert outcome.status == ("error" if code else "passed")
    assert ("do that" in outcome.notes[0] or "get one" in outcome.notes[0]) is bool(code)
    assert sum(outcome.counts.values()) == len(checks)


def test_auto_follows_the_variable(monkeypatch):
    """With TRITON_INTERPRET=1 `auto` runs on the interpreter, so that is the device to judge."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert diagnosis("auto", GOOD).execution == "interpreter"


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("echo broken >&2; exit 1", "broken"),
        ("kill -SEGV $$", "crashed with signal 11"),
        ("exit 0", "does not run"),
    ],
)
def test_a_compiler_is_judged_by_what_it_compiles(tmp_path, monkeypatch, text, found):
    """A compiler that fails, crashes, or produces nothing is wrong, though it is there."""
    monkeypatch.setenv("CC", program(tmp_path, text))
    check = module.compiler()
    assert check.status == "wrong"
    assert found in check.found
    assert "gcc" in check.remedy


def test_no_compiler_at_all_is_missing(monkeypatch):
    """Without CC, gcc and clang both rows say so; a CC that is not there is wrong."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert (module.compiler().status, module.headers().status) == ("missing", "missing")
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert "No such file" in module.compiler().found


def test_headers_are_judged_by_including_them(tmp_path, monkeypatch):
    """A folder without Python.h is missing; a Python.h that does not compile is wrong."""
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert module.headers().status == "missing"
    (tmp_path / "Python.h").write_text("#error not for you\n")
    assert module.headers().status == "wrong"


@pytest.mark.parametrize(
    ("body", "status", "found"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "wrong", "libcudart.so.13"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "wrong", "crashed with signal 11"),
        ("__version__ = '9.9'", "ok", "9.9"),
    ],
)
def test_a_package_is_judged_by_importing_it(tmp_path, monkeypatch, body, status, found):
    """A broken or crashing import is a row, not the end of doctor."""
    (tmp_path / "strange_package.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = module.importing("strange_package")
    assert check.status == status
    assert found in check.found


def test_a_package_that_is_not_there_is_missing():
    check = module.importing("no_such_package")
    assert check.status == "missing"
    assert "pip install" in check.remedy


def test_the_current_folder_does_not_pass_for_an_installation(tmp_path, monkeypatch):
    """A file of the user's called numpy.py must not make doctor call NumPy broken."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(tmp_path)
    assert module.importing("numpy").status == "ok"


def test_a_kernel_that_computes_wrong_numbers_is_found(monkeypatch):
    """The comparison can fail: dividing by a padded 512 instead of 257 is told with the number it gives."""
    import torch

    from rmsnorm_cli import kernels

    def padded(x: torch.Tensor, gamma: torch.Tensor, eps: float, impl: str) -> torch.Tensor:
        block = 1 << (x.shape[-1] - 1).bit_length()
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / block + eps) * gamma

    monkeypatch.setattr(kernels, "rms_norm", padded)
    assert "a row of 257 gives 1.411" in str(module.miscalculated("cpu"))
    monkeypatch.setattr(kernels, "rms_norm", lambda x, gamma, eps, impl: x * float("nan"))
    assert "nan" in str(module.miscalculated("cpu"))


@pytest.mark.parametrize(
    ("code", "status", "found"),
    [
        ("import os; os.abort()", "wrong", "crashed with signal 6"),
        ("print('not json')", "wrong", "exit code 0"),
        ("import time; time.sleep(60)", "wrong", "no answer in 2 s"),
        ('print(\'{"status": "ok", "found": "GPU", "remedy": ""}\')', "ok", "GPU"),
    ],
)
def test_a_probe_that_crashes_hangs_or_babbles_is_a_row(monkeypatch, code, status, found):
    """Whatever happens to the process that runs the kernel, doctor goes on and says what it saw."""
    monkeypatch.setattr(module, "SECONDS", 2)
    monkeypatch.setattr(module, "python", lambda _, **extra: module.attempt([sys.executable, "-I", "-c", code]))
    check = module.kernel("cuda")
    assert check.status == status
    assert found in check.found


@pytest.mark.parametrize(("driver", "said"), [(None, "nvidia.com/gpu=all"), ("470.1", "the driver is 470.1")])
def test_a_missing_gpu_is_explained_by_what_the_machine_has(monkeypatch, driver, said):
    """Without a driver: install one or pass the GPU in; with one: it is too old or hides the GPU."""
    told = '{"status": "missing", "found": "no CUDA device is usable on this machine", "remedy": "see: rmsnorm doctor"}'
    monkeypatch.setattr(module, "python", lambda _, **extra: (0, told, ""))
    monkeypatch.setattr(environment, "driver_version", lambda: driver)
    check = module.kernel("cuda")
    assert said in check.remedy


def test_a_folder_is_judged_by_writing_in_it(tmp_path):
    """A folder below a file cannot be written; one that has to be made is removed again; one that is there stays."""
    (tmp_path / "file").write_text("mine")
    assert module.writable("runs folder", tmp_path / "file" / "runs", "--runs-dir").status == "wrong"
    assert module.writable("runs folder", tmp_path / "a" / "b", "--runs-dir").status == "ok"
    assert os.listdir(tmp_path) == ["file"]
    assert module.writable("runs folder", tmp_path, "--runs-dir").status == "ok"
    assert tmp_path.is_dir()


def test_the_outcome_keeps_its_exit_code_through_json():
    """The document of a failing doctor holds every row, so a pipeline can read which part it was."""
    outcome = diagnosis("cuda", but("kernel on CUDA", "missing"))
    assert isinstance(outcome, Outcome)
    (fault,) = [row for row in outcome.summary["checks"] if row["status"] != "ok"]
    assert fault == {
        "check": "kernel on CUDA",
        "status": "missing",
        "found": "found this",
        "remedy": "do that",
        "needed": True,
    }
