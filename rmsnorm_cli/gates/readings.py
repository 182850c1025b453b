"""What an implementation really used: regressions of y, dx and dgamma on the terms of the formula.

A gain a of a row, y = a·gamma·x, is rstd: a⁻² = m·N/N̂ + ε̂ is linear in m, so two numbers tell the divisor N̂ and the eps
that were used. A row of dx is first·u + second·x, and dgamma is scale·Σ dy·x̂. What rounding moves each of them by is
derived: 8 unit roundoffs over √N in the gain of a row (seven deviations of N roundings), by how much a number leans on
the rows, and a few roundings inside. Right kernels on an NVIDIA H200 (2026-11-29) read N/N̂ within 2e-8 in float32,
2e-6 in float16, 4.4e-5 in bfloat16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rmsnorm_cli.gates.hypotheses import Terms
from rmsnorm_cli.judging.budget import ROW_GAIN, cut, inner_roundoff
from rmsnorm_cli.judging.numerics import unit_roundoff

INNER = 8.0  # roundings inside that a row's own number may be off by; half of that in what all rows share


@dataclass(frozen=True)
class Slack:
    """How far rounding may move the number of one row, and a number that several rows have in common.

    `store` and `inner` are unit roundoffs; `alike` is what a rounding may do to all elements of a row alike.
    """

    store: float
    inner: float
    N: int
    alike: float = 0.0

    @property
    def row(self) -> float:
        """Return the relative slack of the gain of a row."""
        return ROW_GAIN * self.store / math.sqrt(self.N) + 2 * INNER * self.inner + self.alike

    @property
    def left(self) -> float:
        """Return the largest RMS of what a regression leaves, as a fraction of the RMS of the terms."""
        return 2 * self.store + 2 * INNER * self.inner

    def shared(self, lean: float) -> float:
        """Return the slack of a number that leans on the rows: 1/√M where it is their mean."""
        return lean * (ROW_GAIN * self.store / math.sqrt(self.N) + INNER * self.inner) + INNER / 4 * self.inner


def slack(dtype: torch.dtype, rounding: str, N: int) -> Slack:
    """Return the slack of results of a dtype; the llama convention rounds twice.

    Where rstd is nearly a power of two, x̂ is nearly x times it, and its rounding takes the difference from all alike.
    """
    unit = unit_roundoff(dtype)
    # In float64 the regressions themselves round as much as the results do.
    inner = inner_roundoff(dtype) * (16 if dtype == torch.float64 else 1)
    return Slack(2 * unit, inner, N, unit) if rounding == "llama" else Slack(unit, inner, N)


@dataclass(frozen=True)
class Number:
    """A number that was read off, what it is where everything is right, and how far rounding may move it."""

    got: float
    want: float
    slack: float

    @property
    def share(self) -> float:
        """Return the difference as a fraction of the slack; infinite for NaN."""
        return math.inf if math.isnan(self.got) else abs(self.got - self.want) / self.slack

    @property
    def ok(self) -> bool:
        """Tell whether rounding explains the difference."""
        return self.share <= 1


@dataclass(frozen=True)
class Root:
    """What is under the root of an rstd that was read off, row by row (M, 1): N/N̂, ε̂/eps, and what they leave."""

    rstd: Tensor
    shrink: Number
    eps: Number
    rows: Number

    @property
    def numbers(self) -> tuple[Number, ...]:
        """Return all of them."""
        return self.shrink, self.eps, self.rows


def root(rstd: Tensor, t: Terms, s: Slack) -> Root:
    """Read N̂ and ε̂ off the rstd of rows: 1 = (N/N̂)·m·rstd² + (ε̂/eps)·eps·rstd²."""
    square, one = rstd.T**2, torch.ones_like(rstd.T)
    mean, added = t.m.T * square, t.eps * square  # (1, M)
    shrink, eps = (float(found) for found in regress(one, mean, added))
    off = float((shrink * mean + eps * added - one).abs().max()) / 2
    lean = [1 / math.sqrt(max(_apart(*sides), 1e-300)) for sides in ((mean, added), (added, mean))]
    return Root(
        rstd,
        Number(shrink, 1.0, 2 * s.shared(lean[0])),
        Number(eps, 1.0, 2 * s.shared(lean[1])),
        Number(off, 0.0, s.row),
    )


@dataclass(frozen=True)
class Forward:
    """What y tells: the rstd of its rows, what is added to gamma, and the largest RMS that no row's gain explains."""

    offset: Number
    root: Root
    left: Number

    @property
    def numbers(self) -> tuple[Number, ...]:
        """Return all of them."""
        return self.offset, *self.root.numbers, self.left


NOT_APPLIED = 100.0  # an offset beside which gamma is nothing


def of_y(y: Tensor, t: Terms, s: Slack) -> Forward:
    """Read off y (M, N) float64; `t.gamma` is what the convention multiplies by."""
    plain, weighted = regress(y, t.x, t.gamma * t.x)
    offset = float((plain / weighted).nanmedian())
    weight = t.gamma + (offset if abs(offset) > 0.01 else 0)  # the noise of a small offset would be noise of the gains
    base = t.x * (weight if abs(offset) < NOT_APPLIED else 1)
    gains = (y * base).sum(-1, keepdim=True) / base.square().sum(-1, keepdim=True)
    return Forward(
        Number(offset, 0.0, 4 * s.shared(1 / math.sqrt(len(y)))),
        root(gains, t, s),
        Number(float((_rms(y - gains * base) / _rms(gains * base)).max()), 0.0, s.left),
    )


STORE, X_HAT = "y", "x̂ before gamma"
ORDERS: dict[str, Callable[[Terms, Tensor, torch.dtype], Tensor]] = {
    # what is rounded to y's dtype on the way to y; of two that give the same bits the first is taken
    f"{STORE} is rounded": lambda t, weight, dtype: (t.xhat * weight).to(dtype),
    f"{X_HAT} is rounded": lambda t, weight, dtype: (t.xhat.to(dtype).double() * weight).to(dtype),
    "rstd is rounded": lambda t, weight, dtype: (t.x * t.r.to(dtype).double() * weight).to(dtype),
    "1 + gamma is rounded": lambda t, weight, dtype: (t.xhat * weight.to(dtype).double()).to(dtype),
    "y is cut": lambda t, weight, dtype: cut(t.xhat * weight, dtype),
}
SAME = 0.98  # of the elements; right kernels have 0.999 in common with their own order, 0.75 with another


def order(y: Tensor, t: Terms, offset: float) -> str:
    """Return the one of ORDERS that gives the bits of y (M, N), in a 16-bit dtype; "" for none."""
    weight = t.gamma + (round(offset) if math.isfinite(offset) else 0)
    for name, made in ORDERS.items():
        if float((y == made(t, weight, y.dtype)).double().mean()) >= SAME:
            return name
    return ""


def kept_in(rstd: Tensor, t: Terms, s: Slack) -> str:
    """Return the 16-bit dtype to which the rows' rstd (M, 1) was rounded, "" for none."""
    for name in ("float16", "bfloat16"):
        kept = t.r.to(getattr(torch, name)).double()
        if bool(((rstd / kept - 1).abs() <= s.row).all()):
            return name
    return ""


@dataclass(frozen=True)
class Backward:
    """What dx tells: its two coefficients as fractions of rstd and of −rstd³·mean(u·x), (M, 1) each.

    `root` is what the rstd of both terms tells, where they have one in common.
    """

    first: Tensor
    second: Tensor
    root: Root | None
    of_first: tuple[Number, Number]  # the row that is farthest off, and what all rows have in common
    of_second: tuple[Number, Number]
    left: Number

    @property
    def numbers(self) -> tuple[Number, ...]:
        """Return all of them."""
        return *self.of_first, *self.of_second, self.left


def of_dx(dx: Tensor, t: Terms, r: Tensor, s: Slack) -> Backward:
    """Read off dx (M, N) float64, as made with the rstd `r` (M, 1)."""
    first, second = regress(dx, t.u, t.x)
    rest = _rms(dx - first * t.u - second * t.x)
    left = float((rest / (_rms(r * t.u) + _rms(first * t.u) + _rms(second * t.x))).max())
    wanted = r, -(r**3) * (t.u * t.x).mean(-1, keepdim=True)
    # How far a coefficient moves with the noise of dx: it is worse determined where its term is small or the two alike.
    noise = ROW_GAIN * (s.store * _rms(dx) + s.inner * _rms(r * t.u)) / math.sqrt(s.N)
    overlap = 1 - _cosine(t.u, t.x) ** 2

    def judged(values: Tensor, want: Tensor, term: Tensor) -> tuple[Number, Number]:
        moves = noise / (_rms(term) * overlap.sqrt() * want.abs()) + 2 * INNER * s.inner
        return _farthest(values, moves), _common(values, moves)

    first, second = first / wanted[0], second / wanted[1]
    numbers = judged(first, wanted[0], t.u), judged(second, wanted[1], t.x)
    alike = bool(((second / first**3 - 1).abs() <= 3 * s.row + 0.01).all())
    return Backward(first, second, root(first * r, t, s) if alike else None, *numbers, Number(left, 0.0, s.left))


@dataclass(frozen=True)
class Sum:
    """What dgamma tells: which multiple of Σ dy·x̂ it is, and what that leaves."""

    scale: Number
    left: Number

    @property
    def numbers(self) -> tuple[Number, ...]:
        """Return both."""
        return self.scale, self.left


def of_dgamma(dgamma: Tensor, t: Terms, r: Tensor, s: Slack) -> Sum:
    """Read off dgamma (N,) float64, as made with the rstd `r` (M, 1)."""
    want = (t.dy * t.x * r).sum(0)
    scale = (dgamma * want).sum() / want.square().sum()
    return Sum(
        Number(float(scale), 1.0, s.row),
        Number(float(_rms(dgamma - scale * want) / _rms(want)), 0.0, 2 * s.left),
    )


def regress(target: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two coefficients (M, 1) by which each row of `target` is nearest to a sum of `first` and `second`."""

    def dot(left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(-1, keepdim=True)

    ff, fs, ss = dot(first, first), dot(first, second), dot(second, second)
    tf, ts = dot(target, first), dot(target, second)
    determinant = ff * ss - fs * fs
    return (tf * ss - ts * fs) / determinant, (ts * ff - tf * fs) / determinant


def _apart(of: Tensor, from_: Tensor) -> float:
    """Return the square of the part of a row (1, M) that is no multiple of another."""
    return float(of.square().sum() - (of * from_).sum() ** 2 / from_.square().sum())


def _rms(rows: Tensor) -> Tensor:
    return rows.square().mean(-1, keepdim=True).sqrt()


def _cosine(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).mean(-1, keepdim=True) / (_rms(left) * _rms(right))


def _farthest(values: Tensor, moves: Tensor) -> Number:
    """Return the value that is farthest from 1, as a fraction of how far rounding may move it."""
    where = int(((values - 1).abs() / moves).nan_to_num(nan=math.inf).argmax())
    return Number(float(values.flatten()[where]), 1.0, float(moves.flatten()[where]))


def _common(values: Tensor, moves: Tensor) -> Number:
    """Return what the values of all rows have in common, each counted as far as it is determined."""
    weights = moves**-2
    return Number(float((values * weights).sum() / weights.sum()), 1.0, float(weights.sum() ** -0.5))
