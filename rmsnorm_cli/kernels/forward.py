"""The fused forward, where one program holds whole rows: a tile of rows, or one row that it may have to read twice.

    rstd = 1 / sqrt(mean(x²) + eps)
    y    = x · rstd · gamma

`rows_kernel` keeps ROWS rows in registers: N is covered by one power-of-two tile of A columns, or by two (A + B),
because 5120 columns in a block of 8192 would leave a third of the lanes idle. With RELOAD it reads x again after the
reduction, from the cache: that costs less than the spills of a row that does not fit. `loop_kernel` walks rows of any
width in chunks.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from rmsnorm_cli.kernels.tiles import (
    column_limit,
    inverse_rms,
    load_gamma,
    load_tile,
    row_numbers,
    row_pointers,
    row_sum,
    spread,
    store_tile,
    weighted,
)


@triton.jit(
    do_not_specialize=["x_ptr", "y_ptr", "rstd_ptr", "M", "N", "x_per", "x_outer", "x_inner", "x_col", "gamma_col"]
)
def rows_kernel(
    x_ptr, gamma_ptr, y_ptr, rstd_ptr,
    M: tl.int64, N: tl.int32, eps: tl.float64,
    x_per: tl.int64, x_outer: tl.int64, x_inner: tl.int64, x_col: tl.int64, gamma_col: tl.int64,
    ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr,
    Y_ALIGN: tl.constexpr, TWO: tl.constexpr, UNIT: tl.constexpr, GAMMA: tl.constexpr, GAMMA_UNIT: tl.constexpr,
    RELOAD: tl.constexpr, STAY: tl.constexpr, RSTD: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS rows; with RSTD, keep theirs for a backward. STAY: x is told to stay in the cache.

    A few megabytes of it do, and many rows take up to 3 % less time: it may be that y gathers in the rest of the cache.
    """
    DTYPE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    FULL_A: tl.constexpr = FULL or B > 0
    # What is read twice stays in the cache until then; what is written leaves it, and so does a wide row once read.
    KEEP: tl.constexpr = "evict_last" if STAY else ""
    GO: tl.constexpr = "evict_first" if RELOAD else ""
    WIDE: tl.constexpr = (A + B) * x_ptr.dtype.element_ty.primitive_bitwidth > 524288
    GONE: tl.constexpr = "evict_first" if WIDE else ""
    rows = row_numbers(tl.program_id(0).to(tl.int64), ROWS)
    live = rows < M
    n = column_limit(N, Y_ALIGN)
    a = tl.arange(0, A)
    b = A + tl.arange(0, B if B > 0 else 1)
    x_rows = row_pointers(x_ptr, rows, x_per, x_outer, x_inner, TWO, ALIGN)
    y_rows = row_pointers(y_ptr, rows, 1, 0, N, False, Y_ALIGN)

    raw_a = load_tile(x_rows, a, x_col, live, n, ROWS, FULL_A, UNIT, False, KEEP)
    xa = raw_a.to(DTYPE)
    if B > 0:
        raw_b = load_tile(x_rows, b, x_col, live, n, ROWS, FULL, UNIT, False, KEEP)
        xb = raw_b.to(DTYPE)
    ga = 1.0
    gb = 1.0
    if GAMMA and not RELOAD:  # read beside x, so that its latency is not paid after the reduction
        ga = load_gamma(gamma_ptr, a, gamma_col, n, FULL_A, GAMMA_UNIT)
        if B > 0:
            gb = load_gamma(gamma_ptr, b, gamma_col, n, FULL, GAMMA_UNIT)
    square_sum = row_sum(xa * xa, ROWS)
    if B > 0:
        square_sum += row_sum(xb * xb, ROWS)
    rstd = inverse_rms(square_sum, N, eps, DTYPE)
    if RSTD:
        # A few bytes of a 32-byte sector: it stays until the rows beside it have filled it, up to 2 % of the time.
        tl.store(rstd_ptr + rows, rstd, mask=live, eviction_policy="evict_last")
    if RELOAD:
        # Without the barrier the compiler merges the two reads and keeps the row after all.
        tl.debug_barrier()
        xa = load_tile(x_rows, a, x_col, live, n, ROWS, FULL_A, UNIT, False, GONE).to(DTYPE)
        if B > 0:
            xb = load_tile(x_rows, b, x_col, live, n, ROWS, FULL, UNIT, False, GONE).to(DTYPE)
    if GAMMA and RELOAD:
        ga = load_gamma(gamma_ptr, a, gamma_col, n, FULL_A, GAMMA_UNIT)
        if B > 0:
            gb = load_gamma(gamma_ptr, b, gamma_col, n, FULL, GAMMA_UNIT)
    store_tile(y_rows, a, weighted(xa * spread(rstd, ROWS), ga, ROWS, GAMMA), live, n, ROWS, FULL_A, GO)
    if B > 0:
        store_tile(y_rows, b, weighted(xb * spread(rstd, ROWS), gb, ROWS, GAMMA), live, n, ROWS, FULL, GO)


@triton.jit(
    do_not_specialize=["x_ptr", "y_ptr", "rstd_ptr", "M", "N", "x_per", "x_outer", "x_inner", "x_col", "gamma_col"]
)
def loop_kernel(
    x_ptr, gamma_ptr, y_ptr, rstd_ptr,
    M: tl.int64, N: tl.int32, eps: tl.float64,
    x_per: tl.int64, x_outer: tl.int64, x_inner: tl.int64, x_col: tl.int64, gamma_col: tl.int64,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr,
    TWO: tl.constexpr, UNIT: tl.constexpr, GAMMA: tl.constexpr, GAMMA_UNIT: tl.constexpr,
):  # fmt: skip
    """Normalise one row of any width: sum its squares chunk by chunk, then read it again and scale it."""
    DTYPE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    n = column_limit(N, ALIGN)
    chunk = tl.arange(0, CHUNK)
    x_row = row_pointers(x_ptr, row, x_per, x_outer, x_inner, TWO, ALIGN)
    y_row = row_pointers(y_ptr, row, 1, 0, N, False, ALIGN)
    squares = tl.zeros((CHUNK,), DTYPE)
    for start in tl.range(0, N, CHUNK, num_stages=STAGES):
        x = load_tile(x_row, start + chunk, x_col, True, n, 1, FULL, UNIT).to(DTYPE)
        squares = tl.fma(x, x, squares)
    rstd = inverse_rms(tl.sum(squares, axis=0), N, eps, DTYPE)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, N, CHUNK, num_stages=STAGES):
        columns = start + chunk
        x = load_tile(x_row, columns, x_col, True, n, 1, FULL, UNIT).to(DTYPE)
        gamma = 1.0
        if GAMMA:
            gamma = load_gamma(gamma_ptr, columns, gamma_col, n, FULL, GAMMA_UNIT)
        store_tile(y_row, columns, weighted(x * rstd, gamma, 1, GAMMA), True, n, 1, FULL)
