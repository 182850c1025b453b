"""The fused backward, where one program holds whole rows: persistent programs walk them and sum dgamma on the way.

    x_hat  = x · rstd
    u      = dy · gamma
    dx     = rstd · (u − x_hat · mean(u · x_hat))
    dgamma = sum over rows of dy · x_hat

`walk_kernel`: each program takes every P-th tile of ROWS rows, the next tiles being loaded through shared memory
meanwhile. It adds what its rows give to dgamma in registers and writes that once, as its private row of `partial`
(P, N): the scratch does not grow with M. `column_sum_kernel` adds the P rows in a fixed order: no atomics, so the same
bits each time. `small_kernel` does both for few rows in one launch: dgamma needs rstd but no mean, so other programs
own its columns.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rmsnorm_cli.kernels.tiles import (
    column_limit,
    column_sum,
    input_gradient,
    load_gamma,
    load_rows,
    load_tile,
    row_numbers,
    row_pointers,
    row_sum,
    spread,
    store_tile,
    weighted,
    zeros_tile,
)

UNSPECIALISED = [
    "dy_ptr", "x_ptr", "rstd_ptr", "dx_ptr", "partial_ptr", "M", "N", "P",
    "dy_per", "dy_outer", "dy_inner", "dy_col", "x_per", "x_outer", "x_inner", "x_col", "gamma_col", "row_programs",
]  # fmt: skip


@triton.jit(do_not_specialize=[name for name in UNSPECIALISED if name not in ("P", "row_programs")])
def walk_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, partial_ptr,
    M: tl.int64, N: tl.int32,
    dy_per: tl.int64, dy_outer: tl.int64, dy_inner: tl.int64, dy_col: tl.int64,
    x_per: tl.int64, x_outer: tl.int64, x_inner: tl.int64, x_col: tl.int64, gamma_col: tl.int64,
    ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
    DY_TWO: tl.constexpr, DY_UNIT: tl.constexpr, TWO: tl.constexpr, UNIT: tl.constexpr,
    GAMMA: tl.constexpr, GAMMA_UNIT: tl.constexpr, DX: tl.constexpr, DGAMMA: tl.constexpr, DEPENDENT: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Walk every P-th tile of ROWS rows: write its dx, add to this program's row of `partial`."""
    DTYPE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    FULL_A: tl.constexpr = FULL or B > 0
    if DEPENDENT:
        gdc_launch_dependents()
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    n = column_limit(N, ALIGN)
    a = tl.arange(0, A)
    b = A + tl.arange(0, B if B > 0 else 1)
    ga = 1.0
    gb = 1.0
    if GAMMA:
        ga = load_gamma(gamma_ptr, a, gamma_col, n, FULL_A, GAMMA_UNIT)
        if B > 0:
            gb = load_gamma(gamma_ptr, b, gamma_col, n, FULL, GAMMA_UNIT)
    if DGAMMA:
        sum_a = zeros_tile(ROWS, A, DTYPE)
        if B > 0:
            sum_b = zeros_tile(ROWS, B, DTYPE)
    tiles = (M + ROWS - 1) // ROWS
    for step in tl.range(0, ((tiles - pid + programs - 1) // programs).to(tl.int32), num_stages=STAGES):
        rows = row_numbers(pid + step * programs, ROWS)
        live = rows < M
        x_rows = row_pointers(x_ptr, rows, x_per, x_outer, x_inner, TWO, ALIGN)
        dy_rows = row_pointers(dy_ptr, rows, dy_per, dy_outer, dy_inner, DY_TWO, ALIGN)
        dx_rows = row_pointers(dx_ptr, rows, 1, 0, N, False, ALIGN)
        raw_xa = load_tile(x_rows, a, x_col, live, n, ROWS, FULL_A, UNIT)
        raw_da = load_tile(dy_rows, a, dy_col, live, n, ROWS, FULL_A, DY_UNIT)
        if B > 0:
            raw_xb = load_tile(x_rows, b, x_col, live, n, ROWS, FULL, UNIT)
            raw_db = load_tile(dy_rows, b, dy_col, live, n, ROWS, FULL, DY_UNIT)
        rstd = load_rows(rstd_ptr, rows, live, ROWS)
        if DX:
            dot = row_sum(weighted(raw_da.to(DTYPE), ga, ROWS, GAMMA) * (raw_xa.to(DTYPE) * spread(rstd, ROWS)), ROWS)
            if B > 0:
                dot += row_sum(
                    weighted(raw_db.to(DTYPE), gb, ROWS, GAMMA) * (raw_xb.to(DTYPE) * spread(rstd, ROWS)), ROWS
                )
            mean = dot / N
        xa = raw_xa.to(DTYPE) * spread(rstd, ROWS)
        da = raw_da.to(DTYPE)
        if B > 0:
            xb = raw_xb.to(DTYPE) * spread(rstd, ROWS)
            db = raw_db.to(DTYPE)
        if DX:
            dxa = input_gradient(weighted(da, ga, ROWS, GAMMA), xa, mean, rstd, ROWS)
            store_tile(dx_rows, a, dxa, live, n, ROWS, FULL_A, EVICT)
            if B > 0:
                dxb = input_gradient(weighted(db, gb, ROWS, GAMMA), xb, mean, rstd, ROWS)
                store_tile(dx_rows, b, dxb, live, n, ROWS, FULL, EVICT)
        if DGAMMA:
            sum_a = tl.fma(da, xa, sum_a)
            if B > 0:
                sum_b = tl.fma(db, xb, sum_b)
    if DGAMMA:
        # Every program writes its row, also one that had no rows: the column sum reads all of them, from the cache.
        partial_row = row_pointers(partial_ptr, pid, 1, 0, N, False, ALIGN)
        store_tile(partial_row, a, column_sum(sum_a, ROWS), True, n, 1, FULL_A, "evict_last")
        if B > 0:
            store_tile(partial_row, b, column_sum(sum_b, ROWS), True, n, 1, FULL, "evict_last")


@triton.jit(do_not_specialize=["partial_ptr", "P", "N", "pitch"])
def column_sum_kernel(
    partial_ptr, dgamma_ptr, P: tl.int32, N: tl.int32, pitch: tl.int32,
    BLOCK_P: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, PADDED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sum the P rows of `partial`, for COLUMNS columns, always in the same order.

    A row is `pitch` numbers long, more than its N columns where it is PADDED with zeros to whole vectors.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    parts = tl.arange(0, BLOCK_P)
    n = column_limit(pitch, ALIGN)
    total = tl.zeros((BLOCK_P, COLUMNS), partial_ptr.dtype.element_ty)
    if DEPENDENT:
        gdc_wait()
    for first in range(0, P, BLOCK_P):
        starts = row_pointers(partial_ptr, (first + parts).to(tl.int64), 1, 0, pitch, False, ALIGN)
        total += load_tile(starts, columns, 1, first + parts < P, n, BLOCK_P, False, True)
    dgamma = tl.sum(total, axis=0)
    tl.store(dgamma_ptr + columns, dgamma.to(dgamma_ptr.dtype.element_ty), mask=columns < (N if PADDED else n))


@triton.jit(do_not_specialize=[name for name in UNSPECIALISED if name not in ("partial_ptr", "P")])
def small_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, dgamma_ptr,
    M: tl.int64, N: tl.int32,
    dy_per: tl.int64, dy_outer: tl.int64, dy_inner: tl.int64, dy_col: tl.int64,
    x_per: tl.int64, x_outer: tl.int64, x_inner: tl.int64, x_col: tl.int64, gamma_col: tl.int64, row_programs: tl.int32,
    ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
    DY_TWO: tl.constexpr, DY_UNIT: tl.constexpr, TWO: tl.constexpr, UNIT: tl.constexpr,
    GAMMA: tl.constexpr, GAMMA_UNIT: tl.constexpr,
):  # fmt: skip
    """Give the first `row_programs` programs a tile of rows (dx), the others TILE_COLS columns of all rows (dgamma)."""
    DTYPE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    FULL_A: tl.constexpr = FULL or B > 0
    pid = tl.program_id(0)
    n = column_limit(N, ALIGN)
    if pid < row_programs:
        a = tl.arange(0, A)
        b = A + tl.arange(0, B if B > 0 else 1)
        rows = row_numbers(pid.to(tl.int64), ROWS)
        live = rows < M
        x_rows = row_pointers(x_ptr, rows, x_per, x_outer, x_inner, TWO, ALIGN)
        dy_rows = row_pointers(dy_ptr, rows, dy_per, dy_outer, dy_inner, DY_TWO, ALIGN)
        dx_rows = row_pointers(dx_ptr, rows, 1, 0, N, False, ALIGN)
        rstd = load_rows(rstd_ptr, rows, live, ROWS)
        xa = load_tile(x_rows, a, x_col, live, n, ROWS, FULL_A, UNIT).to(DTYPE) * spread(rstd, ROWS)
        da = load_tile(dy_rows, a, dy_col, live, n, ROWS, FULL_A, DY_UNIT).to(DTYPE)
        ga = 1.0
        gb = 1.0
        if GAMMA:
            ga = load_gamma(gamma_ptr, a, gamma_col, n, FULL_A, GAMMA_UNIT)
        if B > 0:
            xb = load_tile(x_rows, b, x_col, live, n, ROWS, FULL, UNIT).to(DTYPE) * spread(rstd, ROWS)
            db = load_tile(dy_rows, b, dy_col, live, n, ROWS, FULL, DY_UNIT).to(DTYPE)
            if GAMMA:
                gb = load_gamma(gamma_ptr, b, gamma_col, n, FULL, GAMMA_UNIT)
        dot = row_sum(weighted(da, ga, ROWS, GAMMA) * xa, ROWS)
        if B > 0:
            dot += row_sum(weighted(db, gb, ROWS, GAMMA) * xb, ROWS)
        mean = dot / N
        dxa = input_gradient(weighted(da, ga, ROWS, GAMMA), xa, mean, rstd, ROWS)
        store_tile(dx_rows, a, dxa, live, n, ROWS, FULL_A)
        if B > 0:
            dxb = input_gradient(weighted(db, gb, ROWS, GAMMA), xb, mean, rstd, ROWS)
            store_tile(dx_rows, b, dxb, live, n, ROWS, FULL)
    else:
        columns = (pid - row_programs) * TILE_COLS + tl.arange(0, TILE_COLS)
        total = tl.zeros((TILE_ROWS, TILE_COLS), DTYPE)
        for first in range(0, M, TILE_ROWS):
            rows = (tl.zeros((TILE_ROWS,), tl.int64) + first) + tl.arange(0, TILE_ROWS)
            live = rows < M
            x_rows = row_pointers(x_ptr, rows, x_per, x_outer, x_inner, TWO, ALIGN)
            dy_rows = row_pointers(dy_ptr, rows, dy_per, dy_outer, dy_inner, DY_TWO, ALIGN)
            rstd = load_rows(rstd_ptr, rows, live, TILE_ROWS)
            x = load_tile(x_rows, columns, x_col, live, n, TILE_ROWS, False, UNIT).to(DTYPE) * rstd[:, None]
            dy = load_tile(dy_rows, columns, dy_col, live, n, TILE_ROWS, False, DY_UNIT).to(DTYPE)
            total = tl.fma(dy, x, total)
        dgamma = tl.sum(total, axis=0)
        tl.store(dgamma_ptr + columns, dgamma.to(dgamma_ptr.dtype.element_ty), mask=columns < n)
