"""A sketch, not in the product: the backward of 16-bit rows of an odd number of columns, read by the word.

Every other such row starts in the middle of a word of 4 bytes, the least that can be copied into shared memory; so the
product reads them one number at a time, and nothing is under way while it computes (45 to 57 % of a stream). Here
position j of a tile holds the numbers of columns 2j and 2j - 1. Where the row starts in the low half of a word, those
lie in words j and j - 1, else both in word j: two tiles of words are asked for ahead, the second from the L1 cache,
and `half` takes from each what it needs. The order of the sums is the same for both kinds of rows, and so are a row's
bits. dx is written in words where its row starts in a high half, number by number where it does not.

Right in the interpreter (`test_sketch_odd_walk.py`); compiled for sm_90 without spills, its loads pipelined. Not timed.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from rmsnorm_cli.kernels.tiles import row_offset


@triton.jit
def words_of(ptr, offset):
    """Return where the words of a row start whose first number lies `offset` after ptr, and if that is a high half."""
    first = ptr.to(tl.int64, bitcast=True) + 2 * offset
    return (first - first % 4).to(tl.pointer_type(tl.uint32), bitcast=True), ((first % 4) // 2).to(tl.int32)


@triton.jit
def half(words, high, DTYPE: tl.constexpr):
    """Return the low or the high halves of words, in fp32."""
    return ((words >> (16 * high)) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def read_row(ptr, offset, col, at, n, UNIT: tl.constexpr, FULL: tl.constexpr):
    """Return a row's numbers as (columns 2j, columns 2j - 1), in fp32; what lies outside the n columns is 0."""
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    even = at >= 0 if FULL else 2 * at < n
    odd = at > 0 if FULL else (at > 0) & (2 * at < n)
    if UNIT:
        words, high = words_of(ptr, offset)
        here = tl.load(words + at, mask=even, other=0)
        before = tl.load(words + (high - 1) + at, mask=odd, other=0)
        return half(here, high, DTYPE), half(before, 1 - high, DTYPE)
    else:
        columns = 2 * at
        return (
            tl.load(ptr + offset + columns * col, mask=even, other=0.0).to(tl.float32),
            tl.load(ptr + offset + (columns - 1) * col, mask=odd, other=0.0).to(tl.float32),
        )


@triton.jit
def read_gamma(ptr, at, col, n):
    """Return gamma as a row is read, in fp32."""
    even = tl.load(ptr + 2 * at * col, mask=2 * at < n, other=0.0)
    odd = tl.load(ptr + (2 * at - 1) * col, mask=(at > 0) & (2 * at - 1 < n), other=0.0)
    return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def write_row(ptr, offset, at, evens, odds, n, FULL: tl.constexpr):
    """Write a contiguous row, rounding once."""
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    words, high = words_of(ptr, offset)
    low_bits = odds.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
    high_bits = evens.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
    inside = at >= 0 if FULL else 2 * at < n
    tl.store(words + at, low_bits | (high_bits << 16), mask=inside & (at > 0) & (high == 1))
    row = ptr + offset
    tl.store(row + 2 * at, evens.to(DTYPE), mask=inside & ((high == 0) | (at == 0)))
    tl.store(row - 1 + 2 * at, odds.to(DTYPE), mask=inside & (at > 0) & (high == 0))


@triton.jit(
    do_not_specialize=[
        "dy_ptr", "x_ptr", "rstd_ptr", "dx_ptr", "partial_ptr", "M", "N",
        "dy_per", "dy_outer", "dy_inner", "dy_col", "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def odd_walk_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, partial_ptr,
    M: tl.int64, N: tl.int32,
    dy_per: tl.int64, dy_outer: tl.int64, dy_inner: tl.int64, dy_col: tl.int64,
    x_per: tl.int64, x_outer: tl.int64, x_inner: tl.int64, x_col: tl.int64, gamma_col: tl.int64,
    A: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
    DY_TWO: tl.constexpr, DY_UNIT: tl.constexpr, TWO: tl.constexpr, UNIT: tl.constexpr,
    GAMMA: tl.constexpr, DX: tl.constexpr, DGAMMA: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Walk every P-th row: write its dx, add to this program's row of `partial`. Tiles of A and B positions."""
    if DEPENDENT:
        gdc_launch_dependents()
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    FULL_A: tl.constexpr = FULL or B > 0
    a = tl.arange(0, A).to(tl.int64)
    b = A + tl.arange(0, B if B > 0 else 1).to(tl.int64)
    gae, gao, gbe, gbo = 1.0, 1.0, 1.0, 1.0
    if GAMMA:
        gae, gao = read_gamma(gamma_ptr, a, gamma_col, N)
        if B > 0:
            gbe, gbo = read_gamma(gamma_ptr, b, gamma_col, N)
    sae = tl.zeros((A,), tl.float32)
    sao = tl.zeros((A,), tl.float32)
    if B > 0:
        sbe = tl.zeros((B,), tl.float32)
        sbo = tl.zeros((B,), tl.float32)
    for step in tl.range(0, ((M - pid + programs - 1) // programs).to(tl.int32), num_stages=STAGES):
        row = pid + step * programs
        x_at = row_offset(row, x_per, x_outer, x_inner, TWO, 1)
        dy_at = row_offset(row, dy_per, dy_outer, dy_inner, DY_TWO, 1)
        xae, xao = read_row(x_ptr, x_at, x_col, a, N, UNIT, FULL_A)
        dae, dao = read_row(dy_ptr, dy_at, dy_col, a, N, DY_UNIT, FULL_A)
        if B > 0:
            xbe, xbo = read_row(x_ptr, x_at, x_col, b, N, UNIT, FULL)
            dbe, dbo = read_row(dy_ptr, dy_at, dy_col, b, N, DY_UNIT, FULL)
        rstd = tl.load(rstd_ptr + row)
        xae, xao = xae * rstd, xao * rstd
        if B > 0:
            xbe, xbo = xbe * rstd, xbo * rstd
        if DX:
            dot = tl.sum(tl.fma(dao * gao, xao, dae * gae * xae), axis=0)
            if B > 0:
                dot += tl.sum(tl.fma(dbo * gbo, xbo, dbe * gbe * xbe), axis=0)
            minus_mean = -dot / N
            dx_at = row * N
            write_row(
                dx_ptr,
                dx_at,
                a,
                tl.fma(xae, minus_mean, dae * gae) * rstd,
                tl.fma(xao, minus_mean, dao * gao) * rstd,
                N,
                FULL_A,
            )
            if B > 0:
                write_row(
                    dx_ptr,
                    dx_at,
                    b,
                    tl.fma(xbe, minus_mean, dbe * gbe) * rstd,
                    tl.fma(xbo, minus_mean, dbo * gbo) * rstd,
                    N,
                    FULL,
                )
        if DGAMMA:
            sae, sao = tl.fma(dae, xae, sae), tl.fma(dao, xao, sao)
            if B > 0:
                sbe, sbo = tl.fma(dbe, xbe, sbe), tl.fma(dbo, xbo, sbo)
    if DGAMMA:
        partial = partial_ptr + pid * N
        tl.store(partial + 2 * a, sae, mask=2 * a < N)
        tl.store(partial + 2 * a - 1, sao, mask=(a > 0) & (2 * a - 1 < N))
        if B > 0:
            tl.store(partial + 2 * b, sbe, mask=2 * b < N)
            tl.store(partial + 2 * b - 1, sbo, mask=2 * b - 1 < N)
