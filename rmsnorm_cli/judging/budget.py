"""What rounding alone can do to a right result: componentwise bounds against float64, and their constants.

One rounding at the store costs `unit` = the output dtype's unit roundoff. Inside, values and sums are float32: sums of
products err by a small multiple (`kappa`) of u32 times the sum of the absolute products, whatever the order, as long as
the order is a tree or many lanes. The constants were read off right kernels (interpreter and one NVIDIA H200,
2026-11-29): y up to 3.6 ULP, dx kappa up to 5.8, dgamma kappa up to 1.2 (2 with plain eager sums).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.numerics import spacing, unit_roundoff
from rmsnorm_cli.judging.oracle import Oracle

U32 = 2.0**-24
KAPPA_Y = 16.0
KAPPA_DX = 16.0
KAPPA_DGAMMA = 32.0
MISROUNDED = 0.01  # of 16-bit y: right kernels 9e-5 (float32 inside, seldom near a tie), two roundings 0.26, a cut 0.5
MEAN_GAIN = 6.0  # unit roundoffs / sqrt(M·N), and 4 u32 for what is coherent in a right kernel
ROW_GAIN = 8.0  # unit roundoffs / sqrt(N), and 16 u32; 6 are reached by right kernels over 4096 rows
RATIO_RMS = 1.5
RATIO_MAX = 2.0
RATIO_MAX_DX32 = 3.0  # dx in float32 nearly cancels: right kernels reach 2.2 times the eager maximum


@dataclass(frozen=True)
class Bound:
    """What rounding explains of one tensor, elementwise: `store`, and `kappa` times `inside`, in float64."""

    store: Tensor
    inside: Tensor
    kappa: float

    @property
    def total(self) -> Tensor:
        """Return the largest error that rounding explains."""
        return self.store + self.kappa * self.inside


@dataclass(frozen=True)
class Budget:
    """What rounding explains of y and dx (..., N) and dgamma (N,); dgamma is None where there is no gamma."""

    y: Bound
    dx: Bound
    dgamma: Bound | None


@dataclass(frozen=True)
class Measure:
    """One property of an error, and the largest value of it that rounding explains."""

    what: str
    value: float
    limit: float

    @property
    def share(self) -> float:
        """Return the value as a fraction of the limit; infinite for NaN."""
        return math.inf if math.isnan(self.value) else abs(self.value) / self.limit

    def __str__(self) -> str:
        return f"{self.what} is {self.value:.3g} (at most {self.limit:.3g})"


def budget(inputs: Inputs, want: Oracle, rounding: str = "fp32") -> Budget:
    """Return the bounds for inputs of any dtype.

    The llama convention rounds x̂, gamma·dy and dy·x̂ too, and an x̂ near a tie may go the other way than the oracle's.
    """
    dtype = inputs.x.dtype
    inner = inner_roundoff(dtype)
    once = unit_roundoff(dtype)
    again, flip = (once, 2 * once) if rounding == "llama" else (0.0, 0.0)
    floor = smallest(dtype) / 2
    x, dy = inputs.x.double(), inputs.dy.double()
    gamma = torch.ones_like(x[..., :1]) if inputs.gamma is None else inputs.gamma.double()
    if rounding == "gemma" and inputs.gamma is not None:
        gamma = 1 + gamma
    xhat, u = (x * want.rstd).abs(), (gamma * dy).abs()
    terms = want.rstd * (u + xhat * (u * xhat).mean(-1, keepdim=True))
    y = Bound((once + flip) * want.y.abs() + floor, inner * want.y.abs(), KAPPA_Y)
    twice = again * terms + floor * want.rstd if again else 0.0  # u is rounded, be it to a subnormal
    dx = Bound(once * want.dx.abs() + twice + floor, inner * terms, KAPPA_DX)
    if want.dgamma is None or inputs.gamma is None:
        return Budget(y, dx, None)
    own = inputs.gamma.dtype
    products = (dy.abs() * xhat).reshape(-1, x.shape[-1]).sum(0)
    each = (again + flip) * products + floor * len(_rows(x)) if again else 0.0  # so is what each row contributes
    stored = unit_roundoff(own) * want.dgamma.abs() + each + smallest(own) / 2
    return Budget(y, dx, Bound(stored, inner * products, KAPPA_DGAMMA))


def of_y(got: Tensor, want: Tensor, rounding: str = "fp32") -> list[Measure]:
    """Measure y (..., N) in ULP, by the share that is mis-rounded, and by the gain ⟨y, ŷ⟩/⟨ŷ, ŷ⟩ − 1 of its rows.

    A gain is what all elements of a row have in common: a wrong divisor or eps, an rstd in few bits, a cut. Rows are
    taken to be wide (N ≥ 100) and without a spike, so that their roundings average out.
    """
    dtype, (M, N) = got.dtype, _rows(want).shape
    unit, inner = unit_roundoff(dtype), inner_roundoff(dtype)
    flips = 2.0 if rounding == "llama" else 0.0
    ulps = float(((got.double() - want).abs() / spacing(want, dtype)).max())
    found = [Measure("the largest error of y in ULP", ulps, 0.5 + flips + KAPPA_Y * inner / unit)]
    if unit > U32:
        share = float((got != want.to(dtype)).double().mean())
        found.append(Measure("the share of y that is mis-rounded", share, MISROUNDED))
    left, right = _rows(got.double()), _rows(want)
    squares = right.square().sum(-1)
    gain = torch.where(squares > 0, (left * right).sum(-1) / squares - 1, 0.0)
    row, mean = ROW_GAIN * unit / math.sqrt(N) + 16 * inner, MEAN_GAIN * unit / math.sqrt(M * N) + 4 * inner
    return [
        *found,
        Measure("the gain of a row of y", float(gain[gain.abs().argmax()]), row),
        Measure("the mean gain of y's rows", float(gain.mean()), mean),
    ]


def of_gradient(name: str, got: Tensor, want: Tensor, bound: Bound) -> Measure:
    """Measure dx or dgamma by what is left of its errors after the store, in roundings of its terms (kappa)."""
    excess = ((got.double() - want).abs() - bound.store).clamp(min=0)
    kappa = float(torch.where(excess > 0, excess / bound.inside, 0.0).max())
    return Measure(f"the error of {name} in roundings of its terms", kappa, bound.kappa)


def against_eager(name: str, got: Tensor, eager: Tensor, want: Tensor, bound: Bound) -> list[Measure]:
    """Measure the largest and the RMS error against those of plain eager operations in the same precision.

    Errors are in units of one rounding at the store and three inside: rstd's and two products'. An eager error below
    one such unit (RMS: half) counts as one: where both are tiny, their ratio says nothing. Not for dgamma: the order
    of its sum is free, and a plain loop over the rows errs more than eager's tree without being wrong.
    """
    unit = bound.store + 3 * bound.inside
    ours, theirs = (torch.where(side == want, 0.0, (side - want) / unit) for side in (got.double(), eager.double()))
    largest = RATIO_MAX_DX32 if name == "dx" and got.dtype == torch.float32 else RATIO_MAX
    words = f"error of {name} against eager's"
    return [
        Measure(f"the largest {words}", float(ours.abs().max() / theirs.abs().max().clamp(min=1.0)), largest),
        Measure(f"the RMS {words}", float(_rms(ours) / _rms(theirs).clamp(min=0.5)), RATIO_RMS),
    ]


def cut(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 values in a 16-bit dtype, cut towards zero where they should be rounded."""
    nearest = values.to(dtype)
    outward = nearest.double().abs() > values.abs()
    return torch.where(outward, (nearest.view(torch.int16) - 1).view(dtype), nearest)


def inner_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of the arithmetic between load and store: float64's for float64, else float32's."""
    return 2.0**-53 if dtype == torch.float64 else U32


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest number above zero of a dtype, a subnormal."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
