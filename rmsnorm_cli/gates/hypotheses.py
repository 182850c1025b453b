"""What a wrong result would be if one known mistake had been made: each is computed, and the one that fits is named.

m = mean(x²), r = rstd, x̂ = r·x, u = gamma·dy, c = mean(u·x̂), B = the padded block: the next power of two at or above N.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.numerics import compare
from rmsnorm_cli.judging.tolerances import Tolerance
from rmsnorm_cli.results import Scope


@dataclass(frozen=True)
class Terms:
    """The terms of the formula in float64, rows flattened: x and dy (M, N), gamma (N,), eps."""

    x: Tensor
    gamma: Tensor
    dy: Tensor
    eps: float

    @property
    def N(self) -> int:
        """Return the width."""
        return self.x.shape[-1]

    @property
    def B(self) -> int:
        """Return the padded block of N."""
        return 1 << (self.N - 1).bit_length()

    @cached_property
    def m(self) -> Tensor:
        """Return the mean square of each row, (M, 1)."""
        return self.x.square().mean(-1, keepdim=True)

    @cached_property
    def r(self) -> Tensor:
        """Return rstd, (M, 1)."""
        return (self.m + self.eps).rsqrt()

    @property
    def xhat(self) -> Tensor:
        """Return the normalised rows."""
        return self.x * self.r

    @property
    def u(self) -> Tensor:
        """Return gamma · dy."""
        return self.gamma * self.dy

    @property
    def c(self) -> Tensor:
        """Return mean(u · x̂) of each row, (M, 1)."""
        return _mean(self.u * self.xhat)

    def dx(self, r: Tensor, share: float = 1.0) -> Tensor:
        """Return dx computed with another rstd, or another weight of its second term."""
        return r * (self.u - share * r * r * self.x * _mean(self.u * self.x))


def _mean(values: Tensor) -> Tensor:
    return values.mean(-1, keepdim=True)


FORWARD: dict[str, Callable[[Terms], Tensor]] = {
    "y is gamma·x: there is no normalisation": lambda t: t.gamma * t.x,
    "the mean square is divided by the padded block B, not by N": lambda t: (
        t.gamma * t.x * (t.m * t.N / t.B + t.eps).rsqrt()
    ),
    "the mean square is divided by N − 1": lambda t: t.gamma * t.x * (t.m * t.N / max(t.N - 1, 1e-9) + t.eps).rsqrt(),
    "the sum of squares is not divided by N": lambda t: t.gamma * t.x * (t.m * t.N + t.eps).rsqrt(),
    "a mean is subtracted: that is LayerNorm": lambda t: (
        t.gamma * (t.x - _mean(t.x)) * (t.m - _mean(t.x) ** 2 + t.eps).rsqrt()
    ),
    "the variance takes the place of the mean square": lambda t: (
        t.gamma * t.x * (t.m - _mean(t.x) ** 2 + t.eps).rsqrt()
    ),
    "only the first half of the columns is summed": lambda t: (
        t.gamma * t.x * (t.x[:, : t.N // 2].square().sum(-1, keepdim=True) / t.N + t.eps).rsqrt()
    ),
    "the padding lanes are counted as ones": lambda t: t.gamma * t.x * (t.m + t.B / t.N - 1 + t.eps).rsqrt(),
    "eps is left out": lambda t: t.gamma * t.x * t.m.rsqrt(),
    "eps is added outside the root": lambda t: t.gamma * t.x / (t.m.sqrt() + t.eps),
    "eps is added to the sum, not to the mean": lambda t: t.gamma * t.x * (t.m + t.eps / t.N).rsqrt(),
    "max(mean square, eps) instead of their sum": lambda t: t.gamma * t.x * t.m.clamp(min=t.eps).rsqrt(),
    "eps is ten times too large": lambda t: t.gamma * t.x * (t.m + 10 * t.eps).rsqrt(),
    "eps is multiplied by the largest x² of the row": lambda t: (
        t.gamma * t.x * (t.m + t.eps * t.x.abs().amax(-1, keepdim=True) ** 2).rsqrt()
    ),
    "the root is multiplied, not its reciprocal": lambda t: t.gamma * t.x * (t.m + t.eps).sqrt(),
    "the mean of |x| instead of the root of the mean square": lambda t: (
        t.gamma * t.x * (_mean(t.x.abs()) ** 2 + t.eps).rsqrt()
    ),
    "gamma is ignored": lambda t: t.xhat,
    "gamma is applied twice": lambda t: t.gamma**2 * t.xhat,
    "1 + gamma instead of gamma": lambda t: (1 + t.gamma) * t.xhat,
    "gamma is read one column off": lambda t: t.gamma.roll(1) * t.xhat,
    "gamma is read one column off, from the next": lambda t: t.gamma.roll(-1) * t.xhat,
    "gamma is rounded to bfloat16": lambda t: t.gamma.bfloat16().double() * t.xhat,
    "the sign of x is lost": lambda t: t.gamma * t.xhat.abs(),
    "the sign of y is lost": lambda t: (t.gamma * t.xhat).abs(),
    "rstd of the first row is used for every row": lambda t: t.gamma * t.x * t.r[:1],
    "y is zero everywhere": lambda t: torch.zeros_like(t.x),
}
DX: dict[str, Callable[[Terms], Tensor]] = {
    "the second term, x·rstd³·mean(u·x), is missing": lambda t: t.r * t.u,
    "mean(u·x) is divided by the padded block B, not by N": lambda t: t.dx(t.r, t.N / t.B),
    "mean(u·x) is a sum, not divided by N": lambda t: t.dx(t.r, t.N),
    "the second term has the wrong sign": lambda t: t.dx(t.r, -1.0),
    "rstd in the backward divides by the padded block B": lambda t: t.dx((t.m * t.N / t.B + t.eps).rsqrt()),
    "rstd in the backward is without eps": lambda t: t.dx(t.m.rsqrt()),
    "the saved rstd holds the variance": lambda t: t.dx(t.m + t.eps),
    "rstd³ has lost one power: rstd²": lambda t: t.r * t.u - t.xhat * t.r * _mean(t.u * t.x),
    "rstd³ has lost two powers: rstd": lambda t: t.r * t.u - t.xhat * _mean(t.u * t.x),
    "the outer rstd is missing": lambda t: t.u - t.xhat * t.c,
    "gamma is missing in mean(u·x)": lambda t: t.r * (t.u - t.xhat * _mean(t.dy * t.xhat)),
    "y takes the place of x̂ in the second term": lambda t: t.r * (t.u - t.gamma * t.xhat * t.c),
    "gamma is missing in the first term": lambda t: t.r * (t.dy - t.xhat * t.c),
    "gamma is missing in dx altogether": lambda t: t.r * (t.dy - t.xhat * _mean(t.dy * t.xhat)),
    "gamma is applied twice": lambda t: t.r * (t.gamma * t.u - t.xhat * _mean(t.gamma * t.u * t.xhat)),
    "mean(u) is subtracted: that is LayerNorm's dx": lambda t: t.dx(t.r) - t.r * _mean(t.u),
    "the rstd of the next row is used": lambda t: t.dx(t.r.roll(-1, 0)),
    "rstd of the first row is used for every row": lambda t: t.dx(t.r[:1]),
    "dx is zero everywhere": lambda t: torch.zeros_like(t.x),
}
DGAMMA: dict[str, Callable[[Terms], Tensor]] = {
    "dgamma is the mean over rows, not the sum": lambda t: (t.dy * t.xhat).mean(0),
    "gamma·dy is summed instead of dy": lambda t: (t.u * t.xhat).sum(0),
    "rstd is missing: dy·x is summed": lambda t: (t.dy * t.x).sum(0),
    "dy alone is summed: that is the gradient of a bias": lambda t: t.dy.sum(0),
    "the last row is left out": lambda t: (t.dy * t.xhat)[:-1].sum(0),
    "the first row is left out": lambda t: (t.dy * t.xhat)[1:].sum(0),
    "only the first row is counted": lambda t: (t.dy * t.xhat)[0],
    "the last row is counted twice": lambda t: (t.dy * t.xhat).sum(0) + (t.dy * t.xhat)[-1],
    "dgamma is doubled": lambda t: 2 * (t.dy * t.xhat).sum(0),
    "rstd in dgamma divides by the padded block B": lambda t: (t.dy * t.x * (t.m * t.N / t.B + t.eps).rsqrt()).sum(0),
    "dgamma is zero everywhere": lambda t: torch.zeros_like(t.gamma),
}
_TABLES: dict[str, dict[str, Callable[[Terms], Tensor]]] = {"forward": FORWARD, "dx": DX, "dgamma": DGAMMA}


def explain(
    scope: Scope, got: Tensor, inputs: Inputs, eps: float, tolerance: Tolerance, scale: Tensor | None = None
) -> str:
    """Return the mistakes whose predicted result `got` matches within the tolerance it failed by, or ""."""
    if not inputs.x.numel():
        return ""
    return "; or ".join(_fitting(scope, got, inputs, eps, tolerance, scale))


def _fitting(
    scope: Scope, got: Tensor, inputs: Inputs, eps: float, tolerance: Tolerance, scale: Tensor | None
) -> Iterator[str]:
    N = inputs.x.shape[-1]
    x, dy = inputs.x.double().reshape(-1, N), inputs.dy.double().reshape(-1, N)
    gamma = torch.ones(N, dtype=x.dtype, device=x.device) if inputs.gamma is None else inputs.gamma.double()
    terms = Terms(x, gamma, dy, eps)
    for name, predicted in _TABLES[scope].items():
        wrong = predicted(terms).reshape(got.shape)
        if compare(got, wrong, tolerance, dtype=got.dtype, scale=scale).ok:
            yield name
