"""The fused forward of wide rows that wait in shared memory: see `ring.py` for how."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rmsnorm_cli.kernels.ring import (
    WORDS,
    ask,
    collect,
    following,
    held,
    peek,
    publish,
    put,
    rings,
    start,
    total,
    weighted,
    weights,
)
from rmsnorm_cli.kernels.tiles import row_offset


@gluon.jit(
    do_not_specialize=[
        "x_ptr", "y_ptr", "rstd_ptr", "words_ptr", "M", "N", "K", "width",
        "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def ring_forward_kernel(
    x_ptr, gamma_ptr, y_ptr, rstd_ptr, words_ptr,
    M: gl.int64, N: gl.int32, eps: gl.float64, K: gl.int32, width: gl.int32,
    x_per: gl.int64, x_outer: gl.int64, x_inner: gl.int64, x_col: gl.int64, gamma_col: gl.int64,
    PIECES: gl.constexpr, DEPTH: gl.constexpr, EXTRA: gl.constexpr, WARPS: gl.constexpr,
    SHARED: gl.constexpr, LAG: gl.constexpr, PARTS: gl.constexpr, WHOLE: gl.constexpr, ALIGN: gl.constexpr,
    TWO: gl.constexpr, GAMMA: gl.constexpr, GAMMA_UNIT: gl.constexpr,
):  # fmt: skip
    """Normalise every row of this program's group, as far as its columns go."""
    gl.static_assert(LAG <= 3, "a word would be overwritten before all have read it")
    gl.static_assert(DEPTH > LAG, "a row would be summed before it is asked for")
    VECTOR: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    CHUNK: gl.constexpr = 32 * WARPS * VECTOR
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [WARPS], [0])
    group = gl.program_id(0) // K
    part = gl.program_id(0) % K
    groups = gl.num_programs(0) // K
    words = words_ptr + group * (WORDS * K)
    n = gl.minimum(part * width + width, N) // ALIGN * ALIGN
    columns = gl.multiple_of(part * width, ALIGN) + gl.arange(0, CHUNK, LAYOUT)
    steps = ((M - group + groups - 1) // groups).to(gl.int32)
    x = (x_ptr, x_per, x_outer, x_inner)
    ring = rings(x_ptr, CHUNK, PIECES, DEPTH, EXTRA)
    for slot in gl.static_range(DEPTH + 1):
        row = (group + slot * groups).to(gl.int64)
        if EXTRA > 0:
            ask(ring, slot, x, row, M, columns, n, 0, EXTRA, TWO, WHOLE, ALIGN)
            async_copy.commit_group()
        if slot < DEPTH:
            ask(ring, slot, x, row, M, columns, n, EXTRA, PIECES, TWO, WHOLE, ALIGN)
            async_copy.commit_group()
    gamma = weights(gamma_ptr, columns, gamma_col, n, GAMMA, GAMMA_UNIT, PIECES)
    # Not `tail = head`: two names of one value at a loop's start are taken for one that the loop never changes.
    head = (gl.to_tensor(0), gl.to_tensor(0))
    tail = (gl.to_tensor(0), gl.to_tensor(0))
    for step in range(0, steps + LAG):
        done = step - LAG
        if LAG > 0:  # ask early for what is needed late
            seen = peek(words, done, K, PARTS, WARPS)
        async_copy.wait_group(2 * (DEPTH - LAG) - 1 if EXTRA > 0 else DEPTH - LAG - 1)
        squares = gl.zeros((CHUNK,), gl.float32, LAYOUT)
        for piece in gl.static_range(PIECES):
            values = held(ring, head, piece, EXTRA, LAYOUT)
            squares = gl.fma(values, values, squares)
        head = following(head, DEPTH)
        square_sum = total(squares, WARPS)
        if SHARED:
            publish(words, square_sum, step, part, K)
            if LAG == 0:
                seen = peek(words, done, K, PARTS, WARPS)
        if done >= 0:
            if SHARED:
                square_sum = collect(words, seen, done, K, PARTS, WARPS)
            rstd = gl.rsqrt(square_sum / N + eps.to(gl.float32))
            row = (done * groups + group).to(gl.int64)
            gl.store(rstd_ptr + row, rstd, mask=part == 0)
            y = start(y_ptr, row_offset(row, 1, 0, N, False, ALIGN), columns, ALIGN)
            for piece in gl.static_range(PIECES):
                values = weighted(held(ring, tail, piece, EXTRA, LAYOUT) * rstd, gamma[piece], GAMMA)
                put(y, columns, piece, values, n, WHOLE)
            row += DEPTH * groups
            ask(ring, tail[0], x, row, M, columns, n, EXTRA, PIECES, TWO, WHOLE, ALIGN)
            async_copy.commit_group()
            if EXTRA > 0:
                ask(ring, tail[1], x, row + groups, M, columns, n, 0, EXTRA, TWO, WHOLE, ALIGN)
                async_copy.commit_group()
            tail = following(tail, DEPTH)
