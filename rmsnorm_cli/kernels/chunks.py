"""The fused backward of rows of any width without waiting for another program: a row's mean first, then its columns.

For the interpreter, for cards that refuse a cooperative launch, for fp64, and for dgamma alone. `dot_kernel` reduces
rows chunk by chunk; `columns_kernel` owns columns: it needs only rstd and the finished means, so x and dy are read
twice.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from rmsnorm_cli.kernels.tiles import (
    column_limit,
    input_gradient,
    load_gamma,
    load_rows,
    load_tile,
    row_pointers,
    store_tile,
    weighted,
)


@triton.jit(
    do_not_specialize=[
        "dy_ptr", "x_ptr", "rstd_ptr", "mean_ptr", "first_row", "N",
        "dy_per", "dy_outer", "dy_inner", "dy_col", "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def dot_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, mean_ptr,
    first_row: tl.int64, N: tl.int32,
    dy_per: tl.int64, dy_outer: tl.int64, dy_inner: tl.int64, dy_col: tl.int64,
    x_per: tl.int64, x_outer: tl.int64, x_inner: tl.int64, x_col: tl.int64, gamma_col: tl.int64,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr,
    DY_TWO: tl.constexpr, DY_UNIT: tl.constexpr, TWO: tl.constexpr, UNIT: tl.constexpr,
    GAMMA: tl.constexpr, GAMMA_UNIT: tl.constexpr,
):  # fmt: skip
    """Write mean(u · x_hat) of one row, read chunk by chunk."""
    DTYPE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    local = tl.program_id(0).to(tl.int64)
    row = first_row + local
    n = column_limit(N, ALIGN)
    chunk = tl.arange(0, CHUNK)
    x_row = row_pointers(x_ptr, row, x_per, x_outer, x_inner, TWO, ALIGN)
    dy_row = row_pointers(dy_ptr, row, dy_per, dy_outer, dy_inner, DY_TWO, ALIGN)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros((CHUNK,), DTYPE)
    for start in tl.range(0, N, CHUNK, num_stages=STAGES):
        columns = start + chunk
        x = load_tile(x_row, columns, x_col, True, n, 1, FULL, UNIT).to(DTYPE)
        dy = load_tile(dy_row, columns, dy_col, True, n, 1, FULL, DY_UNIT).to(DTYPE)
        gamma = 1.0
        if GAMMA:
            gamma = load_gamma(gamma_ptr, columns, gamma_col, n, FULL, GAMMA_UNIT)
        products = tl.fma(weighted(dy, gamma, 1, GAMMA), x * rstd, products)
    tl.store(mean_ptr + local, tl.sum(products, axis=0) / N)


@triton.jit(
    do_not_specialize=[
        "dy_ptr", "x_ptr", "rstd_ptr", "mean_ptr", "dx_ptr", "partial_ptr", "first_row", "count", "N",
        "dy_per", "dy_outer", "dy_inner", "dy_col", "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def columns_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, mean_ptr, dx_ptr, partial_ptr,
    first_row: tl.int64, count: tl.int32, N: tl.int32,
    dy_per: tl.int64, dy_outer: tl.int64, dy_inner: tl.int64, dy_col: tl.int64,
    x_per: tl.int64, x_outer: tl.int64, x_inner: tl.int64, x_col: tl.int64, gamma_col: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
    DY_TWO: tl.constexpr, DY_UNIT: tl.constexpr, TWO: tl.constexpr, UNIT: tl.constexpr,
    GAMMA: tl.constexpr, GAMMA_UNIT: tl.constexpr, DX: tl.constexpr, DGAMMA: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Own COLUMNS columns of every P-th tile of rows: write dx there, add to this program's row of `partial`."""
    DTYPE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    n = column_limit(N, ALIGN)
    gamma = 1.0
    if GAMMA:
        gamma = load_gamma(gamma_ptr, columns, gamma_col, n, False, GAMMA_UNIT)
    total = tl.zeros((ROWS, COLUMNS), DTYPE)
    for tile in tl.range(part, (count + ROWS - 1) // ROWS, parts, num_stages=STAGES):
        local = tile * ROWS + tl.arange(0, ROWS)
        rows = first_row + local.to(tl.int64)
        live = local < count
        x_rows = row_pointers(x_ptr, rows, x_per, x_outer, x_inner, TWO, ALIGN)
        dy_rows = row_pointers(dy_ptr, rows, dy_per, dy_outer, dy_inner, DY_TWO, ALIGN)
        rstd = load_rows(rstd_ptr, rows, live, ROWS)
        x_hat = load_tile(x_rows, columns, x_col, live, n, ROWS, False, UNIT).to(DTYPE) * rstd[:, None]
        dy = load_tile(dy_rows, columns, dy_col, live, n, ROWS, False, DY_UNIT).to(DTYPE)
        if DX:
            mean = tl.load(mean_ptr + local, mask=live, other=0.0)
            dx = input_gradient(weighted(dy, gamma, ROWS, GAMMA), x_hat, mean, rstd, ROWS)
            dx_rows = row_pointers(dx_ptr, rows, 1, 0, N, False, ALIGN)
            store_tile(dx_rows, columns, dx, live, n, ROWS, False)
        if DGAMMA:
            total = tl.fma(dy, x_hat, total)
    if DGAMMA:
        cells = partial_ptr + part.to(tl.int64) * N + columns
        dgamma = tl.sum(total, axis=0)
        if not FIRST:
            dgamma += tl.load(cells, mask=columns < n, other=0.0)
        tl.store(cells, dgamma, mask=columns < n)
