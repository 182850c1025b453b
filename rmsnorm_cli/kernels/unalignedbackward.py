"""The fused backward of rows that do not start on 16 bytes: see `unaligned.py` for how, `backward.py` for what."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents

from rmsnorm_cli.kernels.ring import total
from rmsnorm_cli.kernels.tiles import row_offset
from rmsnorm_cli.kernels.unaligned import (
    added,
    ask_all,
    ends,
    lead_of,
    numbers,
    numbers_layout,
    read,
    room_for,
    scaled,
    times,
    write,
)


@gluon.jit
def dot(u, x_hat, UNITS: gl.constexpr, WARPS: gl.constexpr):
    """Return the sum of u · x_hat over a row."""
    products = u[0] * x_hat[0]
    for unit in gl.static_range(1, UNITS):
        products = gl.fma(u[unit], x_hat[unit], products)
    return total(products, WARPS)


@gluon.jit
def gradient(u, x_hat, minus_mean, rstd, UNITS: gl.constexpr):
    """Return dx = rstd · (u − x_hat · mean(u · x_hat)), unit by unit."""
    row = ()
    for unit in gl.static_range(UNITS):
        row = row + (gl.fma(x_hat[unit], minus_mean, u[unit]) * rstd,)
    return row


@gluon.jit(
    do_not_specialize=[
        "dy_ptr", "x_ptr", "rstd_ptr", "dx_ptr", "partial_ptr", "M", "N",
        "dy_per", "dy_outer", "dy_inner", "dy_col", "x_per", "x_outer", "x_inner", "x_col", "gamma_col", "pitch",
    ]
)  # fmt: skip
def unaligned_backward_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, partial_ptr,
    M: gl.int64, N: gl.int32,
    dy_per: gl.int64, dy_outer: gl.int64, dy_inner: gl.int64, dy_col: gl.int64,
    x_per: gl.int64, x_outer: gl.int64, x_inner: gl.int64, x_col: gl.int64, gamma_col: gl.int64, pitch: gl.int32,
    UNITS: gl.constexpr, WHOLE: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr,
    A: gl.constexpr, B: gl.constexpr, SLOT: gl.constexpr, KEEP: gl.constexpr,
    DY_TWO: gl.constexpr, TWO: gl.constexpr, GAMMA: gl.constexpr, DX: gl.constexpr, DGAMMA: gl.constexpr,
    DEPENDENT: gl.constexpr, EVICT: gl.constexpr,
):  # fmt: skip
    """Walk every P-th row: write its dx, add to this program's row of `partial`, which is `pitch` numbers long.

    KEEP: a row stays in registers between its sum and its gradient; else it is read from shared memory once more.
    """
    LAYOUT: gl.constexpr = numbers_layout(x_ptr.dtype.element_ty.primitive_bitwidth // 8, WARPS)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    UNIT: gl.constexpr = 32 * WARPS
    if DEPENDENT:
        gdc_launch_dependents()
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = ((M - pid + programs - 1) // programs).to(gl.int32)
    final = gl.where((M - 1) % programs == pid, steps - 1, -1)  # the step of the tensor's last row, if it is here
    nothing = (M < 0).to(gl.int32)  # 0, which the compiler does not know
    x_memory = room_for(x_ptr, DEPTH * SLOT)
    dy_memory = room_for(dy_ptr, DEPTH * SLOT)
    rstds = room_for(rstd_ptr, DEPTH)
    one = gl.arange(0, 1, ONE)
    for slot in gl.static_range(DEPTH):
        row = (pid + slot * programs).to(gl.int64)
        live = slot < steps
        last = slot == final
        x_from = (x_memory, x_ptr, row_offset(row, x_per, x_outer, x_inner, TWO, 1))
        dy_from = (dy_memory, dy_ptr, row_offset(row, dy_per, dy_outer, dy_inner, DY_TWO, 1))
        ask_all((x_from, dy_from), slot * SLOT, N, live, row == 0, last, 2, A, B, WARPS)
        async_copy.async_copy_global_to_shared(rstds.index(slot), rstd_ptr + row + one, one + slot < steps)
        async_copy.commit_group()
    columns = gl.arange(0, UNIT, LAYOUT)
    gamma = read(gamma_ptr, columns, gamma_col, N, UNITS) if GAMMA else ()
    sums = ()
    for _ in gl.static_range(UNITS):
        sums = sums + (gl.zeros((UNIT,), gl.float32, LAYOUT),)
    slot = gl.to_tensor(0)
    for step in range(0, steps):
        row = (step * programs + pid).to(gl.int64)
        x_here = row_offset(row, x_per, x_outer, x_inner, TWO, 1)
        dy_here = row_offset(row, dy_per, dy_outer, dy_inner, DY_TWO, 1)
        async_copy.wait_group(DEPTH - 1)
        if (step == final) | (row == 0):
            ends(x_memory, slot * SLOT, x_ptr, x_here, N, WARPS)
            ends(dy_memory, slot * SLOT, dy_ptr, dy_here, N, WARPS)
        x_at = slot * SLOT + lead_of(x_ptr, x_here)
        dy_at = slot * SLOT + lead_of(dy_ptr, dy_here)
        rstd = gl.sum(rstds.index(slot).load(ONE), 0)  # of one number: as a scalar
        x_hat = scaled(numbers(x_memory, x_at, columns, N, UNITS, WHOLE, LAYOUT), rstd, UNITS)
        dy = numbers(dy_memory, dy_at, columns, N, UNITS, WHOLE, LAYOUT)
        if DX:
            minus_mean = -dot(times(dy, gamma, UNITS, GAMMA), x_hat, UNITS, WARPS) / N
        if DX and not KEEP:
            x_hat = scaled(numbers(x_memory, x_at + nothing, columns, N, UNITS, WHOLE, LAYOUT), rstd, UNITS)
            dy = numbers(dy_memory, dy_at + nothing, columns, N, UNITS, WHOLE, LAYOUT)
        if DGAMMA:
            sums = added(dy, x_hat, sums, UNITS)
        ahead = step + DEPTH
        live = ahead < steps
        last = ahead == final
        x_there = (x_memory, x_ptr, row_offset(row + DEPTH * programs, x_per, x_outer, x_inner, TWO, 1))
        dy_there = (dy_memory, dy_ptr, row_offset(row + DEPTH * programs, dy_per, dy_outer, dy_inner, DY_TWO, 1))
        ask_all((x_there, dy_there), slot * SLOT, N, live, False, last, 2, A, B, WARPS)
        rstd_from = rstd_ptr + (row + DEPTH * programs)
        async_copy.async_copy_global_to_shared(rstds.index(slot), rstd_from + one, one + ahead < steps)
        async_copy.commit_group()
        slot = gl.where(slot == DEPTH - 1, 0, slot + 1)
        if DX:
            dx = gradient(times(dy, gamma, UNITS, GAMMA), x_hat, minus_mean, rstd, UNITS)
            write(dx_ptr + row * N + columns, columns, dx, N, UNITS, WHOLE, EVICT)
    if DGAMMA:
        write(partial_ptr + pid.to(gl.int64) * pitch + columns, columns, sums, pitch, UNITS, WHOLE, "evict_last")


@gluon.jit(
    do_not_specialize=[
        "dy_ptr", "x_ptr", "rstd_ptr", "dx_ptr", "dgamma_ptr", "M", "N", "row_programs",
        "dy_per", "dy_outer", "dy_inner", "dy_col", "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def unaligned_small_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, dgamma_ptr,
    M: gl.int64, N: gl.int32,
    dy_per: gl.int64, dy_outer: gl.int64, dy_inner: gl.int64, dy_col: gl.int64,
    x_per: gl.int64, x_outer: gl.int64, x_inner: gl.int64, x_col: gl.int64, gamma_col: gl.int64, row_programs: gl.int32,
    UNITS: gl.constexpr, WHOLE: gl.constexpr, WARPS: gl.constexpr, TILE_ROWS: gl.constexpr, TILE_COLS: gl.constexpr,
    DY_TWO: gl.constexpr, TWO: gl.constexpr, GAMMA: gl.constexpr,
):  # fmt: skip
    """Few rows in one launch: `row_programs` programs give dx of a row each, the others dgamma of TILE_COLS columns.

    dx as `unaligned_backward_kernel` gives it, in the same order: a row keeps its bits whatever M.
    """
    pid = gl.program_id(0)
    if pid < row_programs:
        LAYOUT: gl.constexpr = numbers_layout(x_ptr.dtype.element_ty.primitive_bitwidth // 8, WARPS)
        columns = gl.arange(0, 32 * WARPS, LAYOUT)
        row = pid.to(gl.int64)
        rstd = gl.load(rstd_ptr + row)
        x = read(x_ptr + row_offset(row, x_per, x_outer, x_inner, TWO, 1), columns, 1, N, UNITS)
        dy = read(dy_ptr + row_offset(row, dy_per, dy_outer, dy_inner, DY_TWO, 1), columns, 1, N, UNITS)
        gamma = read(gamma_ptr, columns, gamma_col, N, UNITS) if GAMMA else ()
        x_hat = scaled(x, rstd, UNITS)
        u = times(dy, gamma, UNITS, GAMMA)
        minus_mean = -dot(u, x_hat, UNITS, WARPS) / N
        dx = gradient(u, x_hat, minus_mean, rstd, UNITS)
        write(dx_ptr + row * N + columns, columns, dx, N, UNITS, WHOLE)
    else:
        TILE: gl.constexpr = gl.BlockedLayout([1, 1], [32 // TILE_COLS, TILE_COLS], [WARPS, 1], [1, 0])
        column = (pid - row_programs) * TILE_COLS + gl.arange(0, TILE_COLS, gl.SliceLayout(0, TILE))
        sums = gl.zeros((TILE_ROWS, TILE_COLS), gl.float32, TILE)
        for first in range(0, M.to(gl.int32), TILE_ROWS):
            rows = (first + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, TILE))).to(gl.int64)
            inside = (rows < M)[:, None] & (column < N)[None, :]
            x_rows = x_ptr + row_offset(rows, x_per, x_outer, x_inner, TWO, 1)
            dy_rows = dy_ptr + row_offset(rows, dy_per, dy_outer, dy_inner, DY_TWO, 1)
            rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
            x = gl.load(x_rows[:, None] + column[None, :], mask=inside, other=0.0).to(gl.float32)
            dy = gl.load(dy_rows[:, None] + column[None, :], mask=inside, other=0.0).to(gl.float32)
            sums = gl.fma(dy, x * rstd[:, None], sums)
        dgamma = gl.sum(sums, 0)
        gl.store(dgamma_ptr + column, dgamma.to(dgamma_ptr.dtype.element_ty), mask=column < N)
