"""From a session's samples to rows: medians with dispersion, share of the stream, verdicts. Pure; no device.

A row without a number says why. A verdict is spoken only where enough blocks were taken and the control is not biased,
and of no difference finer than the control shows it could be told.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmsnorm_cli.timing import (
    STARVED,
    Interval,
    Session,
    Verdict,
    beats_floor,
    bootstrap_median,
    control,
    geometric_mean,
    judge,
    paired_ratio,
    spread,
    suspect,
    void,
)

NARROW = 0.5  # half width of the control's interval, as a share of the band, at which sampling may stop
NOISY = 0.05  # share of severe outliers above which a row is called noisy
TWIN = " (A/A)"  # what the second entry of the control is called
STREAM = "stream"
STREAMS = {  # the plain stream of each perimeter: its passes over M x N elements, the vectors left out
    "forward": "copy",
    "forward_train": "copy",
    "backward": "add",
    "forward_backward": "copy, then add",
}


@dataclass(frozen=True)
class Rules:
    """What was declared before the measurement: band, confidence, resamples, fewest blocks, canary's limit."""

    band: float
    confidence: float
    resamples: int
    min_blocks: int
    canary_within: float


@dataclass(frozen=True)
class Timed:
    """One session as a table needs it: who was entered, who is compared with whom, and the bytes of a call."""

    session: Session
    names: Sequence[str]
    baselines: Sequence[str]
    bytes_moved: int
    stream_bytes: int
    cold: bool


def table(timed: Timed, rules: Rules, rng: np.random.Generator) -> dict[str, Any]:
    """Return control, stream, canaries and one row for each implementation that was sampled to the end."""
    session = timed.session
    alive = [name for name in timed.names if name not in session.failures]
    held = _control(session, alive, rules, rng)
    speech = _speech(held, session, rules)
    made = [_row(name, timed, alive, speech, rules, rng) for name in alive]
    return {
        "blocks": session.blocks,
        "seconds": session.sampled_seconds,
        "out_of_time": session.out_of_time,
        "warmup": {"rounds": session.warmup_rounds, "unstable": list(session.unstable)},
        "control": held,
        "unsaid": _unsaid(made, held, speech),
        "canaries": {name: _spread(np.array(values)) for name, values in session.canaries.items() if values},
        "disturbed_blocks": session.disturbed(rules.canary_within),
        "stream": _stream(timed, rules, rng),
        "rows": made,
    }


def twin_held(session: Session, rules: Rules, rng: np.random.Generator) -> bool:
    """Return whether sampling may stop: enough blocks, and a control in the band whose interval is narrow.

    Of all ratios it looks at that of the control alone, whose true value is known to be 1. A rule that looked at the
    ratios of interest would stop when they happen to look decided: their intervals would no longer cover the truth as
    often as they say, and equal programs would have winners.
    """
    twins = [name for name in _entered(session) if name.endswith(TWIN) and name not in session.failures]
    if twins and session.blocks < rules.min_blocks:
        return False
    for twin in twins:
        ratio = _ratio(session, twin.removesuffix(TWIN), twin, rules, rng)
        wide = ratio is None or ratio.high - ratio.low > 2 * NARROW * rules.band
        if ratio is None or wide or not control(ratio, rules.band).held:
            return False
    return True


def overall(cells: Iterable[Mapping[str, Any]], baselines: Sequence[str]) -> list[dict[str, Any]]:
    """Return, for each implementation, baseline and measure: geometric mean of the speed-up, worst cell, counts.

    Cells without a number are counted as such and enter no mean.
    """
    found: dict[tuple[str, ...], list[tuple[str, Mapping[str, Any]]]] = {}
    for cell in cells:
        for timed in cell["tables"]:
            for row in timed["rows"]:
                for baseline in baselines:
                    if row["impl"] != baseline and timed["measure"] != "host":
                        key = (row["impl"], baseline, timed["perimeter"], timed["measure"], timed["cache"])
                        found.setdefault(key, []).append((cell["cell"], row["against"].get(baseline) or {}))
    return [_summed(key, entries) for key, entries in found.items()]


def _summed(key: tuple[str, ...], entries: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    speeds = [(1 / against["estimate"], cell) for cell, against in entries if against]
    words = [against.get("word", "no number") for _, against in entries]
    worst = min(speeds, default=None)
    return {
        **dict(zip(("impl", "baseline", "perimeter", "measure", "cache"), key, strict=True)),
        "speedup": geometric_mean(np.array([speed for speed, _ in speeds])) if speeds else None,
        "worst": {"speedup": worst[0], "cell": worst[1]} if worst else None,
        "cells": len(entries),
        **{word: words.count(word) for word in ("faster", "equal", "slower", "inconclusive", "no number")},
    }


@dataclass(frozen=True)
class Speech:
    """How verdicts of a session are spoken: not at all because of `trouble`; no finer than `resolution`, if any."""

    trouble: str | None
    resolution: float | None


def _row(
    name: str, timed: Timed, alive: Sequence[str], speech: Speech, rules: Rules, rng: np.random.Generator
) -> dict[str, Any]:
    session = timed.session
    seconds = session.seconds(name)
    middle = bootstrap_median(session.by_block(name), rng, rules.confidence, rules.resamples)
    seen = spread(seconds)
    share = _ratio(session, STREAM, name, rules, rng)  # stream over program: 1 is the stream's speed
    invalid = timed.cold and share is not None and beats_floor(share.inverse())
    against = {
        other: _against(session, name, other, speech, rules, rng)
        for other in timed.baselines
        if other != name and other in alive
    }
    flags = [flag for flag, on in (("noisy", seen.severe > NOISY * seen.count), ("invalid", invalid)) if on]
    flags += ["suspect"] if any(entry["suspect"] for entry in against.values()) else []
    return {
        "impl": name,
        "status": "failed" if invalid else "passed",
        "detail": "invalid: faster than a plain stream of the same bytes, from a cold cache" if invalid else "",
        **_spread(seconds),
        "low": middle.low,
        "high": middle.high,
        "starved": session.flagged(name, STARVED),
        "bytes_per_second": timed.bytes_moved / seen.median,
        "share_of_stream": None if share is None else _interval(share),
        "against": {} if invalid else against,
        "flags": flags,
    }


def _against(
    session: Session, name: str, other: str, speech: Speech, rules: Rules, rng: np.random.Generator
) -> dict[str, Any]:
    ratio = paired_ratio(session.by_block(name), session.by_block(other), rng, rules.confidence, rules.resamples)
    verdict: Verdict = (
        judge(ratio, rules.band, rules.confidence, speech.resolution)
        if speech.trouble is None
        else void(ratio, speech.trouble)
    )
    odd = suspect(ratio)
    text = f"{verdict.text}; suspect: more than moving fewer bytes explains" if odd else verdict.text
    return {"word": verdict.word, "text": text, "suspect": odd, **_interval(ratio)}


def _speech(held: Mapping[str, Any] | None, session: Session, rules: Rules) -> Speech:
    """Say how finely verdicts may be spoken over a session, or why none may be."""
    if session.blocks < rules.min_blocks:
        return Speech(f"{session.blocks} blocks, verdicts need {rules.min_blocks}", None)
    if held is None:
        return Speech("no A/A control", None)
    if held["biased"]:
        return Speech(str(held["text"]), None)
    return Speech(None, None if held["held"] else float(held["resolution"]))


def _unsaid(made: Sequence[Mapping[str, Any]], held: Mapping[str, Any] | None, speech: Speech) -> str | None:
    """Say why a session answers nothing: its control is biased, or no comparison asked of it has a verdict.

    Where the control held, a ratio too close to the band's edge for a word is a finding. Where it is coarse, what is
    clearly larger has been said; that finer differences were not is in the verdicts themselves. Times without a
    comparison stand with their intervals.
    """
    if held is not None and held["biased"]:
        return str(held["text"])
    words = [entry["word"] for row in made for entry in row["against"].values()]
    if not words or set(words) != {"inconclusive"} or speech == Speech(None, None):
        return None
    return speech.trouble or str(held["text"] if held else "")


def _control(session: Session, alive: Sequence[str], rules: Rules, rng: np.random.Generator) -> dict[str, Any] | None:
    for name in alive:
        ratio = _ratio(session, name + TWIN, name, rules, rng)
        if ratio is not None:
            found = control(ratio, rules.band)
            facts = {key: getattr(found, key) for key in ("held", "biased", "resolution", "text")}
            return {"impl": name, **facts, "holds_1": 1.0 in ratio, **_interval(ratio)}
    return None


def _stream(timed: Timed, rules: Rules, rng: np.random.Generator) -> dict[str, Any] | None:
    if STREAM not in _entered(timed.session) or STREAM in timed.session.failures:
        return None
    middle = bootstrap_median(timed.session.by_block(STREAM), rng, rules.confidence, rules.resamples)
    return {
        **_spread(timed.session.seconds(STREAM)),
        "low": middle.low,
        "high": middle.high,
        "bytes": timed.stream_bytes,
        "bytes_per_second": timed.stream_bytes / middle.estimate,
    }


def _ratio(session: Session, above: str, below: str, rules: Rules, rng: np.random.Generator) -> Interval | None:
    if not {above, below} <= _entered(session) - set(session.failures):
        return None
    return paired_ratio(session.by_block(above), session.by_block(below), rng, rules.confidence, rules.resamples)


def _entered(session: Session) -> set[str]:
    return {sample.entry for sample in session.samples}


def _interval(interval: Interval) -> dict[str, float]:
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high}


def _spread(values: Any) -> dict[str, Any]:
    seen = spread(values)
    return {
        "median": seen.median,
        "p10": seen.p10,
        "p90": seen.p90,
        "samples": seen.count,
        "outliers": {"mild": seen.mild, "severe": seen.severe},
    }
