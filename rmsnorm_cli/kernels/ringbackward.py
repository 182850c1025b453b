"""The fused backward of wide rows that wait in shared memory: see `ring.py` for how."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents

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
        "dy_ptr", "x_ptr", "rstd_ptr", "dx_ptr", "partial_ptr", "words_ptr", "M", "N", "K", "width",
        "dy_per", "dy_outer", "dy_inner", "dy_col", "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def ring_backward_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, partial_ptr, words_ptr,
    M: gl.int64, N: gl.int32, K: gl.int32, width: gl.int32,
    dy_per: gl.int64, dy_outer: gl.int64, dy_inner: gl.int64, dy_col: gl.int64,
    x_per: gl.int64, x_outer: gl.int64, x_inner: gl.int64, x_col: gl.int64, gamma_col: gl.int64,
    PIECES: gl.constexpr, DEPTH: gl.constexpr, EXTRA: gl.constexpr, WARPS: gl.constexpr,
    SHARED: gl.constexpr, LAG: gl.constexpr, PARTS: gl.constexpr, WHOLE: gl.constexpr, ALIGN: gl.constexpr,
    DY_TWO: gl.constexpr, TWO: gl.constexpr, GAMMA: gl.constexpr, GAMMA_UNIT: gl.constexpr, DGAMMA: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Write dx of every row of this program's group, as far as its columns go, and the group's sums for dgamma."""
    gl.static_assert(LAG <= 3, "a word would be overwritten before all have read it")
    gl.static_assert(DEPTH > LAG, "a row would be summed before it is asked for")
    VECTOR: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    CHUNK: gl.constexpr = 32 * WARPS * VECTOR
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [WARPS], [0])
    if DEPENDENT:
        gdc_launch_dependents()
    group = gl.program_id(0) // K
    part = gl.program_id(0) % K
    groups = gl.num_programs(0) // K
    words = words_ptr + group * (WORDS * K)
    n = gl.minimum(part * width + width, N) // ALIGN * ALIGN
    columns = gl.multiple_of(part * width, ALIGN) + gl.arange(0, CHUNK, LAYOUT)
    steps = ((M - group + groups - 1) // groups).to(gl.int32)
    x = (x_ptr, x_per, x_outer, x_inner)
    dy = (dy_ptr, dy_per, dy_outer, dy_inner)
    ring_x = rings(x_ptr, CHUNK, PIECES, DEPTH, EXTRA)
    ring_dy = rings(dy_ptr, CHUNK, PIECES, DEPTH, EXTRA)
    for slot in gl.static_range(DEPTH + 1):
        row = (group + slot * groups).to(gl.int64)
        if EXTRA > 0:
            ask(ring_x, slot, x, row, M, columns, n, 0, EXTRA, TWO, WHOLE, ALIGN)
            ask(ring_dy, slot, dy, row, M, columns, n, 0, EXTRA, DY_TWO, WHOLE, ALIGN)
            async_copy.commit_group()
        if slot < DEPTH:
            ask(ring_x, slot, x, row, M, columns, n, EXTRA, PIECES, TWO, WHOLE, ALIGN)
            ask(ring_dy, slot, dy, row, M, columns, n, EXTRA, PIECES, DY_TWO, WHOLE, ALIGN)
            async_copy.commit_group()
    gamma = weights(gamma_ptr, columns, gamma_col, n, GAMMA, GAMMA_UNIT, PIECES)
    sums = ()
    for _ in gl.static_range(PIECES):
        sums = sums + (gl.zeros((CHUNK,), gl.float32, LAYOUT),)
    # Not `tail = head`: two names of one value at a loop's start are taken for one that the loop never changes.
    head = (gl.to_tensor(0), gl.to_tensor(0))
    tail = (gl.to_tensor(0), gl.to_tensor(0))
    coming = gl.load(rstd_ptr + group)
    for step in range(0, steps + LAG):
        done = step - LAG
        row = (step * groups + group).to(gl.int64)
        rstd = coming
        done_rstd = rstd
        if LAG > 0:  # ask early for what is needed late
            seen = peek(words, done, K, PARTS, WARPS)
            done_rstd = gl.load(rstd_ptr + (row - LAG * groups), mask=done >= 0, other=0.0)
        coming = gl.load(rstd_ptr + (row + groups), mask=row + groups < M, other=0.0)
        async_copy.wait_group(2 * (DEPTH - LAG) - 1 if EXTRA > 0 else DEPTH - LAG - 1)
        products = gl.zeros((CHUNK,), gl.float32, LAYOUT)
        for piece in gl.static_range(PIECES):
            x_hat = held(ring_x, head, piece, EXTRA, LAYOUT) * rstd
            u = weighted(held(ring_dy, head, piece, EXTRA, LAYOUT), gamma[piece], GAMMA)
            products = gl.fma(u, x_hat, products)
        head = following(head, DEPTH)
        dot = total(products, WARPS)
        if SHARED:
            publish(words, dot, step, part, K)
            if LAG == 0:
                seen = peek(words, done, K, PARTS, WARPS)
        if done >= 0:
            if SHARED:
                dot = collect(words, seen, done, K, PARTS, WARPS)
            minus_mean = -dot / N  # negated here, not in each x_hat: the same bits, an instruction less for each number
            row = (done * groups + group).to(gl.int64)
            dx = start(dx_ptr, row_offset(row, 1, 0, N, False, ALIGN), columns, ALIGN)
            added = ()
            for piece in gl.static_range(PIECES):
                x_hat = held(ring_x, tail, piece, EXTRA, LAYOUT) * done_rstd
                gradient = held(ring_dy, tail, piece, EXTRA, LAYOUT)
                u = weighted(gradient, gamma[piece], GAMMA)
                put(dx, columns, piece, gl.fma(x_hat, minus_mean, u) * done_rstd, n, WHOLE)
                added = added + (gl.fma(gradient, x_hat, sums[piece]),)
            sums = added
            row += DEPTH * groups
            ask(ring_x, tail[0], x, row, M, columns, n, EXTRA, PIECES, TWO, WHOLE, ALIGN)
            ask(ring_dy, tail[0], dy, row, M, columns, n, EXTRA, PIECES, DY_TWO, WHOLE, ALIGN)
            async_copy.commit_group()
            if EXTRA > 0:
                ask(ring_x, tail[1], x, row + groups, M, columns, n, 0, EXTRA, TWO, WHOLE, ALIGN)
                ask(ring_dy, tail[1], dy, row + groups, M, columns, n, 0, EXTRA, DY_TWO, WHOLE, ALIGN)
                async_copy.commit_group()
            tail = following(tail, DEPTH)
    if DGAMMA:
        partial = start(partial_ptr, row_offset(group.to(gl.int64), 1, 0, N, False, ALIGN), columns, ALIGN)
        for piece in gl.static_range(PIECES):
            put(partial, columns, piece, sums[piece], n, WHOLE, "evict_last")
