"""The teaching kernel: RMSNorm with one program for each row, in the order of the lesson.

    rstd   = 1 / sqrt(mean(x²) + eps)                  forward: one number a row, saved in fp32
    y      = x · rstd · gamma                          forward
    u      = dy · gamma
    dx     = rstd · u − x · rstd³ · mean(u · x)        backward, first kernel
    dgamma = sum over rows of dy · x · rstd            backward: each row writes what it adds, a second kernel sums it

M rows, N columns. BLOCK is the next power of two at or above N, because a Triton block must be one: the lanes from N
on are padding, and every load, store and mean has to leave them out.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# (a Triton kernel's arguments are typed by its launch)

import torch
import triton
import triton.language as tl
from torch import Tensor

from rmsnorm_cli.kernels.contract import check_gradient, check_rowwise
from rmsnorm_cli.kernels.launch import launching

# --- forward ----------------------------------------------------------------------------------------------------------


@triton.jit
def forward_kernel(x_ptr, gamma_ptr, y_ptr, rstd_ptr, N, eps, BLOCK: tl.constexpr):
    """Normalise one row: y = x · rstd · gamma, and keep its rstd for the backward."""
    # A row starts at row · N. In 32 bits that product wraps to a negative address from 2³¹ elements on.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    # Padding is loaded as 0, which adds nothing to a sum of squares; unmasked, it would be the next row.
    x = tl.load(x_ptr + row * N + columns, mask=inside, other=0.0)
    gamma = tl.load(gamma_ptr + columns, mask=inside, other=0.0)
    # Convert before reducing: in fp16 the square of 256 is already infinite, and a sum of ones stops at 2048.
    x = x.to(tl.float32)
    # eps is a double in the interpreter and fp32 on a GPU; this makes it fp32 in both.
    eps = tl.full((), eps, tl.float32)
    # Divide by N, the numbers that are there, and not by BLOCK, the lanes that were loaded.
    mean_square = tl.sum(x * x, axis=0) / N
    rstd = tl.rsqrt(mean_square + eps)
    y = x * rstd * gamma.to(tl.float32)
    # The one rounding: fp32 to the dtype of y, at the store.
    tl.store(y_ptr + row * N + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row, rstd)


def forward(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launch one program a row and return y (M, N) in x's dtype and rstd (M,) in fp32.

    x is (M, N), contiguous, fp32 or fp16; gamma (N,), contiguous, of x's dtype and device.
    Raises ContractError outside that, before anything is allocated.
    """
    eps = check_rowwise(x, gamma, eps)
    M, N = x.shape
    y = torch.empty_like(x)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    if M > 0:  # an empty grid is a launch error
        BLOCK = triton.next_power_of_2(N)
        with launching(x):
            forward_kernel[(M,)](x, gamma, y, rstd, N, eps, BLOCK=BLOCK, num_warps=warps(BLOCK))
    return y, rstd


# --- backward ---------------------------------------------------------------------------------------------------------


@triton.jit
def backward_kernel(
    dy_ptr,
    x_ptr,
    gamma_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    N,
    BLOCK: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DGAMMA: tl.constexpr,
):
    """Write one row's dx, and the row's own contribution to dgamma into a private row of `partial`."""
    pid = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    valid = lanes < N
    cells = pid * N + lanes
    x = tl.load(x_ptr + cells, mask=valid, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + cells, mask=valid, other=0.0).to(tl.float32)
    # The forward's own rstd, eps included: computing it again is a second chance to get it wrong.
    rstd = tl.load(rstd_ptr + pid)
    x_hat = x * rstd
    if NEED_DX:
        gamma = tl.load(gamma_ptr + lanes, mask=valid, other=0.0).to(tl.float32)
        u = dy * gamma
        # x · rstd³ · mean(u · x) = rstd · x_hat · mean(u · x_hat): rstd³ by itself can leave the range of fp32.
        mean_ux_hat = tl.sum(u * x_hat, axis=0) / N
        dx = rstd * (u - x_hat * mean_ux_hat)
        tl.store(dx_ptr + cells, dx.to(dx_ptr.dtype.element_ty), mask=valid)
    if NEED_DGAMMA:
        # fp32, not x's dtype: thousands of rows are going to be added up.
        tl.store(partial_ptr + cells, dy * x_hat, mask=valid)


@triton.jit(do_not_specialize=["M"])
def column_sum_kernel(partial_ptr, dgamma_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum the partials of BLOCK_N columns over all rows, in a fixed order: no atomics, the same bits each run."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, M, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        is_cell = (rows < M)[:, None] & is_column[None, :]
        # The last tile hangs over row M - 1: its missing rows are 0, which adds nothing.
        total += tl.load(partial_ptr + rows.to(tl.int64)[:, None] * N + column[None, :], mask=is_cell, other=0.0)
    # A sum over rows, not a mean: gamma is shared by all of them.
    dgamma = tl.sum(total, axis=0)
    tl.store(dgamma_ptr + column, dgamma.to(dgamma_ptr.dtype.element_ty), mask=is_column)


def backward(
    dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor, *, need_dx: bool = True, need_dgamma: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Launch one program a row for dx and the partials, then the column sum; return dx (M, N) and dgamma (N,).

    dy, x, gamma as in `forward` (dy like x), rstd (M,) as saved by it. What is not needed is neither allocated nor
    computed and comes back as None. Raises ContractError for a dy that does not match x, before anything is allocated.
    """
    check_gradient(dy, x)
    M, N = x.shape
    dx = torch.empty_like(x) if need_dx else None
    dgamma = torch.zeros_like(gamma) if need_dgamma else None
    if M == 0 or not (need_dx or need_dgamma):
        return dx, dgamma
    partial = torch.empty((M, N), dtype=torch.float32, device=x.device) if need_dgamma else None
    BLOCK = triton.next_power_of_2(N)
    with launching(x):
        backward_kernel[(M,)](
            dy,
            x,
            gamma,
            rstd,
            dx,
            partial,
            N,
            BLOCK=BLOCK,
            NEED_DX=need_dx,
            NEED_DGAMMA=need_dgamma,
            num_warps=warps(BLOCK),
        )
        if need_dgamma:
            BLOCK_M, BLOCK_N = 64, 64
            grid = (triton.cdiv(N, BLOCK_N),)
            column_sum_kernel[grid](partial, dgamma, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    return dx, dgamma


# --- launch details ---------------------------------------------------------------------------------------------------


def warps(block: int) -> int:
    """Return how many warps share a row: enough that no thread holds more than 16 numbers of it."""
    return min(max(block // 512, 1), 8)
