"""The fused implementation as registered operators, which torch.compile keeps in its graph as they are.

Eager calls go through `autograd.py`, which costs less host time and differentiates twice; an operator's derivative is
its backward operator, which has none. Outputs are contiguous, so that a graph knows their strides: an x that only
another order of its leading dimensions would save from a copy is copied here (and counted).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm_cli.kernels import fused
from rmsnorm_cli.kernels.autograd import count
from rmsnorm_cli.kernels.frontplan import accumulator
from rmsnorm_cli.kernels.rowlayout import describe


def _natural(x: Tensor) -> Tensor:
    """Return x, or a counted copy of it where its rows cannot be walked in the order of its dimensions."""
    if x.numel() == 0 or describe(x, range(x.dim() - 1)) is not None:
        return x
    count("fused", "copies")
    return x.contiguous()


@torch.library.custom_op("rmsnorm::fused_forward", mutates_args=())
def fused_forward(x: Tensor, gamma: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return y, contiguous, and rstd, one number a row."""
    y, rstd = fused.forward(_natural(x), gamma, eps)
    assert rstd is not None
    count("fused", "forward")
    return y, rstd


@fused_forward.register_fake
def _(x: Tensor, gamma: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    return x.new_empty(x.shape), x.new_empty((rows,), dtype=accumulator(x.dtype))


@torch.library.custom_op("rmsnorm::fused_backward", mutates_args=())
def fused_backward(
    dy: Tensor, x: Tensor, gamma: Tensor | None, rstd: Tensor, need_dx: bool, need_dgamma: bool
) -> tuple[Tensor, Tensor]:
    """Return dx, contiguous, and dgamma; the one that is not needed has no elements."""
    dx, dgamma = fused.backward(dy, _natural(x), gamma, rstd, need_dx=need_dx, need_dgamma=need_dgamma)
    count("fused", "backward")
    none = x.new_empty(0)
    return none if dx is None else dx, x.new_empty(0) if dgamma is None else dgamma


@fused_backward.register_fake
def _(
    dy: Tensor, x: Tensor, gamma: Tensor | None, rstd: Tensor, need_dx: bool, need_dgamma: bool
) -> tuple[Tensor, Tensor]:
    dgamma = x.new_empty(0) if gamma is None or not need_dgamma else gamma.new_empty(gamma.shape)
    return x.new_empty(x.shape if need_dx else (0,)), dgamma


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: tuple[Tensor, Tensor]) -> None:
    x, gamma, _ = inputs
    _, rstd = output
    ctx.save_for_backward(x, gamma, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    if dy is None:
        return None, None, None
    x, gamma, rstd = ctx.saved_tensors
    need_dx, need_dgamma, _ = ctx.needs_input_grad
    dx, dgamma = torch.ops.rmsnorm.fused_backward(dy, x, gamma, rstd, need_dx, need_dgamma)
    return dx if need_dx else None, dgamma if need_dgamma else None, None


fused_forward.register_autograd(_differentiate, setup_context=_keep)


def rms_norm(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dimension of x through the registered operator; differentiable once in x and gamma."""
    y: Tensor = torch.ops.rmsnorm.fused_forward(x, gamma, float(eps))[0]
    return y
