"""Checkpoints that survive a kill, a full disk and a stranger's file: atomic save, safe load, careful pruning.

A checkpoint is a file of `torch.save` that holds tensors and plain values only. Its zip comment carries the sha256 of
every byte before it, since PyTorch does not check the sums that the zip format has.
"""

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rmsnorm_cli.errors import EnvironmentProblem, RmsnormError
from rmsnorm_cli.rundir import atomic

FORMAT = 1
MARK = b"sha256:"
COMMENT = len(MARK) + 2 * hashlib.sha256().digest_size
NAME = re.compile(r"step-(\d{8,})\.pt")
PLAIN = (str, int, float, bool, type(None))

State = dict[str, Any]


class CheckpointError(RmsnormError):
    """A checkpoint that is torn, altered, hostile or of another run; the message names the file."""

    exit_code = 2


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that could be used, and one sentence for each newer one that had to be refused."""

    path: Path
    step: int
    state: State
    refused: tuple[str, ...]


def save(folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Write `state` as the checkpoint of `step`, whole or not at all, then prune to the last `keep` up to `step`.

    The file gets its name only after its bytes are on the disk. Raises EnvironmentProblem where it cannot be written;
    the earlier checkpoints are then as they were.
    """
    assert keep >= 1, "keeping no checkpoint would delete the one just written"
    target = folder / f"step-{step:08d}.pt"
    content = packed(step, state)
    try:
        with atomic.explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        atomic.write(target, content)
    except EnvironmentProblem as problem:
        raise EnvironmentProblem(
            f"the checkpoint of step {step} was not saved: {problem}. Earlier ones are intact: continue with --resume"
        ) from problem
    prune(folder, step, keep)
    return target


def load(path: Path) -> tuple[int, State]:
    """Read one checkpoint and return its step and state, tensors on the CPU; nothing in the file is executed.

    Raises CheckpointError, naming the file, where it is torn, altered, hostile or not one of ours.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is refused: it is not a regular file")
    try:
        with atomic.readable(path), path.open("rb") as file:  # the mark first: what is none of ours may be of any size
            file.seek(max(os.fstat(file.fileno()).st_size - COMMENT, 0))
            comment = file.read()
            file.seek(0)
            content = file.read() if comment.startswith(MARK) else b""
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there") from None
    if not comment.startswith(MARK):
        raise CheckpointError(f"{path} is refused: it is cut short, or was not written by this tool")
    if comment != MARK + hashlib.sha256(memoryview(content)[:-COMMENT]).hexdigest().encode():
        raise CheckpointError(f"{path} is refused: its bytes are not those that were saved (the sha256 differs)")
    try:
        held = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as problem:  # whatever a hostile file provokes: it is refused, never opened in an unsafe way
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors and plain values, and nothing of it was executed"
        ) from problem
    if type(held) is not dict or set(held) != {"format", "step", "state"} or foreign(held) is not None:
        raise CheckpointError(f"{path} is refused: it is not a checkpoint of this tool")
    if held["format"] != FORMAT:
        raise CheckpointError(f"{path} is refused: its format is {held['format']!r}, and this version reads {FORMAT}")
    named = NAME.fullmatch(path.name)
    if type(held["state"]) is not dict or type(held["step"]) is not int or (named and int(named[1]) != held["step"]):
        raise CheckpointError(f"{path} is refused: its name and its content are of different steps")
    return held["step"], held["state"]


def newest(folder: Path, refuse: Callable[[State], str | None] = lambda state: None) -> Found | None:
    """Return the checkpoint of the highest step that loads and that `refuse` has no reason against.

    Returns None where the folder has no checkpoint. Raises CheckpointError where it has some and none can be used.
    """
    refused: list[str] = []
    for path in reversed(listing(folder)):
        try:
            step, state = load(path)
        except CheckpointError as problem:
            refused.append(str(problem))
            continue
        reason = refuse(state)
        if reason is None:
            return Found(path, step, state, tuple(refused))
        refused.append(f"{path} is refused: {reason}")
    if refused:
        raise CheckpointError("\n".join(refused))
    return None


def listing(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder by ascending step; temporary files and strangers are none."""
    try:
        with atomic.readable(folder):
            named = [(NAME.fullmatch(name), folder / name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return []
    return [path for match, path in sorted(((int(m[1]), p) for m, p in named if m), key=lambda pair: pair[0])]


def clean(folder: Path) -> None:
    """Remove the temporary files that a killed process left; a run directory has one writer, so none is in use."""
    for path in folder.glob(".step-*"):
        if atomic.is_temporary(path):
            with contextlib.suppress(OSError):
                path.unlink()


def prune(folder: Path, written: int, keep: int) -> None:
    """Remove all but the last `keep` checkpoints up to `written`.

    Higher-numbered files are of another history (an old run, a torn end that a resume went back from): they neither
    count nor go.
    """
    own = [path for path in listing(folder) if step_of(path) <= written]
    for path in own[:-keep]:
        with contextlib.suppress(OSError):  # an old file that stays is no reason to call a good save bad
            path.unlink()


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    match = NAME.fullmatch(path.name)
    assert match, f"{path.name} is not the name of a checkpoint"
    return int(match[1])


def packed(step: int, state: Mapping[str, Any]) -> bytes:
    """Return the bytes of a checkpoint: a `torch.save` archive whose zip comment is the sha256 of all before it."""
    held = {"format": FORMAT, "step": step, "state": detached(state)}
    stranger = foreign(held)
    assert stranger is None, f"a checkpoint holds tensors and plain values only, and {stranger} is neither"
    buffer = io.BytesIO()
    torch.save(held, buffer)
    content = buffer.getvalue()
    assert content[-2:] == b"\0\0", "torch.save left a zip comment of its own"
    body = content[:-2] + COMMENT.to_bytes(2, "little")  # the last field of a zip file is its comment's length
    return body + MARK + hashlib.sha256(body).hexdigest().encode()


def detached(value: Any) -> Any:
    """Copy a nested value with every tensor alone in its memory, on the CPU, and every mapping a dict."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(detached(item) for item in value)
    return value


def foreign(value: Any, where: str = "checkpoint") -> str | None:
    """Return where a nested value holds something that is neither a tensor nor plain, or None."""
    if type(value) is dict:
        strange = [key for key in value if type(key) not in (str, int)]
        inside = ((item, f"{where}[{key!r}]") for key, item in value.items())
        return f"a key of {where}" if strange else next(filter(None, (foreign(*pair) for pair in inside)), None)
    if type(value) in (list, tuple):
        inside = ((item, f"{where}[{index}]") for index, item in enumerate(value))
        return next(filter(None, (foreign(*pair) for pair in inside)), None)
    return None if type(value) in (torch.Tensor, *PLAIN) else where
