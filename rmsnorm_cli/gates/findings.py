"""What the fit has read off, in words: which divisor, eps, gamma, order of rounding, coefficients and sum were used."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rmsnorm_cli.gates.hypotheses import Terms
from rmsnorm_cli.gates.readings import NOT_APPLIED, STORE, X_HAT, Backward, Forward, Number, Root, Slack, Sum, kept_in

FAR = 100  # times eps: a mean square that eps hardly changes
ROUGHLY = 0.02  # two numbers that are one for the sake of a sentence
GEMMA, LLAMA, ONCE = "gemma", "llama", "fp32"


def of_forward(f: Forward, t: Terms, s: Slack) -> Iterator[str]:
    """Yield what is wrong with gamma, and with the rstd of the rows of y; nothing where all is right."""
    offset = f.offset.got
    if not math.isfinite(offset):
        yield "y has rows of zeros" if not f.root.rstd.all() else "y is no multiple of gamma·x in each row"
    elif not f.left.ok:
        yield "y is no multiple of gamma·x in each row"
    else:
        if abs(offset) >= NOT_APPLIED:
            yield "gamma is not applied"
        elif not f.offset.ok and abs(offset - round(offset)) > ROUGHLY:
            yield f"gamma is applied as gamma + {offset:.4g}"
        yield from _root(f.root, t, s)


def _root(found: Root, t: Terms, s: Slack) -> Iterator[str]:
    """Yield what is wrong under the root; nothing where all is right."""
    if not found.rows.ok:
        kept = kept_in(found.rstd, t, s)
        yield f"rstd is rounded to {kept}" if kept else "no divisor and no eps explain the rstd of the rows"
    elif abs(found.shrink.got) < ROUGHLY:
        yield "nothing is normalised: rstd does not depend on the mean square of the row"
    elif not found.shrink.ok and not found.eps.ok and abs(found.shrink.got - found.eps.got) <= found.eps.slack:
        yield f"rstd is {_digits(abs(found.shrink.got) ** -0.5, 1.0)} times that of divisor and eps, in every row"
    else:
        if not found.shrink.ok:
            yield divisor("the mean square is divided", found.shrink, t.N)
        if not found.eps.ok:
            yield _eps(found.eps, t)


def _eps(ratio: Number, t: Terms) -> str:
    if abs(ratio.got) < ROUGHLY / t.N:
        return "eps is left out"
    if abs(ratio.got * t.N - 1) < ROUGHLY:
        return f"eps is {ratio.got * t.eps:.4g} instead of {t.eps:g}: it is added to the sum, not to the mean"
    half = float(torch.tensor(t.eps, dtype=torch.float16))
    rounded = ", which is eps in float16" if abs(ratio.got - half / t.eps) <= ratio.slack else ""
    return f"eps is {_digits(ratio.got * t.eps, t.eps)} instead of {t.eps:g}{rounded}"


def _digits(value: float, other: float) -> str:
    """Write a number with six digits, or with as many as it takes to tell it from another."""
    return next((text for n in (6, 9, 12) if float(text := f"{value:.{n}g}") != other), repr(value))


def divisor(what: str, share: Number, N: int) -> str:
    """Say by what something is divided instead of N, from N / N̂."""
    used = N / share.got
    whole = round(used)
    if whole == 1:
        return f"{what} by 1, that is not at all, instead of {N}"
    exactly = abs(used - whole) <= max(share.slack, 1e-6) * abs(used) and whole != N
    return f"{what} by {whole if exactly else _digits(used, N)} instead of {N}"


def convention(offset: float, order: str, declared: str) -> str:
    """Return the rounding convention that y follows (fp32, llama, gemma), "" where it is none of them.

    `order` is what is rounded on the way, "" where y's dtype does not tell or nothing known gives its bits.
    """
    if not math.isfinite(offset) or abs(offset - round(offset)) > ROUGHLY:
        return ""
    added = round(offset) + (declared == GEMMA)
    if not order:
        return {0: LLAMA if declared == LLAMA else ONCE, 1: GEMMA}.get(added, "")
    known = {(0, STORE): ONCE, (0, X_HAT): LLAMA, (1, STORE): GEMMA}
    return known.get((added, order.removesuffix(" is rounded")), "")


def contradiction(declared: str, found: str, order: str, foreign: bool, dtype: str) -> str:
    """Say that the declared convention is not the one that is followed, and what to pass where one can choose."""
    does = {
        ONCE: "multiplies by gamma and rounds once, at the store" if order else "multiplies by gamma, not by 1 + gamma",
        LLAMA: f"rounds where Llama's norm does: x̂ is rounded to {dtype} before gamma",
        GEMMA: "multiplies by 1 + gamma, as Gemma's norm does",
    }
    choice = f"{ONCE} or {LLAMA}" if found == ONCE and not order else found
    return f"declared {declared}, but {does[found]}" + (f": pass --rounding {choice}" if foreign else "")


def of_dx(b: Backward, t: Terms, s: Slack) -> Iterator[str]:
    """Yield what is wrong with the two terms of dx; nothing where both are right."""
    if not b.left.ok:
        yield "dx is no sum of multiples of u and x in each row"
        return
    right = [all(number.ok for number in numbers) for numbers in (b.of_first, b.of_second)]
    if not any(right) and b.root is not None:
        yield from (f"in the backward, {each}" for each in _root(b.root, t, s))
        return
    names = ("the first term, rstd·u,", "the second term, x·rstd³·mean(u·x),")
    for name, power, share, numbers, fine in zip(
        names, (1, 3), (b.first, b.second), (b.of_first, b.of_second), right, strict=True
    ):
        if not fine:
            far = f"{name} is {_digits(numbers[0].got, 1.0)} times what it should be, and not so in every row"
            yield _term(name, power, share, t) or far


def _term(name: str, power: int, share: Tensor, t: Terms) -> str:
    """Say what a term of dx is multiplied by, row by row; "" where it is no constant and no power of rstd."""
    if float(share.abs().max()) < ROUGHLY:
        return f"{name} is missing"
    same = _shared(share, t)
    if abs(same + 1) < ROUGHLY:
        return f"{name} has the wrong sign"
    if same and abs(same - 1) > 1e-4:
        if power == 3 and same > 0:
            return divisor("mean(u·x) is divided", Number(same, 1.0, 1e-4), t.N)
        return f"{name} is {same:.5g} times what it should be"
    slope = _slope(share, t)
    return f"{name} carries rstd to the power {power + slope} instead of {power}" if slope else ""


def _shared(share: Tensor, t: Terms) -> float:
    """Return what all rows have in common that are far larger than eps; 0 where they have not."""
    rows = share[t.m.flatten() > FAR * t.eps]
    if not len(rows):
        return 0.0
    same = float(rows.median())
    return same if float((rows - same).abs().max()) <= 1e-3 * abs(same) else 0.0


def _slope(share: Tensor, t: Terms) -> int:
    """Return p where the rows' shares are ±rstd^p, 0 where they are no whole power of it."""
    large = t.m.flatten() > FAR * t.eps  # where a lost power is not lost in rounding
    logs, against = share[large].abs().log(), t.r[large].log()
    if len(logs) < 2 or not torch.isfinite(logs).all():
        return 0
    p = round(float((logs * (against - against.mean())).sum() / (against - against.mean()).square().sum()))
    return p if float((logs - p * against).abs().max()) < ROUGHLY else 0


def of_dgamma(s: Sum, t: Terms) -> Iterator[str]:
    """Yield what is wrong with dgamma, a multiple of the sum over rows or none; nothing where it is right."""
    M = len(t.x)
    if abs(s.scale.got) < 1e-9:
        yield "dgamma is zero"
    elif not s.left.ok:
        yield "dgamma is no multiple of the sum over rows of dy·x̂"
    elif not s.scale.ok:
        if abs(s.scale.got * M - 1) < ROUGHLY:
            yield "dgamma is the mean over rows, not the sum"
        else:
            yield f"dgamma is {_digits(s.scale.got, 1.0)} times the sum over rows of dy·x̂"
