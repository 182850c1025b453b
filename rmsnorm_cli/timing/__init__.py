"""The benchmark protocol, free of what is timed: clocks, interleaved sessions, statistics, verdicts.

`cuda` holds the clocks that need a GPU and is imported by name, so that everything else loads without torch.
"""

from rmsnorm_cli.timing.clock import STARVED, Call, Clock, Entry, Reading, WallClock
from rmsnorm_cli.timing.session import Plan, Sample, Session, is_stable, mirrored, run_session
from rmsnorm_cli.timing.statistics import (
    CONFIDENCE,
    RESAMPLES,
    Interval,
    Spread,
    Times,
    bootstrap_median,
    geometric_mean,
    paired_ratio,
    spread,
    unpaired_ratio,
)
from rmsnorm_cli.timing.verdict import (
    BAND,
    FLOOR_MARGIN,
    SUSPECT,
    Control,
    Verdict,
    beats_floor,
    control,
    duration,
    figures,
    judge,
    limits,
    resolved,
    suspect,
    void,
)

__all__ = [
    "BAND",
    "CONFIDENCE",
    "FLOOR_MARGIN",
    "RESAMPLES",
    "STARVED",
    "SUSPECT",
    "Call",
    "Clock",
    "Control",
    "Entry",
    "Interval",
    "Plan",
    "Reading",
    "Sample",
    "Session",
    "Spread",
    "Times",
    "Verdict",
    "WallClock",
    "beats_floor",
    "bootstrap_median",
    "control",
    "duration",
    "figures",
    "geometric_mean",
    "is_stable",
    "judge",
    "limits",
    "mirrored",
    "paired_ratio",
    "resolved",
    "run_session",
    "spread",
    "suspect",
    "unpaired_ratio",
    "void",
]
