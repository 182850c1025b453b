"""The relations of the "identities" gate; each runs the implementation on changed inputs and returns claims.

A claim without a bound is exact in floating point; one with a bound compares sums that are rounded on the way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rmsnorm_cli.gates.gate import Answer, Problem, answer
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.budget import KAPPA_DX, U32, Budget, smallest
from rmsnorm_cli.judging.numerics import dx_scale, unit_roundoff
from rmsnorm_cli.judging.oracle import Oracle
from rmsnorm_cli.kernels.contract import CallSpec

if TYPE_CHECKING:
    from rmsnorm_cli.kernels.api import Implementation


@dataclass(frozen=True)
class Claim:
    """Two values that must agree: bit for bit, or within `bound`. `scale` is what dx is divided by before that."""

    what: str
    left: Tensor
    right: Tensor
    bound: Tensor | None = None
    scale: Tensor | None = None


class Unanswered(Exception):
    """The implementation gave no result for a transformed input."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


@dataclass(frozen=True)
class Base:
    """The untransformed question and its answer; `run` asks a transformed one."""

    impl: "Implementation"
    inputs: Inputs
    eps: float
    got: "Results"
    want: Oracle
    bounds: Budget

    def run(
        self,
        *,
        x: Tensor | None = None,
        gamma: Tensor | None = None,
        dy: Tensor | None = None,
        eps: float | None = None,
    ) -> "Results":
        """Run the implementation with some arguments replaced."""
        given = self.inputs
        changed = Inputs(
            given.x if x is None else x, given.gamma if gamma is None else gamma, given.dy if dy is None else dy
        )
        return complete(answer(self.impl, changed.pristine(), self.eps if eps is None else eps))

    @property
    def gamma(self) -> Tensor:
        """Return gamma, which every case of this gate has."""
        assert self.inputs.gamma is not None
        return self.inputs.gamma

    @property
    def weight(self) -> Tensor:
        """Return what x̂ is multiplied by, in float64: gamma, or 1 + gamma in the gemma convention."""
        return self.gamma.double() + (1 if self.impl.rounding == "gemma" else 0)

    @property
    def scale(self) -> Tensor:
        """Return what dx is divided by where it is judged by a tolerance."""
        return dx_scale(self.want.rstd)


@dataclass(frozen=True)
class Results:
    """y, dx and dgamma, all of them there."""

    y: Tensor
    dx: Tensor
    dgamma: Tensor


def complete(got: Answer) -> Results:
    """Return y, dx and dgamma; raise Unanswered where one of them is missing."""
    problem = got.problem("dgamma")
    if problem is None and (got.y is None or got.dx is None or got.dgamma is None):
        problem = Problem("failed", "autograd returned no gradient")
    if problem is not None:
        raise Unanswered(problem)
    assert got.y is not None
    assert got.dx is not None
    assert got.dgamma is not None
    return Results(got.y, got.dx, got.dgamma)


def _scale(alpha: float) -> Callable[[Base], list[Claim]]:
    def relation(base: Base) -> list[Claim]:
        scaled = base.run(x=base.inputs.x * alpha, eps=base.eps * alpha * alpha)
        sign = 1.0 if alpha > 0 else -1.0
        return [
            Claim("y(αx; α²·eps) = ±y(x; eps)", scaled.y, sign * base.got.y),
            _exact_but_subnormal("dx(αx; α²·eps) = dx/|α|", abs(alpha) * scaled.dx, base.got.dx, scale=base.scale),
            Claim("dgamma(αx; α²·eps) = ±dgamma", scaled.dgamma, sign * base.got.dgamma),
        ]

    return relation


def _exact_but_subnormal(what: str, left: Tensor, right: Tensor, scale: Tensor | None = None) -> Claim:
    """Claim equality of a value and its multiple by 2 or 4, left out where the smaller may have been subnormal.

    A subnormal number has lost bits that its multiple has not.
    """
    safe = 8 * torch.finfo(right.dtype).tiny
    small = (left.abs() < safe) & (right.abs() < safe)
    return Claim(what, left.masked_fill(small, 0), right.masked_fill(small, 0), scale=scale)


def _odd(base: Base) -> list[Claim]:
    turned = base.run(x=-base.inputs.x)
    return [
        Claim("y(−x) = −y(x)", turned.y, -base.got.y),
        Claim("dx(−x) = dx(x)", turned.dx, base.got.dx, scale=base.scale),
        Claim("dgamma(−x) = −dgamma(x)", turned.dgamma, -base.got.dgamma),
    ]


def _row_with_nan(base: Base) -> list[Claim]:
    x = base.inputs.x.clone()
    x[1, -1] = float("nan")
    spoilt = base.run(x=x)
    others = [row for row in range(x.shape[0]) if row != 1]
    gone = torch.isnan(spoilt.y[1]).double()
    return [
        Claim("y of other rows does not change", spoilt.y[others], base.got.y[others]),
        Claim("dx of other rows does not change", spoilt.dx[others], base.got.dx[others], scale=base.scale[others]),
        Claim("the row itself is NaN throughout", gone, torch.ones_like(gone)),
    ]


def _linear_in_gamma(base: Base) -> list[Claim]:
    twice = base.run(gamma=2 * base.gamma)
    return [
        _exact_but_subnormal("y(2·gamma) = 2·y", twice.y, 2 * base.got.y),
        _exact_but_subnormal("dx(2·gamma) = 2·dx", twice.dx, 2 * base.got.dx, scale=base.scale),
        Claim("dgamma does not depend on gamma", twice.dgamma, base.got.dgamma),
    ]


def _gamma_elsewhere(base: Base) -> list[Claim]:
    other = base.run(gamma=base.gamma.flip(0) * 1.5)
    return [Claim("dgamma does not depend on gamma", other.dgamma, base.got.dgamma)]


def _gamma_zero(base: Base) -> list[Claim]:
    none = base.run(gamma=torch.zeros_like(base.gamma))
    return [
        Claim("y is 0 where gamma is", none.y, torch.zeros_like(none.y)),
        Claim("dx is 0 where gamma is", none.dx, torch.zeros_like(none.dx)),
        Claim("dgamma does not depend on gamma", none.dgamma, base.got.dgamma),
    ]


def _linear_in_dy(base: Base) -> list[Claim]:
    twice = base.run(dy=2 * base.inputs.dy)
    none = base.run(dy=torch.zeros_like(base.inputs.dy))
    return [
        Claim("y does not depend on dy", twice.y, base.got.y),
        _exact_but_subnormal("dx(2·dy) = 2·dx", twice.dx, 2 * base.got.dx, scale=base.scale),
        _exact_but_subnormal("dgamma(2·dy) = 2·dgamma", twice.dgamma, 2 * base.got.dgamma),
        Claim("dx is 0 where dy is", none.dx, torch.zeros_like(none.dx)),
        Claim("dgamma is 0 where dy is", none.dgamma, torch.zeros_like(none.dgamma)),
    ]


def _only_through_u(base: Base) -> list[Claim]:
    moved = base.run(gamma=base.gamma / 2, dy=2 * base.inputs.dy)
    return [Claim("dx(gamma/2, 2·dy) = dx(gamma, dy)", moved.dx, base.got.dx, scale=base.scale)]


def _columns_permuted(base: Base) -> list[Claim]:
    order = torch.arange(base.inputs.x.shape[-1], device=base.inputs.x.device).flip(0)
    moved = base.run(x=base.inputs.x[:, order], gamma=base.gamma[order], dy=base.inputs.dy[:, order])
    bounds = base.bounds
    assert bounds.dgamma is not None
    return [
        Claim("y moves with its columns", moved.y, base.got.y[:, order], 2 * bounds.y.total[:, order]),
        Claim("dx moves with its columns", moved.dx, base.got.dx[:, order], 2 * bounds.dx.total[:, order]),
        Claim("dgamma moves with its columns", moved.dgamma, base.got.dgamma[order], 2 * bounds.dgamma.total[order]),
    ]


def _rows_add_up(base: Base) -> list[Claim]:
    top = Inputs(base.inputs.x[:1], base.gamma, base.inputs.dy[:1])
    rest = Inputs(base.inputs.x[1:], base.gamma, base.inputs.dy[1:])
    parts = [complete(answer(base.impl, part.pristine(), base.eps)).dgamma.double() for part in (top, rest)]
    assert base.bounds.dgamma is not None
    stores = unit_roundoff(base.gamma.dtype) * (parts[0].abs() + parts[1].abs())  # each part was rounded on its own
    whole, allowed = base.got.dgamma.double(), 2 * base.bounds.dgamma.total + stores
    return [Claim("dgamma of all rows is the sum over blocks", parts[0] + parts[1], whole, allowed)]


def _x_and_dx(base: Base) -> list[Claim]:
    x, dy = base.inputs.x.double(), base.inputs.dy.double()
    factor = base.eps * base.want.rstd.square().squeeze(-1)
    bound = (x.abs() * base.bounds.dx.total).sum(-1) + factor * (dy.abs() * base.bounds.y.total).sum(-1)
    left = (base.got.dx.double() * x).sum(-1)
    return [Claim("⟨dx, x⟩ = eps·rstd²·⟨dy, y⟩", left, factor * (dy * base.got.y.double()).sum(-1), bound)]


def _gamma_and_dgamma(base: Base) -> list[Claim]:
    gamma, dy = base.gamma.double(), base.inputs.dy.double()
    assert base.bounds.dgamma is not None
    bound = (gamma.abs() * base.bounds.dgamma.total).sum() + (dy.abs() * base.bounds.y.total).sum()
    left = (gamma * base.got.dgamma.double()).sum()
    return [Claim("⟨gamma, dgamma⟩ = ⟨dy, y⟩", left, (dy * base.got.y.double()).sum(), bound)]


def _zero_row(base: Base) -> list[Claim]:
    x = base.inputs.x.clone()
    x[0] = 0
    without = base.run(x=x)
    top = Inputs(x[:1], base.gamma, base.inputs.dy[:1])
    alone = complete(answer(base.impl, top.pristine(), base.eps))
    right = base.weight * base.inputs.dy[0].double() * base.eps**-0.5
    roundings = 2 if base.impl.rounding == "llama" else 1  # llama rounds gamma·dy too
    bound = right.abs() * (roundings * unit_roundoff(x.dtype) + KAPPA_DX * U32) + smallest(x.dtype)
    due = right.to(x.dtype).double()
    got = without.dx[0].double()
    both = due.isinf() & (got == due)  # with a small eps fp16 cannot hold it, and an infinity is right
    return [
        Claim("y of a zero row is 0", without.y[0], torch.zeros_like(without.y[0])),
        Claim("dx of a zero row is gamma·dy/√eps", got.masked_fill(both, 0), right.masked_fill(both, 0), bound),
        Claim("a zero row adds nothing to dgamma", alone.dgamma, torch.zeros_like(alone.dgamma)),
    ]


def _zero_padding(base: Base) -> list[Claim]:
    x, dy = base.inputs.x, base.inputs.dy
    zeros = torch.zeros_like(x)
    spec = CallSpec((*x.shape[:-1], 2 * x.shape[-1]), x.dtype, base.gamma.dtype, True, base.eps, x.device.type)
    refusal = base.impl.accepts(spec) if base.impl.accepts else None
    if refusal is not None:
        raise Unanswered(Problem("skipped", f"twice the width lies outside the contract: {refusal}"))
    wide = Inputs(torch.cat([x, zeros], -1), torch.cat([base.gamma, base.gamma]), torch.cat([dy, zeros], -1))
    wider = complete(answer(base.impl, wide.pristine(), base.eps)).y[:, : x.shape[-1]]
    narrow = base.run(eps=2 * base.eps).y.double() * 2**0.5
    return [Claim("RMSNorm([x, 0]; eps) = √2·RMSNorm(x; 2·eps)", wider.double(), narrow, 3 * base.bounds.y.total)]


RELATIONS: dict[str, Callable[[Base], list[Claim]]] = {
    "scaled by 4": _scale(4.0),
    "scaled by -2": _scale(-2.0),
    "odd in x": _odd,
    "a NaN stays in its row": _row_with_nan,
    "linear in gamma": _linear_in_gamma,
    "dgamma without gamma": _gamma_elsewhere,
    "gamma zero": _gamma_zero,
    "linear in dy": _linear_in_dy,
    "gamma and dy only as a product": _only_through_u,
    "columns permuted": _columns_permuted,
    "dgamma adds up over rows": _rows_add_up,
    "⟨dx, x⟩": _x_and_dx,
    "⟨gamma, dgamma⟩": _gamma_and_dgamma,
    "zero row": _zero_row,
    "zero padding": _zero_padding,
}
