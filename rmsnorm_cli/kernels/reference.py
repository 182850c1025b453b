"""The oracle in readable PyTorch: RMSNorm forward and its explicit backward, one line per line of the formula.

    rstd   = 1 / sqrt(mean(x²) + eps)          the mean over the N columns of a row
    y      = x · rstd · gamma
    u      = dy · gamma
    dx     = rstd · u − x · rstd³ · mean(u · x)
    dgamma = sum over rows of dy · x · rstd    a sum, not a mean

No mean is subtracted: that would be LayerNorm. Source: Zhang & Sennrich, Root Mean Square Layer Normalization, 2019.
"""

import torch
from torch import Tensor


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which everything between the load and the store is computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def statistics(x: Tensor, eps: float) -> Tensor:
    """Return rstd of every row, in the arithmetic dtype: x of shape (..., N) gives (..., 1)."""
    x = x.to(arithmetic_dtype(x))  # convert first: 300² is already infinite in float16
    mean_square = (x * x).mean(dim=-1, keepdim=True)  # (..., 1)
    return 1.0 / torch.sqrt(mean_square + eps)


def forward(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Normalise every row of x by its root mean square and scale it by gamma.

    x is (..., N) in any floating dtype and layout, gamma (N,) or None (no scale). Returns y with x's shape and dtype:
    float64 arithmetic for a float64 x, else float32, rounded once at the end. A row beyond 1.8e19 has squares that are
    infinite in float32 and comes out as 0, as in PyTorch's own; an infinity itself as NaN.
    """
    dtype = arithmetic_dtype(x)
    # x is converted once: autograd rounds a gradient to x's dtype at each conversion, and adds up what it rounded.
    wide = x.to(dtype)
    y = wide * statistics(wide, eps)
    if gamma is not None:
        y = y * gamma.to(dtype)
    return y.to(x.dtype)


def backward(dy: Tensor, x: Tensor, gamma: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """Compute dx and dgamma from the formula, without autograd.

    dy and x are (..., N), gamma (N,) or None. Returns dx like x, and dgamma like gamma (None where gamma is None).
    A NaN stays in its own row of dx, and makes dgamma NaN even where that row's dy is 0: 0 · NaN is NaN.
    Written with differentiable operations: autograd through it gives the second derivative.
    """
    dtype = arithmetic_dtype(x)
    wide, wide_dy = x.to(dtype), dy.to(dtype)
    rstd = statistics(wide, eps)  # (..., 1)
    x_hat = wide * rstd  # (..., N)
    u = wide_dy if gamma is None else wide_dy * gamma.to(dtype)
    # x · rstd³ · mean(u · x) = rstd · x_hat · mean(u · x_hat). rstd³ alone leaves float32's range where dx does not:
    # rows around 1e13, or zeros beside a tiny eps.
    dx = rstd * (u - x_hat * (u * x_hat).mean(dim=-1, keepdim=True))
    if gamma is None:
        return dx.to(x.dtype), None
    contributions = wide_dy * x_hat  # (..., N), what each row adds
    dgamma = contributions.reshape(-1, x.shape[-1]).sum(dim=0)  # (N,)
    return dx.to(x.dtype), dgamma.to(gamma.dtype)
