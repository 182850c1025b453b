"""Checkpoints: whole or absent whatever ends the process, refused by name when they are not ours, pruned with care."""

import errno
import hashlib
import io
import os
import pickle
import resource
import signal
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rmsnorm_cli import checkpoint
from rmsnorm_cli.checkpoint import CheckpointError, listing, load, newest, save
from rmsnorm_cli.errors import EnvironmentProblem
from rmsnorm_cli.rundir import atomic


def state(number: float = 1.0) -> dict[str, Any]:
    return {"weights": torch.full((64,), number), "nested": {"list": [1, 2.5, None, True, "é"], 3: (4, 5)}}


def steps(folder: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in listing(folder)]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.case("B76")
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
    saved = state() | {"generator": torch.Generator().manual_seed(3).get_state(), "none": torch.zeros(0, 7)}
    step, loaded = load(save(tmp_path, 12, saved, keep=1))
    assert step == 12
    assert torch.equal(loaded["weights"], saved["weights"])
    assert torch.equal(loaded["generator"], saved["generator"])
    assert loaded["none"].shape == (0, 7)
    assert loaded["nested"] == saved["nested"]


def test_a_view_is_saved_without_the_memory_around_it(tmp_path):
    large = torch.zeros(1_000_000)
    path = save(tmp_path, 1, {"view": large[3:5].requires_grad_()}, keep=1)
    assert path.stat().st_size < 10_000
    assert not load(path)[1]["view"].requires_grad


def test_a_checkpoint_is_an_ordinary_archive_of_torch_save(tmp_path):
    """Anyone reads it with torch.load(weights_only=True); unzip shows its sha256 as the comment."""
    path = save(tmp_path, 1, state(), keep=1)
    assert torch.load(path, weights_only=True)["state"]["nested"]["list"][1] == 2.5
    assert zipfile.ZipFile(path).comment.startswith(b"sha256:")


@pytest.mark.parametrize("value", [Path("x"), {1, 2}, object(), torch.float32], ids=lambda v: type(v).__name__)
def test_what_is_neither_tensor_nor_plain_is_not_saved(tmp_path, value):
    with pytest.raises(AssertionError, match=r"state'\]\['bad'\]"):
        save(tmp_path, 1, {"bad": value}, keep=1)
    assert not names(tmp_path)


# --- torn and hostile files -------------------------------------------------------------------------------------------


def test_every_cut_of_a_file_is_refused_by_name(tmp_path):
    path = save(tmp_path, 5, state(), keep=1)
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 97), len(whole) - 1, 1, 22}:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"step-00000005\.pt"):
            load(path)


def test_every_flipped_bit_is_refused(tmp_path):
    """PyTorch itself loads most of these without a word."""
    path = save(tmp_path, 5, state(), keep=1)
    whole = path.read_bytes()
    for position in range(0, len(whole), 41):
        path.write_bytes(
            whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :],
        )
        with pytest.raises(CheckpointError, match="refused"):
            load(path)


def test_more_bytes_at_the_end_are_refused(tmp_path):
    path = save(tmp_path, 5, state(), keep=1)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="refused"):
        load(path)


class Bomb:
    """Unpickled without care, it leaves a marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def sealed(content: bytes) -> bytes:
    """Put a valid comment on an archive, as an attacker who has read our source would."""
    body = content[:-2] + checkpoint.COMMENT.to_bytes(2, "little")
    return body + checkpoint.MARK + hashlib.sha256(body).hexdigest().encode()


def archive(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.case("B76")
@pytest.mark.parametrize(
    "content",
    [
        lambda bomb: sealed(archive({"format": 1, "step": 7, "state": {"weights": bomb}})),
        lambda bomb: sealed(archive(bomb)),
        lambda bomb: archive({"format": 1, "step": 7, "state": {"weights": bomb}}),
        lambda bomb: pickle.dumps(bomb),
        lambda bomb: pickle.dumps(bomb) + b"\0\0" + sealed(archive(bomb)),
        lambda bomb: sealed(pickle.dumps(bomb) + b"\0\0"),
    ],
    ids=["sealed state", "sealed object", "unsealed", "bare pickle", "pickle before archive", "sealed pickle"],
)
def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path, content):
    marker = tmp_path / "marker"
    path = tmp_path / "step-00000007.pt"
    path.write_bytes(content(Bomb(marker)))
    with pytest.raises(CheckpointError, match=r"step-00000007\.pt is refused") as refusal:
        load(path)
    assert not marker.exists()
    assert refusal.value.exit_code == 2
    assert "weights_only" not in str(refusal.value), "PyTorch's own message tells how to open it unsafely"
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "the bomb works, so its silence above means something"


@pytest.mark.case("B76")
@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ({"format": 1, "step": 7}, "not a checkpoint of this tool"),
        ([1, 2], "not a checkpoint of this tool"),
        ({"format": 1, "step": 7, "state": {"p": torch.nn.Parameter(torch.ones(2))}}, "not a checkpoint of this tool"),
        ({"format": 99, "step": 7, "state": {}}, "format is 99"),
        ({"format": 1, "step": 8, "state": {}}, "different steps"),
        ({"format": 1, "step": "7", "state": {}}, "different steps"),
    ],
    ids=["no state", "list", "parameter", "format", "renamed", "text"],
)
def test_a_sound_archive_that_is_not_ours_is_refused(tmp_path, held, reason):
    path = tmp_path / "step-00000007.pt"
    path.write_bytes(sealed(archive(held)))
    with pytest.raises(CheckpointError, match=reason):
        load(path)


@pytest.mark.case("B76")
def test_a_torchscript_archive_is_refused(tmp_path):
    path = tmp_path / "step-00000007.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, which is its own affair
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(path))
    path.write_bytes(sealed(path.read_bytes()))
    with pytest.raises(CheckpointError, match="refused"):
        load(path)


def test_the_newest_is_the_highest_number_that_can_be_used(tmp_path):
    """Numbers, not names or times: 100000000 is above 99999999; torn ones are named and passed over."""
    for step in (99_999_999, 100_000_000, 5):
        save(tmp_path, step, state(step), keep=9)
    assert newest(tmp_path).step == 100_000_000
    torn = listing(tmp_path)[-1]
    torn.write_bytes(torn.read_bytes()[:1000])
    found = newest(tmp_path)
    assert found.step == 99_999_999
    assert torn.name in found.refused[0]
    assert torn.exists(), "nothing is lost: a torn file stays for whoever wants to look at it"


def test_a_checkpoint_of_another_run_is_passed_over_with_its_reason(tmp_path):
    save(tmp_path, 1, {"run": "ours"}, keep=9)
    save(tmp_path, 9, {"run": "theirs"}, keep=9)
    found = newest(tmp_path, lambda held: None if held["run"] == "ours" else "it belongs to another run")
    assert found.step == 1
    assert "step-00000009.pt is refused: it belongs to another run" in found.refused[0]


def test_nothing_usable_is_an_error_and_nothing_at_all_is_none(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None
    (tmp_path / "step-00000001.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000001\.pt"):
        newest(tmp_path)


def test_strangers_in_the_folder_are_no_checkpoints(tmp_path):
    save(tmp_path, 3, state(), keep=1)
    for name in ("step-3.pt", "step-00000009.pt.bak", "xstep-00000009.pt", "step-000000aa.pt"):
        (tmp_path / name).write_bytes(b"?")
    assert steps(tmp_path) == [3]


# --- pruning ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("B79")
def test_the_last_k_stay(tmp_path):
    for step in range(10, 60, 10):
        save(tmp_path, step, state(), keep=2)
    assert steps(tmp_path) == [40, 50]


@pytest.mark.case("B79")
def test_a_stale_higher_number_never_costs_the_one_just_written(tmp_path):
    """Of two to keep and a stale 5000: 100 and 200 are there after 200, and still after a save of 300 that fails."""
    save(tmp_path, 5000, state(), keep=2)
    for step in (100, 200):
        save(tmp_path, step, state(step), keep=2)
    assert steps(tmp_path) == [100, 200, 5000]
    with full_disk(), pytest.raises(EnvironmentProblem):
        save(tmp_path, 300, state(), keep=2)
    assert [load(path)[0] for path in listing(tmp_path)] == [100, 200, 5000]
    save(tmp_path, 300, state(), keep=2)
    assert steps(tmp_path) == [200, 300, 5000]


@pytest.mark.case("B79")
def test_keeping_one_keeps_the_one_just_written(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, state(step), keep=1)
        assert steps(tmp_path) == [step]


@pytest.mark.case("B79")
@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused_before_anything_is_written(tmp_path, keep):
    with pytest.raises(AssertionError):
        save(tmp_path, 1, state(), keep=keep)
    assert not names(tmp_path)


def test_an_old_file_that_cannot_go_does_not_spoil_a_good_save(tmp_path):
    (tmp_path / "step-00000001.pt").mkdir()
    save(tmp_path, 2, state(), keep=1)
    assert load(tmp_path / "step-00000002.pt")[0] == 2


# --- disks and kills --------------------------------------------------------------------------------------------------


@contextmanager
def full_disk() -> Iterator[None]:
    """Let the kernel refuse every write of this process beyond one KiB of a file."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.case("B74")
def test_a_disk_that_takes_no_more_costs_no_earlier_checkpoint_and_leaves_no_rest(tmp_path):
    save(tmp_path, 1, state(1), keep=3)
    with full_disk(), pytest.raises(EnvironmentProblem, match=r"step 2 was not saved.*--resume") as problem:
        save(tmp_path, 2, state(2), keep=1)
    assert problem.value.exit_code == 4
    assert names(tmp_path) == {"step-00000001.pt"}
    assert load(tmp_path / "step-00000001.pt")[0] == 1


@pytest.mark.case("B74")
def test_a_full_disk_is_called_full(tmp_path, monkeypatch):
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.os, "fsync", refuse)
    with pytest.raises(EnvironmentProblem, match="no space is left"):
        save(tmp_path, 2, state(), keep=1)
    assert not names(tmp_path)


@pytest.mark.case("B74")
@pytest.mark.parametrize("folder", ["file/checkpoints", "file"])
def test_a_folder_that_cannot_be_is_one_plain_sentence(tmp_path, folder):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentProblem, match="was not saved"):
        save(tmp_path / folder, 2, state(), keep=1)


@pytest.mark.case("B74")
def test_leftovers_of_killed_processes_are_ignored_and_cleaned(tmp_path):
    save(tmp_path, 1, state(), keep=1)
    rest = tmp_path / ".step-00000009.pt.4711.tmp"
    rest.write_bytes(b"half")
    assert newest(tmp_path).step == 1
    save(tmp_path, 2, state(), keep=1)
    assert names(tmp_path) == {"step-00000002.pt"}


def died(work: Callable[[], object]) -> int:
    """Do `work` in a forked process and return the status it ended with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on fork beside threads: this child only saves
        child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.case("B74")
@pytest.mark.parametrize(
    ("module", "call", "survivor"),
    [
        (atomic.os, "fsync", 1),
        (atomic.os, "replace", 1),
        (atomic, "sync_folder", 2),
        (checkpoint, "prune", 2),
    ],
    ids=["before the bytes are on disk", "before the name is", "before the folder is", "before pruning"],
)
def test_a_kill_at_every_stage_of_a_save_leaves_a_whole_newest_checkpoint(tmp_path, module, call, survivor):
    save(tmp_path, 1, state(1), keep=1)

    def work() -> None:
        setattr(module, call, lambda *arguments: os._exit(9))
        save(tmp_path, 2, state(2), keep=1)

    assert died(work) == 9
    found = newest(tmp_path)
    assert found.step == survivor
    assert torch.equal(found.state["weights"], state(survivor)["weights"])
    save(tmp_path, 3, state(3), keep=1)
    assert names(tmp_path) == {"step-00000003.pt"}


@pytest.mark.case("B74")
def test_a_file_that_ends_without_the_mark_is_refused_unread(tmp_path):
    """A preallocated or foreign file may be larger than the memory: its end says that it is none of ours."""
    path = tmp_path / "step-00000007.pt"
    path.touch()
    os.truncate(path, 2**36)
    with pytest.raises(CheckpointError, match="cut short, or was not written by this tool"):
        load(path)
