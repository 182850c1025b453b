"""What a user sees where kernels cannot be compiled, or kept once compiled: a sentence and exit 4, or a success.

Never a verdict about the kernel, never a traceback, and a run directory that says what happened. Anywhere the launch is
made to meet what a compilation meets; on a GPU the disk is full, the folder read-only, the compiler missing.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rmsnorm_cli import cli
from rmsnorm_cli.kernels.program import Program

ROOT = Path(__file__).parents[2]
SMALL = ("--rows", "1", "--cols", "257", "--only", "forward", "--dtype", "float32")
COMMANDS = {
    "verify": ("verify", *SMALL),
    "gradcheck": ("gradcheck",),
    "train": ("train", "--steps", "2", "--set", "train.twins=1", "--set", "train.seed_noise_runs=0"),
}
CACHE = "/some/where/triton"
PROBLEMS = {
    "a full disk": OSError(errno.ENOSPC, "No space left on device"),
    "a read-only folder": OSError(errno.EROFS, "Read-only file system", f"{CACHE}/ABC"),
    "a vanished folder": FileNotFoundError(errno.ENOENT, "No such file or directory", f"{CACHE}/ABC/kernel.json"),
    "a vanished library": ImportError(
        f"{CACHE}/ABC/launcher.so: cannot open shared object file: No such file or directory"
    ),
    "a half deleted kernel": KeyError("Unknown key: 'cubin'"),  # what Triton says of it
    "a failing compiler": subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    "no compiler": RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
}
REMEDY = f"compiled kernels are kept in {CACHE}: free space there, or set TRITON_CACHE_DIR to a folder"


@pytest.mark.parametrize(
    ("command", "problem"),
    [*(("verify", what) for what in PROBLEMS), ("gradcheck", "a full disk"), ("train", "no compiler")],
)
def test_it_is_the_machine_and_not_the_kernel(command, problem, tmp_path, monkeypatch, capsys):
    """One sentence with the remedy, exit 4, and the same in run.json; no case is called failed."""

    def meet(*_: object) -> None:
        raise PROBLEMS[problem]

    monkeypatch.setenv("TRITON_CACHE_DIR", CACHE)
    monkeypatch.setattr(Program, "launch", meet)
    with pytest.raises(SystemExit) as end:
        cli.main([*COMMANDS[command], "--impl", "fused", "--runs-dir", str(tmp_path)])
    said = capsys.readouterr().err
    assert end.value.code == 4
    assert "Traceback" not in said
    assert "internal error" not in said
    assert (REMEDY if isinstance(PROBLEMS[problem], OSError | KeyError) else "see: rmsnorm doctor") in said
    facts = json.loads((tmp_path / "latest" / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("error", 4)
    assert facts["message"] in said
    recorded = tmp_path / "latest" / "metrics.jsonl"
    assert not recorded.exists() or '"failed"' not in recorded.read_text()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def started(folder: Path, cache: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    """Start a small `verify` in a process of its own, with the compiled kernels in `cache`."""
    ours = {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "rmsnorm_cli", "verify", *SMALL, "--impl", "fused", "--device", "cuda"]
    return subprocess.Popen(
        [*command, "--runs-dir", str(folder), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ours | environment,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait, and return the exit code and what was said; never a traceback."""
    out, said = process.communicate(timeout=200)
    assert "Traceback" not in said + out, said[-3000:]
    assert "internal error" not in said, said[-3000:]
    return process.returncode, said


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory, where that is allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip("mounting a file system needs more rights")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.gpu
def test_eight_processes_share_one_cold_cache(tmp_path):
    """All compile the same kernels at once: eight passes in eight run directories, and a cache that serves a ninth."""
    cache = tmp_path / "cache"
    processes = [started(tmp_path / "runs", cache) for _ in range(8)]
    assert [ended(process)[0] for process in processes] == [0] * 8
    assert len(list((tmp_path / "runs").glob("2*-verify*"))) == 8
    before = sorted(cache.rglob("*.cubin"))
    assert before
    assert ended(started(tmp_path / "runs", cache))[0] == 0
    assert sorted(cache.rglob("*.cubin")) == before, "the ninth compiled anew"


@pytest.mark.gpu
def test_a_read_only_cache_serves_what_it_holds_and_says_what_it_cannot_take(tmp_path):
    with mounted(tmp_path / "disk", "size=256m") as disk:
        assert ended(started(tmp_path / "runs", disk))[0] == 0
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert ended(started(tmp_path / "runs", disk))[0] == 0, "all kernels are there"
        code, said = ended(started(tmp_path / "runs", disk, "--dtype", "float16"))
    assert code == 4
    assert f"compiled kernels are kept in {disk}: free space there, or set TRITON_CACHE_DIR" in said


@pytest.mark.gpu
def test_a_full_disk_under_the_cache_is_a_sentence(tmp_path):
    with mounted(tmp_path / "disk", "size=32k") as disk:
        code, said = ended(started(tmp_path / "runs", disk))
    assert code == 4
    assert f"No space left on device; compiled kernels are kept in {disk}" in said
    facts = json.loads((tmp_path / "runs" / "latest" / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("error", 4)


@pytest.mark.gpu
def test_a_cache_that_is_deleted_while_kernels_are_compiled(tmp_path):
    """Again and again, under a running command: it passes, or says in one sentence what it missed."""
    cache, over = tmp_path / "cache", threading.Event()

    def delete() -> None:
        while not over.wait(0.3):
            shutil.rmtree(cache, ignore_errors=True)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        code, said = ended(started(tmp_path / "runs", cache, "--cols", "64,1000,4096"))  # and 257
    finally:
        over.set()
        thread.join()
    assert code in (0, 4)
    assert code == 0 or str(cache) in said


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["false", "/no/such/compiler"])
def test_a_compiler_that_does_not_work_is_a_sentence(compiler, tmp_path):
    """CC names one that fails, or none at all: exit 4, and no word about the kernel."""
    code, said = ended(started(tmp_path / "runs", tmp_path / "cache", CC=compiler))
    assert code == 4
    assert "see: rmsnorm doctor" in said or "No such file or directory" in said
