"""How a result is compared with the float64 oracle, and what a difference is measured in.

`compare` never broadcasts, never takes NaN for a wildcard, and checks shape, dtype and device before any value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rmsnorm_cli.judging.tolerances import DECLARED, Tolerance

TOLERANCES: Mapping[str, Tolerance] = DECLARED
ALL = slice(None)


@dataclass(frozen=True)
class Comparison:
    """How one tensor came out against its oracle.

    `worst` is the largest error as a fraction of its tolerance (1.0 is the limit), None where no value was compared.
    `index`, `got`, `want` and `ulps` are those of the first wrong element, else of the worst one. `regions` holds the
    share of wrong elements by region. `detail` is the sentence for people.
    """

    ok: bool
    worst: float | None = None
    index: tuple[int, ...] | None = None
    got: float | None = None
    want: float | None = None
    ulps: float | None = None
    regions: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""


def compare(
    got: Tensor,
    want: Tensor,
    tolerance: Tolerance,
    *,
    dtype: torch.dtype,
    scale: Tensor | None = None,
) -> Comparison:
    """Judge `got` by |got − want| ≤ atol + rtol·|want|, elementwise, with want in float64.

    `dtype` is the dtype that `got` must have; shape and device must be want's. With `scale` (broadcastable to want),
    both sides are divided by it first: dx is judged as dx/rstd on rows far from unit scale. Where `want`, cast to
    `dtype`, is not finite, `got` must be the same kind of not finite: NaN, +inf or −inf.
    """
    misfit = _misfit(got, want, dtype)
    if misfit:
        return Comparison(False, detail=misfit)
    got = got.detach()
    kinds_got, kinds_want = kinds(got), kinds(want.to(dtype))
    finite = kinds_want == 0
    divisor = torch.ones_like(want) if scale is None else scale.expand_as(want)
    left, right = got.double() / divisor, want / divisor
    error = (left - right).abs()
    share = error / (tolerance.atol + tolerance.rtol * right.abs())
    share = torch.where(error == 0, 0.0, share)  # an exact element passes a tolerance of zero too
    wrong = (kinds_got != kinds_want) | (finite & ~(share <= 1))
    judged = torch.where(finite & (kinds_got == 0), share, 0.0)
    worst = float(judged.max()) if judged.numel() else 0.0
    if not bool(wrong.any()):
        where = _unravel(int(judged.argmax()), want.shape) if judged.numel() else None
        return _described(True, worst, where, got, want, dtype, {}, "")
    where = _unravel(int(wrong.flatten().int().argmax()), want.shape)
    shares = regions(wrong)
    described = _described(False, worst, where, got, want, dtype, shares, "")
    return _described(False, worst, where, got, want, dtype, shares, _sentence(described, wrong, shares))


def identical(got: Tensor, want: Tensor) -> Comparison:
    """Judge whether two tensors of one dtype have the same bits; NaN equals NaN of the same payload only."""
    misfit = _misfit(got, want, want.dtype)
    if misfit:
        return Comparison(False, detail=misfit)
    wrong = bits(got.detach()) != bits(want.detach())
    if not bool(wrong.any()):
        return Comparison(True, 0.0)
    where = _unravel(int(wrong.flatten().int().argmax()), want.shape)
    shares = regions(wrong)
    wide = want.detach().double()
    described = _described(False, None, where, got.detach(), wide, want.dtype, shares, "")
    return _described(False, None, where, got.detach(), wide, want.dtype, shares, _sentence(described, wrong, shares))


def bits(tensor: Tensor) -> Tensor:
    """Return the elements' bytes as integers of the same width and shape (16, 32 or 64 bits)."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(width)


def kinds(tensor: Tensor) -> Tensor:
    """Return 0 for finite elements, 1 for NaN, 2 for +inf, 3 for −inf."""
    return torch.isnan(tensor) + 2 * torch.isposinf(tensor) + 3 * torch.isneginf(tensor)


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbouring numbers of `dtype` at float64 `values`: one ULP."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.abs())  # |value| = mantissa · 2^exponent, mantissa in [½, 1)
    step = torch.ldexp(torch.full_like(values, info.eps), exponent - 1)
    smallest = info.tiny * info.eps  # between subnormals, and on either side of zero (whose exponent says nothing)
    return torch.where(values == 0, smallest, step.clamp(min=smallest))


def dx_scale(rstd: Tensor) -> Tensor:
    """Return what dx is divided by before it is judged: 1 on rows of unit scale (rms ½ to 2), their rstd elsewhere.

    Raw dx grows as 1/rms: at rms 30 an absolute tolerance on it tests nothing, at 1e-3 a right kernel breaks it.
    """
    return torch.where((rstd >= 0.5) & (rstd <= 2.0) | ~rstd.isfinite() | (rstd == 0), 1.0, rstd)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def regions(wrong: Tensor) -> dict[str, float]:
    """Return the share of wrong elements by region of rows and columns; regions that do not exist are left out.

    A row's tail are the columns past the largest power of two within N: what a padded or blocked kernel masks.
    """
    N = wrong.shape[-1]
    table = wrong.reshape(-1, N)
    M = table.shape[0]
    full = 2 ** (N.bit_length() - 1)
    parts: dict[str, tuple[slice, slice]] = {"full columns": (ALL, slice(0, full))}
    if full < N:
        parts["tail columns"] = (ALL, slice(full, N))
    if M > 1:
        parts |= {"first row": (slice(0, 1), ALL), "last row": (slice(M - 1, M), ALL)}
    if M > 2:
        parts["rows between"] = (slice(1, M - 1), ALL)
    shares = {name: float(table[part].double().mean()) for name, part in parts.items()}
    return {
        "all": float(table.double().mean()),
        **shares,
        "rows touched": float(table.any(1).double().mean()),
        "columns touched": float(table.any(0).double().mean()),
    }


def _misfit(got: Tensor, want: Tensor, dtype: torch.dtype) -> str:
    if not isinstance(got, Tensor):
        return f"the result is a {type(got).__name__}, expected a tensor"
    for what, has, expected in (
        ("shape", tuple(got.shape), tuple(want.shape)),
        ("dtype", got.dtype, dtype),
        ("device", got.device, want.device),
    ):
        if has != expected:
            return f"the result has {what} {has}, expected {expected}"
    return ""


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.insert(0, place)
    return tuple(index)


def _described(
    ok: bool,
    worst: float | None,
    where: tuple[int, ...] | None,
    got: Tensor,
    want: Tensor,
    dtype: torch.dtype,
    shares: Mapping[str, float],
    detail: str,
) -> Comparison:
    if where is None:
        return Comparison(ok, worst, regions=shares, detail=detail)
    has, expected = float(got[where]), float(want[where])
    finite = math.isfinite(has) and math.isfinite(expected)
    ulps = abs(has - expected) / float(spacing(want[where], dtype)) if finite else None
    return Comparison(ok, worst, where, has, expected, ulps, shares, detail)


def _sentence(found: Comparison, wrong: Tensor, shares: Mapping[str, float]) -> str:
    """Say which element is the first wrong one, where it lies, and how the wrong ones are spread."""
    assert found.index is not None
    far = "" if found.ulps is None else f" ({found.ulps:.3g} ULP)"
    index = ", ".join(map(str, found.index))
    spread = ", ".join(f"{name} {share:.3g}" for name, share in shares.items() if name != "all")
    count = int(wrong.sum())
    return (
        f"first wrong element [{index}], {_place(found.index, wrong.shape)}: got {found.got!r}, "
        f"want {found.want!r}{far}; {count} of {wrong.numel()} wrong (share by region: {spread})"
    )


def _place(index: tuple[int, ...], shape: torch.Size) -> str:
    N = shape[-1]
    full = 2 ** (N.bit_length() - 1)
    column = "tail column" if index[-1] >= full else "full-block column"
    if len(shape) == 1:
        return column
    row = 0
    for place, size in zip(index[:-1], shape[:-1], strict=True):
        row = row * size + place
    rows = math.prod(shape[:-1])
    kind = "first row" if row == 0 else "last row" if row == rows - 1 else "middle row"
    return f"{kind}, {column}"
