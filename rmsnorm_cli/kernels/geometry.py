"""What a launch of the fused kernels is, and what follows from it: tiles, parts of a row, bytes of shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RING_SCRATCH = 1024
"""Bytes of shared memory that the reductions of a Gluon kernel take beside its rows."""


# --- launches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """How a forward is launched. `rows`: ROWS rows a program, columns in tiles A + B; `reload`: one row, read twice.

    `shared`: K programs a row, A columns each, `per_sm` programs on an SM; `loop`: one row in chunks of A.
    `ring`: at most A columns a program, room for `stages` pieces of a row in shared memory (a piece: 16 bytes a
    thread), a row finished `lag` rows late. `unaligned`: tiles A + B hold a row, and `stages` rows are in shared
    memory.
    """

    path: Literal["rows", "reload", "shared", "ring", "unaligned", "loop"]
    A: int
    B: int = 0
    rows: int = 1
    warps: int = 4
    stages: int = 1
    per_sm: int = 0
    registers: int | None = None
    lag: int = 0


@dataclass(frozen=True)
class Backward:
    """How a backward is launched. `walk`: tiles of `rows` rows, columns A + B; `reload`: one row, read twice.

    `shared`: K programs a row, A columns each; `chunks`: a row's mean first, then columns, A at a time.
    `ring`, `unaligned`: as in the forward. `per_sm` programs on an SM, loads `stages` - 1 tiles ahead. `registers`: the
    most a thread may use; what the compiler makes of a step changes with it, and so does its time: four points better,
    or far worse. `gone`: the dx of `walk` and `unaligned` leaves the cache as soon as it can.
    """

    path: Literal["walk", "reload", "shared", "ring", "unaligned", "chunks"]
    A: int
    B: int = 0
    rows: int = 1
    warps: int = 4
    stages: int = 3
    per_sm: int = 1
    registers: int | None = None
    lag: int = 0
    gone: bool = False


# --- tiles and parts --------------------------------------------------------------------------------------------------


def cover(N: int) -> tuple[int, int]:
    """Cover N columns by one power-of-two tile, or by two where one would leave over an eighth of its lanes idle."""
    block = 1 << (N - 1).bit_length()
    first = block // 2
    if block == N or block <= 8:
        return block, 0
    rest = 1 << (N - first - 1).bit_length()
    return (first, rest) if 8 * (first + rest) <= 7 * block else (block, 0)


def divided(config: Forward | Backward, N: int, itemsize: int) -> tuple[int, int, int]:
    """Return for a `ring`: how many programs share a row, how many columns each owns, in how many pieces.

    Whole lines of 128 bytes, so that no two programs write to one: the last program of a row owns what is left.
    """
    parts = -(-N // config.A)
    line = 128 // itemsize
    width = N if parts == 1 else -(-N // (parts * line)) * line
    return parts, width, -(-width * itemsize // (32 * config.warps * 16))


def whole_pieces(config: Forward | Backward, N: int, itemsize: int) -> int:
    """Return of how many pieces every program of a `ring` owns all columns, so that they need no mask."""
    parts, width, _ = divided(config, N, itemsize)
    return min(width, N - (parts - 1) * width) * itemsize // (32 * config.warps * 16)


def window(N: int, itemsize: int) -> tuple[int, int]:
    """Return tiles A and B of numbers that cover the vectors of 16 bytes in which a row lies, wherever it starts."""
    vector = 16 // itemsize
    A, B = cover((N + 2 * vector - 2) // vector * vector)
    return A, max(B, vector) if B else 0


def slot(config: Forward | Backward, N: int, itemsize: int) -> int:
    """Return how many numbers of shared memory a row of an `unaligned` launch takes: what is copied, what is read."""
    vector, unit = 16 // itemsize, 32 * config.warps
    return max(config.A + config.B, -(-(vector - 1 + -(-N // unit) * unit) // vector) * vector)


def unaligned_bytes(config: Forward | Backward, N: int, itemsize: int, tensors: int) -> int:
    """Return how much shared memory a program of an `unaligned` launch takes that keeps rows of so many tensors."""
    return config.stages * (tensors * slot(config, N, itemsize) * itemsize + 4) + RING_SCRATCH


def ring_bytes(config: Forward | Backward, tensors: int) -> int:
    """Return how much shared memory a program of a `ring` takes that keeps rows of so many tensors."""
    return tensors * config.stages * 32 * config.warps * 16 + RING_SCRATCH
