"""The fused backward of rows that do not fit in registers beside their sums for dgamma: each row is read twice.

The first read gives mean(u · x_hat), the second, from the cache, dx and what the row adds to dgamma: of the row,
nothing is kept.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from rmsnorm_cli.kernels.tiles import USUAL, column_limit, input_gradient, load_gamma, row_offset, weighted


@triton.jit
def strip(
    ptr, offset, columns, col, n, FULL: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, EVICT: tl.constexpr
):
    """Read a column block of one row by per-lane 64-bit offsets.

    Written so, and not as a scalar row pointer plus columns, because ptxas then issues all loads of the row before it
    waits for the first (84 against 69 % of a stream's speed at N = 16384, H200, 2026-11-29).
    """
    if UNIT:
        pointers = tl.multiple_of(ptr + (offset + columns), ALIGN * (ptr.dtype.element_ty.primitive_bitwidth // 8))
    else:
        pointers = ptr + (offset + columns.to(tl.int64) * col)
    if FULL:
        return tl.load(pointers, eviction_policy=EVICT)
    else:
        return tl.load(pointers, mask=columns < n, other=0.0, eviction_policy=EVICT)


@triton.jit
def store_strip(ptr, offset, columns, values, n, FULL: tl.constexpr, ALIGN: tl.constexpr, EVICT: tl.constexpr = USUAL):
    """Write a column block of one contiguous row, rounding once."""
    pointers = tl.multiple_of(ptr + (offset + columns), ALIGN * (ptr.dtype.element_ty.primitive_bitwidth // 8))
    values = values.to(ptr.dtype.element_ty)
    if FULL:
        tl.store(pointers, values, eviction_policy=EVICT)
    else:
        tl.store(pointers, values, mask=columns < n, eviction_policy=EVICT)


@triton.jit(
    do_not_specialize=[
        "dy_ptr", "x_ptr", "rstd_ptr", "dx_ptr", "partial_ptr", "M", "N",
        "dy_per", "dy_outer", "dy_inner", "dy_col", "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def reload_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, partial_ptr,
    M: tl.int32, N: tl.int32,
    dy_per: tl.int64, dy_outer: tl.int64, dy_inner: tl.int64, dy_col: tl.int64,
    x_per: tl.int64, x_outer: tl.int64, x_inner: tl.int64, x_col: tl.int64, gamma_col: tl.int64,
    A: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr, PLAIN: tl.constexpr,
    DY_TWO: tl.constexpr, DY_UNIT: tl.constexpr, TWO: tl.constexpr, UNIT: tl.constexpr,
    GAMMA: tl.constexpr, GAMMA_UNIT: tl.constexpr, DX: tl.constexpr, DGAMMA: tl.constexpr,
):  # fmt: skip
    """Walk every P-th row as `walk_kernel` does, but read it twice: only the sums for dgamma stay in registers."""
    FULL_A: tl.constexpr = FULL or B > 0
    pid = tl.program_id(0)
    n = column_limit(N, ALIGN)
    a = tl.arange(0, A)
    b = A + tl.arange(0, B if B > 0 else 1)
    sum_a = tl.zeros((A,), tl.float32)
    sum_b = tl.zeros((B if B > 0 else 1,), tl.float32)
    for index in tl.range(pid, M, tl.num_programs(0), num_stages=1):
        row = tl.full((), index, tl.int64)
        dx_at = row_offset(row, 1, 0, N, False, ALIGN)
        if PLAIN:  # x, dy and dx lie alike
            x_at = dx_at
            dy_at = dx_at
        else:
            x_at = row_offset(row, x_per, x_outer, x_inner, TWO, ALIGN)
            dy_at = row_offset(row, dy_per, dy_outer, dy_inner, DY_TWO, ALIGN)
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        ga = 1.0
        gb = 1.0
        if DX:
            xa = strip(x_ptr, x_at, a, x_col, n, FULL_A, UNIT, ALIGN, "").to(tl.float32)
            da = strip(dy_ptr, dy_at, a, dy_col, n, FULL_A, DY_UNIT, ALIGN, "").to(tl.float32)
            if GAMMA:
                ga = load_gamma(gamma_ptr, a, gamma_col, n, FULL_A, GAMMA_UNIT)
            dot = tl.sum(weighted(da, ga, 1, GAMMA) * xa, axis=0)
            if B > 0:
                xb = strip(x_ptr, x_at, b, x_col, n, FULL, UNIT, ALIGN, "").to(tl.float32)
                db = strip(dy_ptr, dy_at, b, dy_col, n, FULL, DY_UNIT, ALIGN, "").to(tl.float32)
                if GAMMA:
                    gb = load_gamma(gamma_ptr, b, gamma_col, n, FULL, GAMMA_UNIT)
                dot += tl.sum(weighted(db, gb, 1, GAMMA) * xb, axis=0)
            mean = dot * rstd / N
            # Without the barrier the compiler merges the two reads and keeps the row after all.
            tl.debug_barrier()
        xa = strip(x_ptr, x_at, a, x_col, n, FULL_A, UNIT, ALIGN, "evict_first").to(tl.float32) * rstd
        da = strip(dy_ptr, dy_at, a, dy_col, n, FULL_A, DY_UNIT, ALIGN, "evict_first").to(tl.float32)
        if DX:
            if GAMMA:
                ga = load_gamma(gamma_ptr, a, gamma_col, n, FULL_A, GAMMA_UNIT, "evict_last")
            store_strip(
                dx_ptr, dx_at, a, input_gradient(weighted(da, ga, 1, GAMMA), xa, mean, rstd, 1), n, FULL_A, ALIGN
            )
        if DGAMMA:
            sum_a = tl.fma(da, xa, sum_a)
        if B > 0:
            xb = strip(x_ptr, x_at, b, x_col, n, FULL, UNIT, ALIGN, "evict_first").to(tl.float32) * rstd
            db = strip(dy_ptr, dy_at, b, dy_col, n, FULL, DY_UNIT, ALIGN, "evict_first").to(tl.float32)
            if DX:
                if GAMMA:
                    gb = load_gamma(gamma_ptr, b, gamma_col, n, FULL, GAMMA_UNIT, "evict_last")
                store_strip(
                    dx_ptr, dx_at, b, input_gradient(weighted(db, gb, 1, GAMMA), xb, mean, rstd, 1), n, FULL, ALIGN
                )
            if DGAMMA:
                sum_b = tl.fma(db, xb, sum_b)
    if DGAMMA:
        partial_at = row_offset(pid.to(tl.int64), 1, 0, N, False, ALIGN)
        store_strip(partial_ptr, partial_at, a, sum_a, n, FULL_A, ALIGN, "evict_last")
        if B > 0:
            store_strip(partial_ptr, partial_at, b, sum_b, n, FULL, ALIGN, "evict_last")
