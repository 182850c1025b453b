"""Known-good and known-bad implementations in plain PyTorch, for the verifier to be tested on.

Each bad one is right but for one thing. `controls.py` says which gate has to see it.
"""

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rmsnorm_cli.judging.oracle import Oracle

Norm = Callable[[Tensor, Tensor | None, float], Tensor]
Term = Callable[[Tensor, Tensor, Tensor], Tensor]


def _nothing(tensors: dict[str, Tensor]) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Parts:
    """A right RMSNorm in pieces that can be replaced one by one; all arguments are float32.

    `rstd(x, eps)`, `y(x, rstd, gamma)`, `dx(x, rstd, u)`, `dgamma(x, rstd, dy)`; `forward_end` and `backward_end` get
    the tensors of a pass when it is over and may do harm to them.
    """

    rstd: Callable[[Tensor, float], Tensor] = lambda x, eps: (x.square().mean(-1, True) + eps).rsqrt()
    y: Term = lambda x, r, gamma: x * r * gamma
    dx: Term = lambda x, r, u: r * (u - x * r * (u * x * r).mean(-1, True))
    dgamma: Term = lambda x, r, dy: (dy * x * r).sum(0)
    forward_end: Callable[[dict[str, Tensor]], None] = _nothing
    backward_end: Callable[[dict[str, Tensor]], None] = _nothing
    watched: bool = True  # saved tensors notice being changed in place; plain attributes do not

    def norm(self) -> Norm:
        """Return f(x, gamma, eps) -> y for a 2-D x."""
        return lambda x, gamma, eps: _Simulated.apply(x, gamma, eps, self)


class _Simulated(torch.autograd.Function):
    """Works as a kernel's wrapper does: outputs from `torch.empty`, float32 inside, one rounding at the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float, parts: Parts) -> Tensor:
        rstd = parts.rstd(x.float(), eps)
        y = torch.empty_like(x)
        y.copy_(parts.y(x.float(), rstd, gamma.float()))
        if parts.watched:
            ctx.save_for_backward(x, gamma)
        else:
            ctx.kept = (x, gamma)
        ctx.rstd, ctx.parts = rstd, parts
        parts.forward_end({"x": x, "gamma": gamma, "y": y})
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        parts: Parts = ctx.parts
        x, gamma = ctx.saved_tensors if parts.watched else ctx.kept
        dx, dgamma = torch.empty_like(x), torch.empty_like(gamma)
        dx.copy_(parts.dx(x.float(), ctx.rstd, dy.float() * gamma.float()))
        dgamma.copy_(parts.dgamma(x.float(), ctx.rstd, dy.float()))
        parts.backward_end({"x": x, "gamma": gamma, "dy": dy, "dx": dx, "dgamma": dgamma})
        return dx, dgamma, None, None


class _RstdAsConstant(torch.autograd.Function):
    """Right once; differentiated again, it forgets that rstd depends on x and says nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        rstd = (x.float().square().mean(-1, True) + eps).rsqrt()
        ctx.save_for_backward(x, gamma)
        ctx.rstd = rstd
        return (x.float() * rstd * gamma.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gamma = ctx.saved_tensors
        right = Parts()
        dx = right.dx(x.float(), ctx.rstd, dy.float() * gamma.float())
        return dx.to(x.dtype), right.dgamma(x.float(), ctx.rstd, dy.float()).to(gamma.dtype), None


# Good ones.


def eager(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Compute the formula by ordinary operations, differentiated by autograd."""
    wide = x.float()
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y if gamma is None else y * gamma.float()).to(x.dtype)


def native(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Call PyTorch's own."""
    return F.rms_norm(x, (x.shape[-1],), gamma, eps)


def llama(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Round x·rstd to x's dtype before gamma."""
    wide = x.float()
    xhat = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    return xhat if gamma is None else xhat * gamma


def gemma(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Multiply by 1 + gamma, in float32."""
    return eager(x, None if gamma is None else 1 + gamma.float(), eps)


def tree(values: Tensor) -> Tensor:
    """Sum the last dimension in float32 as a GPU does, by halves; (..., N) gives (..., 1)."""
    width = 1 << max(values.shape[-1] - 1, 0).bit_length()
    values = F.pad(values, (0, width - values.shape[-1]))
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values


TREE = Parts(
    rstd=lambda x, eps: (tree(x * x) / x.shape[-1] + eps).rsqrt(),
    dx=lambda x, r, u: r * (u - x * r * (tree(u * x * r) / x.shape[-1])),
    dgamma=lambda x, r, dy: tree((dy * x * r).T).squeeze(-1),
)

# Bad ones.


def broadcast(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Return one number a row, which broadcasts against anything."""
    return eager(x, gamma, eps)[..., :1]


def wrong_dtype(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Return right values in float64."""
    return eager(x, gamma, eps).double()


def cut_off(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Return right values without a way back to x and gamma."""
    return eager(x.detach(), None if gamma is None else gamma.detach(), eps)


def in_place(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Return right values and write them over x as well, past autograd's notice."""
    y = eager(x.clone(), gamma, eps)
    x.data.copy_(y.detach())
    return y


def forgetful(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Read gamma by position without looking at its length."""
    assert gamma is not None
    return eager(x, torch.cat([gamma, gamma])[: x.shape[-1]], eps)


def rstd_as_constant(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Give a second derivative that is wrong by about 100 %."""
    return _RstdAsConstant.apply(x, gamma, eps)  # type: ignore[no-any-return]


def stale() -> Norm:
    """Return a norm that remembers its first answer to each shape and dtype."""
    kept: dict[tuple[Any, ...], Tensor] = {}

    def call(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
        y = eager(x, gamma, eps)
        first = kept.setdefault((x.shape, x.dtype), y.detach().clone())
        return y + (first - y.detach())  # the old values, with the new graph

    return call


def only_once() -> Norm:
    """Return a norm that is right on its first call and a little off later."""
    calls = [0]

    def call(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
        calls[0] += 1
        return eager(x, gamma, eps) * (1 if calls[0] == 1 else 1 + 2**-7)

    return call


def peeking(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Copy the answer from an oracle, if one is in memory while the call runs."""
    y = eager(x, gamma, eps)
    for found in gc.get_objects():
        if type(found) is Oracle and found.y.shape == x.shape:  # a dead weak proxy raises where it is asked for more
            y = y + (found.y.to(x.dtype) - y.detach())
            if gamma is not None and found.dgamma is not None:
                return y
    return y * 0


def _spoil(name: str, change: Callable[[Tensor], object]) -> Callable[[dict[str, Tensor]], None]:
    def end(tensors: dict[str, Tensor]) -> None:
        change(tensors[name])

    return end


def _write_behind(tensor: Tensor) -> None:
    """Write one element past the end, where the tensor's storage has room for it."""
    behind = tensor.storage_offset() + tensor.numel()
    if tensor.untyped_storage().nbytes() >= (behind + 1) * tensor.element_size():
        tensor.as_strided((1,), (1,), behind).fill_(7)


def _one_wrong(tensor: Tensor) -> None:
    tensor[-1, -1] += 0.5


def _shuffled_sum(rows: Tensor) -> Tensor:
    """Add rows up in float16 and in another order each time, as 16-bit atomics do."""
    order = torch.randperm(len(rows), device=rows.device)
    total: Tensor = functools.reduce(torch.add, rows[order].half())
    return total.float()


def _cut(values: Tensor) -> Tensor:
    """Clear the 13 bits of float32 that float16 does not have."""
    return (values.view(torch.int32) & -8192).view(torch.float32)


def _without_small_squares(x: Tensor, eps: float) -> Tensor:
    """Return rstd from squares of which those that float16 holds no number for, below 2^-25, are lost."""
    squares = x.square()
    return (torch.where(squares < 2**-25, 0, squares).mean(-1, True) + eps).rsqrt()


def in_half(parts: Parts) -> Callable[[], Norm]:
    """Return a maker of a norm that is made of `parts` where x is float16, and right elsewhere."""
    norms = {True: parts.norm(), False: RIGHT.norm()}
    return lambda: lambda x, gamma, eps: norms[x.dtype == torch.float16](x, gamma, eps)


RIGHT = Parts()
ZEROS = replace(RIGHT, y=lambda x, r, gamma: x * 0)
NANS = replace(RIGHT, y=lambda x, r, gamma: x * float("nan"))
ONE_NAN = replace(RIGHT, forward_end=_spoil("y", lambda y: y[0, :1].fill_(float("nan"))))
ONE_INF = replace(RIGHT, backward_end=_spoil("dx", lambda dx: dx[-1, -1:].fill_(float("inf"))))
ONE_WRONG = replace(RIGHT, forward_end=_spoil("y", _one_wrong))
NO_NORM = replace(RIGHT, y=lambda x, r, gamma: x * gamma)
PADDED = replace(
    RIGHT, rstd=lambda x, eps: (x.square().sum(-1, True) / (1 << (x.shape[-1] - 1).bit_length()) + eps).rsqrt()
)
HALF_INSIDE = replace(RIGHT, y=lambda x, r, gamma: (x * r).half().float() * gamma)
MEAN_OVER_ROWS = replace(RIGHT, dgamma=lambda x, r, dy: (dy * x * r).mean(0))
NO_SECOND_TERM = replace(RIGHT, dx=lambda x, r, u: r * u)
CUT = replace(RIGHT, y=lambda x, r, gamma: _cut(x * r * gamma))
PARTIALS_IN_HALF = replace(RIGHT, dgamma=lambda x, r, dy: (dy * x * r).half().float().sum(0))
SQUARES_LOST = replace(RIGHT, rstd=_without_small_squares)
UNWATCHED = replace(RIGHT, watched=False)
DY_CHANGED = replace(RIGHT, backward_end=_spoil("dy", lambda dy: dy.mul_(2)))
PAST_THE_END = replace(RIGHT, forward_end=_spoil("y", _write_behind))
UNORDERED = replace(RIGHT, dgamma=lambda x, r, dy: _shuffled_sum(dy * x * r))


class _RowUnwritten(torch.autograd.Function):
    """Right but for the last row of y, which is left as the allocator gave it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gamma)
        ctx.eps = eps
        y = torch.empty_like(x)
        y[:-1] = eager(x[:-1], gamma, eps)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gamma = ctx.saved_tensors
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), gamma.detach().requires_grad_()
            dx, dgamma = torch.autograd.grad(eager(*leaves, ctx.eps), leaves, dy)
        return torch.empty_like(x).copy_(dx), torch.empty_like(gamma).copy_(dgamma), None


def row_unwritten(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """Leave the last row of y unwritten."""
    return _RowUnwritten.apply(x, gamma, eps)  # type: ignore[no-any-return]
