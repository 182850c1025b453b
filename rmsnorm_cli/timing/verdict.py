"""From intervals to words: faster, slower, equal, inconclusive; controls, floors, and figures no finer than known.

The words are decided by where an interval of subject / baseline lies against a band around 1 that was declared
before the measurement. An estimate alone decides nothing.
"""

import math
from dataclasses import dataclass
from typing import Literal

from rmsnorm_cli.timing.statistics import CONFIDENCE, Interval

BAND = 0.01  # two programs this close are called equal
FLOOR_MARGIN = 0.05  # torch.compile reached 101 % of a copy's speed on an H200 (2026-11-29): a copy is no exact floor
SUSPECT = 10.0  # more than an eager chain can lose to one fused kernel by moving bytes: 36 bytes an element against 4
FINEST = 4  # decimals of a ratio beyond which nothing is printed

Word = Literal["faster", "slower", "equal", "inconclusive"]


@dataclass(frozen=True)
class Verdict:
    """What may be said of a ratio: the word, the sentence that is printed, the interval behind it."""

    word: Word
    text: str
    ratio: Interval


def judge(
    ratio: Interval, band: float = BAND, confidence: float = CONFIDENCE, resolution: float | None = None
) -> Verdict:
    """Return the verdict on subject / baseline (below 1 the subject is faster).

    Faster and slower need the whole interval beyond the band, equal needs it inside; otherwise it is inconclusive.
    `resolution` is what the A/A control could tell apart where that is coarser than the band: a difference must then
    lie beyond it, and nothing is called equal.
    """
    beyond = band if resolution is None else max(band, resolution)
    beside = "" if resolution is None else f"; A/A resolves {resolved(resolution)}"
    if ratio.high < 1 - beyond:
        return Verdict("faster", f"faster {_times(ratio.inverse(), confidence)}{beside}", ratio)
    if ratio.low > 1 + beyond:
        return Verdict("slower", f"slower {_times(ratio, confidence)}{beside}", ratio)
    if resolution is None and ratio.within(band):
        return Verdict("equal", f"equal within {_percent(band)}", ratio)
    low, high = limits(ratio.inverse())
    text = f"inconclusive ({_percent(confidence)} interval of the speed-up {low}–{high}{beside})"
    return Verdict("inconclusive", text, ratio)


def void(ratio: Interval, reason: str) -> Verdict:
    """Return the verdict where the measurement itself cannot be trusted: the interval is kept, no word is spoken."""
    return Verdict("inconclusive", f"inconclusive ({reason})", ratio)


@dataclass(frozen=True)
class Control:
    """The same implementation entered twice.

    `held`: the protocol called it equal to itself. `biased`: it called it different from itself, so nothing else that
    it says can be believed. `resolution`: how far from 1 the interval reaches, the least difference that could be told
    from none.
    """

    held: bool
    biased: bool
    resolution: float
    text: str
    ratio: Interval


def control(ratio: Interval, band: float = BAND) -> Control:
    """Judge the A/A control: within the band it held, wholly beyond it is biased, between the two it is only coarse.

    Whether the interval also contains 1 exactly is recorded (`1 in ratio`) but cannot gate: by construction one
    table in a hundred misses it, and an offset inside the band moves no verdict.
    """
    low, high = limits(ratio)
    held = ratio.within(band)
    biased = ratio.low > 1 + band or ratio.high < 1 - band
    resolution = max(ratio.high - 1, 1 - ratio.low)
    how = f"within {_percent(band)}" if held else "biased" if biased else f"resolves {resolved(resolution)}"
    return Control(held, biased, resolution, f"A/A control {how}: {figures(ratio)} ({low}–{high})", ratio)


def beats_floor(time_over_stream: Interval, margin: float = FLOOR_MARGIN) -> bool:
    """Return whether a cold time lies below that of a plain stream of its bytes, margin and interval allowed for."""
    return time_over_stream.high < 1 - margin


def suspect(ratio: Interval, limit: float = SUSPECT) -> bool:
    """Return whether a speed-up is larger than moving fewer bytes can explain."""
    return ratio.high < 1 / limit


def decimals(low: float, high: float, finest: int = FINEST) -> int:
    """Return how many decimals an estimate between these limits deserves: down to the first digit of half its width."""
    half = (high - low) / 2
    if not half > 0:
        return finest
    return min(max(0, -math.floor(math.log10(half) + 1e-9)), finest)  # 1.24 - 1.22 is a little under 0.02


def figures(interval: Interval) -> str:
    """Write the estimate with no more digits than its interval supports."""
    return f"{interval.estimate:.{decimals(interval.low, interval.high)}f}"


def limits(interval: Interval) -> tuple[str, str]:
    """Write both limits with the digits of the estimate."""
    places = decimals(interval.low, interval.high)
    return f"{interval.low:.{places}f}", f"{interval.high:.{places}f}"


def duration(interval: Interval, ends: tuple[float, float] | None = None) -> str:
    """Write a time in seconds as µs or ms, with the figures that its interval supports; `ends` follow in brackets."""
    unit, scale = ("ms", 1e3) if interval.estimate >= 1e-2 else ("µs", 1e6)
    places = decimals(interval.low * scale, interval.high * scale, finest=2)
    beside = "" if ends is None else f" ({ends[0] * scale:.{places}f}–{ends[1] * scale:.{places}f})"
    return f"{interval.estimate * scale:.{places}f} {unit}{beside}"


def resolved(resolution: float) -> str:
    """Write a resolution with two figures, rounded up: finer than it is would be a promise."""
    if resolution >= 1:
        return "no less than 100 %"
    places = max(0, 1 - math.floor(math.log10(max(resolution, 1e-6) * 100)))
    return f"{math.ceil(resolution * 100 * 10**places - 1e-9) / 10**places:g} %"


def _times(speed: Interval, confidence: float) -> str:
    low, high = limits(speed)
    return f"{figures(speed)}× ({_percent(confidence)} interval {low}–{high})"


def _percent(share: float) -> str:
    return f"{share * 100:g} %"
