"""The launch tables of the fused kernels: by pass, row width and dtype, measured on one H200 and frozen.

They depend on N, the dtype and how rows lie, not on M, so that a row keeps its bits whatever batch it sits in. (The
column sum's tile depends on how many programs sum: dgamma is a sum over the batch anyway; and what the cache is told
changes no bit.) Nothing is timed at run time. How they were found, and what lost, is in docs/kernels.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rmsnorm_cli.kernels.geometry import Backward, Forward, cover, window


def fitting(elements: int, width: int) -> int:
    """Return how many rows of that width a tile of so many elements holds: a power of two from 1 to 256."""
    return 1 << min(max(elements // width, 1).bit_length() - 1, 8)


def odd(N: int, itemsize: int) -> bool:
    """Say whether rows of N columns do not start on 4 bytes, so that every access is of one element."""
    return N * itemsize % 4 != 0


def whole(N: int, itemsize: int) -> bool:
    """Say whether rows of N columns are whole vectors of 16 bytes, so that reading one a second time costs little."""
    return N * itemsize % 16 == 0


def forward_ring(N: int, itemsize: int) -> Forward | None:
    """Choose the forward launch for rows that pass through a ring in shared memory, or None where that is no faster.

    bf16 on one H200, 2026-11-30, share of a plain stream, without (`reload`, `shared`) and with: 79 → 90 % at 36864
    columns, 83 → 90 at 40960, 78 → 91 at 73728, 86 → 92 at 131072, 60 → 82 at 1048576.
    """
    size = N * itemsize
    if itemsize == 2 and 65536 < size <= 94208:
        return Forward("ring", 47104, warps=16, stages=24, per_sm=1, registers=104)
    if itemsize == 8 or size <= 131072:
        return None
    return Forward("ring", 4096 // itemsize, warps=2, stages=20, per_sm=10, registers=96, lag=3)


def chosen(limits: Sequence[tuple[int, ...]], N: int) -> list[int]:
    """Return what follows the first of these numbers of columns that is enough."""
    return next(launch for most, *launch in limits if most >= N)


def forward_unaligned(N: int, itemsize: int) -> Forward | None:
    """Choose the forward launch for rows that do not start on 4 bytes, or None where it is not known to be faster.

    fp16 on one H200, 2026-11-30, share of a plain stream, without (`rows`) and with: 74 → 81 % at 769 columns, 58 → 84
    at 3073, 62 → 83 at 8191, 45 → 80 at 12289.
    """
    if itemsize != 2 or not 640 < N <= 16384 or N in (1024, 2048, 4096):  # slices of these are faster in registers
        return None
    limits = [(1536, 2, 2, 8), (2560, 4, 2, 4), (3328, 4, 2, 3), (3840, 4, 3, 2), (5120, 4, 2, 2), (8191, 4, 3, 1)]
    limits += [(8192, 16, 3, 1), (12800, 4, 3, 1), (16384, 16, 2, 1)]
    warps, stages, per_sm = chosen(limits, N)
    return Forward("unaligned", *window(N, itemsize), warps=warps, stages=stages, per_sm=per_sm)


def narrow_forward(N: int, itemsize: int, aligned: int) -> Forward:
    """Choose the forward launch for rows of up to 1024 columns: a tile of them, 16 numbers a thread as a rule.

    Rows that are not whole vectors of 16 bytes, one H200, 2026-11-30, share of a plain stream, by that rule and now:
    fp16 77 → 80 % at 129 columns, 78 → 82 at 257, 80 → 93 at 258; fp32 95 → 98 at 513, 96 → 99 at 1024 off 16 bytes.
    """
    A, B = cover(N)
    if aligned < 16 and N > 32:
        if itemsize == 4:
            limits = [(80, 8, 1), (192, 4, 1), (384, 2, 1), (640, 1, 1), (1024, 1 if whole(N, itemsize) else 2, 4)]
        else:
            limits = [(40, 16, 1), (96, 8 if odd(N, itemsize) else 16, 1), (192, 8, 1), (384, 4, 1)]
            limits += [(512, 4, 1 if whole(N, itemsize) else 2), (640, 2, 1), (1024, 2, 2)]
        rows, warps = chosen(limits, N)
        return Forward("rows", A, B, rows, warps)
    if itemsize == 4 and A + B > 512:
        return Forward("rows", A, B, 1, 2)
    rows = max(fitting(1024, A + B), 2)
    return Forward("rows", A, B, rows, min(max(rows * A // 512, 1), 4))


def held_forward(N: int, itemsize: int, aligned: int) -> Forward | None:
    """Choose the forward launch for rows of over 1024 columns that stay in registers, or None where that is no faster.

    One H200, 2026-11-30, share of a plain stream. Whole vectors, by reading twice and now: bf16 99 → 100 % at 4096
    columns, 96 → 99 at 7168; fp32 98 → 100 at 8192, 94 → 96 at 24576. Others, by eight warps and now: bf16 85 → 94 %
    at 2562 columns, 78 → 91 at 5122; fp32 94 → 97 % at 3073. 4096 columns off 16 bytes: fp32 97 → 101 %, bf16 90 → 92.
    """
    A, B = cover(N)
    if aligned == 16:
        limits = [(1536, 2), (3584, 4), (5120, 8), (6144, 4), (10240, 8)]
        if itemsize == 4:
            limits = [(1536, 2), (3072, 4), (10240, 16), (12288, 32), (16384, 0), (24576, 16)]
        (warps,) = chosen([*limits, (N, 0)], N)  # 0: read twice
        return Forward("rows", A, B, 1, warps) if warps else None
    if A + B > 8192:
        return Forward("rows", A, B, 1, 16) if N * itemsize <= 32768 and B == 0 else None
    if whole(N, itemsize):
        return Forward("rows", A, B, 1, min(A * itemsize // (1024 if aligned >= 4 else 2048), 4 * itemsize))
    return Forward("rows", A, B, 1, 2 if itemsize == 2 and N <= 3072 and not odd(N, itemsize) else 4)


def stays(M: int, N: int, itemsize: int) -> bool:
    """Say whether x is told to stay in the cache where it is read once, by its bytes: no bit of a row depends on it.

    One H200, 2026-11-30: 2 % faster at 65536 x 257 in fp32, 1 to 5 at 2048 x 4096 in bf16, the same at 1024 x 1024,
    2 to 4 % slower at 128 x 257. Rows of an odd number of 16-bit numbers lose 1 to 2 %.
    """
    return not odd(N, itemsize) and M * N * itemsize >= STAYING


def reread_forward(N: int, itemsize: int) -> Forward:
    """Choose the forward launch for rows of up to 128 KiB that are read twice: how many warps."""
    A, B = cover(N)
    if A + B > 32768:
        A, B = 1 << (N - 1).bit_length(), 0  # a second tile loses more here than idle lanes do
    if itemsize == 4:
        warps = 16 if A == 16384 and 0 < B <= 4096 else 32
    elif B == 0:
        warps = 8 if A == 16384 else 16 if N < 32768 else 32
    else:
        warps = 8 if A == 16384 and B <= 2048 else 16
    return Forward("reload", A, B, 1, warps)


def forward_table(N: int, itemsize: int, ring: bool = False, aligned: int | None = None) -> Forward:
    """Choose the forward launch for rows of N columns of `itemsize` bytes; `ring`: the card has room for one.

    `aligned`: how many bytes, 16 at most, divide N and where each row starts; by default, as in memory of its own.
    """
    aligned = math.gcd(16, N * itemsize) if aligned is None else aligned
    through_ring = forward_ring(N, itemsize) if ring else None
    if through_ring is not None:
        return through_ring
    A, B = cover(N)
    width = A + B
    if itemsize == 8:
        return Forward("rows", A, B, fitting(512, width), 4) if width <= 4096 else Forward("loop", 2048, warps=8)
    if width <= 1024:
        return narrow_forward(N, itemsize, aligned)
    held = held_forward(N, itemsize, aligned)
    if held is not None:
        return held
    if N * itemsize <= 131072:
        return reread_forward(N, itemsize)
    if itemsize == 4:
        return Forward("shared", 2048, warps=4, stages=2, per_sm=5, registers=96)
    return Forward("shared", 2048, warps=2, stages=2, per_sm=10, registers=96)


def forward_by_chunks(itemsize: int) -> Forward:
    """Return the launch for rows of any width that waits for nobody."""
    return Forward("loop", 16384 // itemsize, warps=16 if itemsize == 2 else 8, stages=3)


def backward_ring(N: int, itemsize: int) -> Backward | None:
    """Choose the backward launch for rows that pass through a ring in shared memory, or None where that is no faster.

    bf16 on one H200, 2026-11-30, share of a plain stream, without (`reload`, `shared`) and with: 83 → 91 % at 16384
    columns, 74 → 91 at 20480, 74 → 89 at 32768, 70 → 86 at 65536, 72 → 87 (a sketch) at 131072, 73 → 86 at 262144.
    """
    size = N * itemsize
    if itemsize == 8 or size <= (20480 if itemsize == 2 else 65536):
        return None
    if itemsize == 2 and size <= 32768:
        return Backward("ring", 16384, warps=8, stages=20, registers=232)
    if size <= 40960 or (73728 if itemsize == 2 else 65536) < size <= 81920:  # one program a row, or two
        return Backward("ring", 40960 // itemsize, warps=16, stages=14, lag=1)
    if 196608 < size < 393216 or size > 2**20:  # two programs on an SM hide each other's waiting
        return Backward("ring", 16384 // itemsize, warps=8, stages=12, per_sm=2, lag=1)
    if size <= 73728 and size % 32768 != 0:
        return Backward("ring", 32768 // itemsize, warps=16, stages=14, lag=1)
    return Backward("ring", 32768 // itemsize, warps=8, stages=28, lag=1)


def backward_unaligned(N: int, itemsize: int) -> Backward | None:
    """Choose the backward launch for rows that do not start on 16 bytes, or None where it is not known to be faster.

    fp16 on one H200, 2026-11-30, share of a plain stream, without (`walk`, `reload`) and with: 33 → 72 % at 257
    columns, 56 → 75 at 769, 50 → 82 at 2049, 58 → 74 at 4099, 46 → 77 at 8191, 27 → 69 at 16383; fp32: 74 → 84 at 257,
    64 → 86 at 1025, 63 → 82 at 4099.
    """
    if itemsize == 8 or N < 64 or N * itemsize > 32768:
        return None
    if itemsize == 4:
        limits = [(96, 1, 3, 16), (192, 1, 3, 12), (384, 2, 2, 8), (640, 2, 2, 6), (1536, 4, 2, 3), (2560, 4, 3, 1)]
        limits += [(3584, 4, 2, 1), (5120, 4, 3, 1), (6656, 4, 2, 1), (8192, 8, 3, 1)]
    else:
        limits = [(192, 1, 3, 16), (448, 1, 2, 12), (640, 2, 3, 6), (896, 2, 3, 4), (1280, 4, 3, 3), (2560, 4, 2, 3)]
        limits += [(3584, 4, 2, 2), (5120, 8, 3, 1), (16384, 8, 2, 1)]
    warps, stages, per_sm = chosen(limits, N)
    return Backward("unaligned", *window(N, itemsize), warps=warps, stages=stages, per_sm=per_sm, gone=itemsize == 2)


def narrow_backward(N: int, itemsize: int) -> Backward:
    """Choose the backward launch for rows of up to 1024 columns: more programs on an SM for two tiles, or one not full.

    bf16 on one H200, 2026-11-30, share of a plain stream, by three programs without a limit on registers and now: 83 →
    88 % at 192 columns, 55 → 73 at 576, 76 → 86 at 640, 79 → 87 at 768, 88 → 92 at 896, 93 → 94 at 1024.
    """
    A, B = cover(N)
    rows = min(fitting(2048, A + B), 128)
    registers = None
    if itemsize == 4 or odd(N, itemsize):
        per_sm = 4 if odd(N, itemsize) and A + B > 512 else 3
    elif A == N:
        per_sm, registers = 3, 112 if N >= 256 else None
    elif 0 < 4 * B <= A:
        per_sm = 6 if 8 * B <= A else 5
    else:
        per_sm, registers = 4, 112
    return Backward("walk", A, B, rows, 4, 3, per_sm, registers)


def backward_table(N: int, itemsize: int, ring: bool = False) -> Backward:
    """Choose the backward launch for rows of N columns of `itemsize` bytes; `ring`: the card has room for one."""
    through_ring = backward_ring(N, itemsize) if ring else None
    if through_ring is not None:
        return through_ring
    A, B = cover(N)
    width = A + B
    if itemsize == 8:
        return Backward("walk", A, B, 1, 4, 2, 2) if width <= 2048 else backward_by_chunks(itemsize)
    if width <= 1024:
        return narrow_backward(N, itemsize)
    if odd(N, itemsize) and width <= 8192:
        return Backward("walk", A, B, 1, 4 if width < 8192 else 8, 3, 2 if width < 8192 else 1)
    if width <= 2048:
        return Backward("walk", A, B, 1, 4, 4, 2) if itemsize == 2 else Backward("walk", A, B, 2, 16, 3, 1)
    if itemsize == 4 and width <= 8192:
        registers = 88 if width == 8192 and whole(N, itemsize) else None
        return Backward("walk", A, B, 1, 16, 3, 1, registers, gone=width == 4096)
    if width < 4096:
        return Backward("walk", A, B, 2, 8, 4, 1, 200)
    if width == 4096:
        return Backward("walk", A, B, 1, 16, 5, 1, 80, gone=True)
    if width < 8192:
        return Backward("walk", A, B, 1, 16 if B == 2048 else 8, 4, 1)
    if width == 8192:
        return Backward("walk", A, B, 1, 16, 3, 1, 104)
    if width <= 12288 and itemsize == 2:
        return Backward("walk", A, B, 1, 16, 3, 1)
    if width <= 16384:
        return Backward("reload", 1 << (N - 1).bit_length(), 0, 1, 32, 1, 1)
    if itemsize == 4:
        return Backward("shared", 2048, warps=4, stages=2, per_sm=2)
    if 22528 < N <= 24576:
        return Backward("shared", 8192, warps=8, stages=3, per_sm=1)
    if N <= 22528:
        return Backward("shared", 4096, warps=4, stages=3, per_sm=2)
    if 49152 < N <= 98304:
        return Backward("shared", 1024, warps=1, stages=2, per_sm=8)
    return Backward("shared", 2048, warps=2, stages=2, per_sm=4)


def backward_by_chunks(itemsize: int) -> Backward:
    """Return the launch for rows of any width that waits for nobody."""
    return Backward("chunks", 16384 // itemsize, warps=16 if itemsize == 2 else 8, stages=2 if itemsize == 8 else 3)


CHUNK_ROWS = 8192
"""Rows whose means are kept at once by the `chunks` backward: its scratch does not grow with M."""

CHUNK_TILE = (8, 512)
"""Rows × columns of one step of the `chunks` backward."""

CHUNK_PARTS = 4
"""Programs that share the rows of a column block in the `chunks` backward."""


def column_sum_table(parts: int, N: int) -> tuple[int, int, int]:
    """Return rows and columns of one program's tile of the column sum, and its warps.

    396 rows of 769 columns, already in L2: 4.7 µs by 512 × 16, 7.1 by 256 × 32, 3.3 of it an empty launch. 132 rows
    of a walk of 4096 to 8192 columns: the whole backward is 0 to 0.5 % faster by 32 × 32 than by 256 × 32.
    """
    if 4096 <= N <= 8192 and 32 <= parts <= 256:
        return 32, 32, 4
    rows = min(max(1 << (parts - 1).bit_length(), 2), 512)
    return rows, 16 if N < 4096 or (rows == 512 and N <= 8192) else 32, 8 if rows == 512 else 4


STAYING = 2**22
"""From so many bytes on x is told to stay in the cache: between what gained nothing, 2 MB, and what gained, 17 MB."""

SMALL_ROWS = 256
SMALL_ELEMENTS = 2**18
SMALL_TILE = (128, 16)
"""Up to so many rows and elements, dx and dgamma come from one launch, dgamma by tiles of so many rows × columns.

An `unaligned` launch has tiles of four columns a warp, so that a thread has 16 numbers of it as well.
"""

KEPT_COLUMNS = 8192
"""Up to so many columns a row of an `unaligned` backward stays in registers between its sum and its gradient."""
