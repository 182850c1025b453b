"""What the fused kernels share: where a row starts, how a tile of rows is read and written, and the row's arithmetic.

A tensor of rows is addressed by four numbers: `per`, `outer`, `inner` and `col`. Row i starts at
(i // per) · outer + (i % per) · inner elements, or at i · inner where one stride is enough (TWO is false), and its
columns are `col` elements apart (1 where UNIT is true). ALIGN elements divide every row start, every base address and
N, so a tile may be read in vectors of ALIGN elements; it is a promise of the launcher, never a guess.

Every helper states its rounding: kernels are compiled without floating-point contraction (`enable_fp_fusion=False`),
and a fused multiply-add is written as `tl.fma`. So the same numbers in the same order give the same bits in every
kernel.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

USUAL = tl.constexpr("")
"""What the cache is told of an access as a rule: nothing. (Triton 3.6 takes no bare text for a default.)"""


@triton.jit
def row_offset(rows, per, outer, inner, TWO: tl.constexpr, ALIGN: tl.constexpr):
    """Return where rows start, in elements (int64, like `rows`); each is a multiple of ALIGN."""
    offset = rows // per * outer + rows % per * inner if TWO else rows * inner
    return tl.multiple_of(offset, ALIGN)


@triton.jit
def row_pointers(ptr, rows, per, outer, inner, TWO: tl.constexpr, ALIGN: tl.constexpr):
    """Return the addresses where rows (int64) start; each is a multiple of ALIGN elements."""
    pointers = ptr + row_offset(rows, per, outer, inner, TWO, ALIGN)
    return tl.multiple_of(pointers, ALIGN * (ptr.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def column_limit(N, ALIGN: tl.constexpr):
    """Return N in a form whose divisibility the compiler sees, so that a mask does not break up vectors."""
    return N // ALIGN * ALIGN


@triton.jit
def spread(per_row, ROWS: tl.constexpr):
    """Return a number per row in a form that meets a tile elementwise."""
    if ROWS == 1:
        return per_row
    else:
        return per_row[:, None]


@triton.jit
def row_sum(tile, ROWS: tl.constexpr):
    """Return the sum of each row of a tile: a scalar for one row, else (ROWS,)."""
    if ROWS == 1:
        return tl.sum(tile, axis=0)
    else:
        return tl.sum(tile, axis=1)


@triton.jit
def column_sum(tile, ROWS: tl.constexpr):
    """Return the sum of each column of a tile, (BLOCK,)."""
    if ROWS == 1:
        return tile
    else:
        return tl.sum(tile, axis=0)


@triton.jit
def zeros_tile(ROWS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Return a tile of zeros: (BLOCK,) for one row, else (ROWS, BLOCK)."""
    if ROWS == 1:
        return tl.zeros((BLOCK,), DTYPE)
    else:
        return tl.zeros((ROWS, BLOCK), DTYPE)


@triton.jit
def zeros_rows(ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """Return a zero for each row: a scalar for one row, else (ROWS,)."""
    if ROWS == 1:
        return tl.full((), 0.0, DTYPE)
    else:
        return tl.zeros((ROWS,), DTYPE)


@triton.jit
def row_numbers(tile_number, ROWS: tl.constexpr):
    """Return the rows of a tile, int64 like its number: a scalar for one row, else (ROWS,)."""
    if ROWS == 1:
        return tile_number
    else:
        return tile_number * ROWS + tl.arange(0, ROWS)


@triton.jit
def cell(starts, columns, col, ROWS: tl.constexpr, UNIT: tl.constexpr):
    """Return the addresses of a tile: (BLOCK,) for one row, else (ROWS, BLOCK)."""
    offsets = columns if UNIT else columns.to(tl.int64) * col
    if ROWS == 1:
        return starts + offsets
    else:
        return starts[:, None] + offsets[None, :]


@triton.jit
def load_tile(
    starts, columns, col, live, n, ROWS: tl.constexpr, FULL: tl.constexpr, UNIT: tl.constexpr,
    GUARD: tl.constexpr = False, EVICT: tl.constexpr = USUAL,
):  # fmt: skip
    """Read a tile; what lies outside the M rows or (unless FULL) the n columns is 0, which adds nothing to a sum.

    The row of a tile of one row is not looked at, unless GUARD. EVICT is what the cache is told: nothing, or that the
    tile may go first (`evict_first`) or last (`evict_last`).
    """
    pointers = cell(starts, columns, col, ROWS, UNIT)
    if ROWS > 1:
        rows_mask = live[:, None]
        columns_mask = (columns < n)[None, :]
    else:
        rows_mask = live
        columns_mask = columns < n
    if (ROWS > 1 or GUARD) and FULL:
        return tl.load(pointers, mask=rows_mask, other=0.0, eviction_policy=EVICT)
    elif ROWS > 1 or GUARD:
        return tl.load(pointers, mask=rows_mask & columns_mask, other=0.0, eviction_policy=EVICT)
    elif FULL:
        return tl.load(pointers, eviction_policy=EVICT)
    else:
        return tl.load(pointers, mask=columns_mask, other=0.0, eviction_policy=EVICT)


@triton.jit
def store_tile(starts, columns, values, live, n, ROWS: tl.constexpr, FULL: tl.constexpr, EVICT: tl.constexpr = USUAL):
    """Write a tile of contiguous rows, rounding once, to the dtype of the memory."""
    pointers = cell(starts, columns, 1, ROWS, True)
    values = values.to(starts.dtype.element_ty)
    if ROWS == 1 and FULL:
        tl.store(pointers, values, eviction_policy=EVICT)
    elif ROWS == 1:
        tl.store(pointers, values, mask=columns < n, eviction_policy=EVICT)
    elif FULL:
        tl.store(pointers, values, mask=live[:, None], eviction_policy=EVICT)
    else:
        tl.store(pointers, values, mask=live[:, None] & (columns < n)[None, :], eviction_policy=EVICT)


@triton.jit
def load_rows(pointer, rows, live, ROWS: tl.constexpr):
    """Read one number per row; a row past M gives 0."""
    if ROWS == 1:
        return tl.load(pointer + rows)
    else:
        return tl.load(pointer + rows, mask=live, other=0.0)


@triton.jit
def load_gamma(gamma_ptr, columns, col, n, FULL: tl.constexpr, UNIT: tl.constexpr, EVICT: tl.constexpr = USUAL):
    """Read the weights of a column block, (BLOCK,), in their own dtype; a lane past n is 0."""
    return load_tile(gamma_ptr, columns, col, True, n, 1, FULL, UNIT, False, EVICT)


@triton.jit
def inverse_rms(square_sum, N, eps, DTYPE: tl.constexpr):
    """Return rstd = 1 / sqrt(mean(x²) + eps) of rows whose squares add up to square_sum; N is the true width."""
    # eps is fp64 on a GPU and a Python float in the interpreter; this makes it the arithmetic's dtype in both.
    return tl.rsqrt(square_sum / N + tl.full((), eps, DTYPE))


@triton.jit
def weighted(values, gamma, ROWS: tl.constexpr, GAMMA: tl.constexpr):
    """Return values · gamma for a tile in the arithmetic's dtype and gamma (BLOCK,)."""
    if not GAMMA:
        return values
    elif ROWS == 1:
        return values * gamma.to(values.dtype)
    else:
        return values * gamma.to(values.dtype)[None, :]


@triton.jit
def input_gradient(u, x_hat, mean_ux_hat, rstd, ROWS: tl.constexpr):
    """Return dx = rstd · (u − x_hat · mean(u · x_hat)): rstd³ by itself can leave the range of fp32."""
    return tl.fma(x_hat, spread(-mean_ux_hat, ROWS), u) * spread(rstd, ROWS)
