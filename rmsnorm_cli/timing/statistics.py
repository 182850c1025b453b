"""Medians, dispersion, outliers, and bootstrap intervals of a ratio that resample whole blocks.

Times are never averaged over a session and never cleaned: outliers are counted and kept, and the median carries
the estimate. A ratio is formed inside each block, where both sides saw the same clocks, before anything is summarised.
Tukey, Exploratory Data Analysis (1977), for the fences; Efron and Tibshirani (1993) for the percentile interval;
Kalibera and Jones, Rigorous Benchmarking in Reasonable Time (2013), for intervals of ratios.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]

CONFIDENCE = 0.99  # of every interval: a run holds several tables at once
RESAMPLES = 10_000
MOST_DRAWN = 2**21  # values drawn at once


@dataclass(frozen=True)
class Spread:
    """A sample's centre and dispersion, in its unit; `mild` and `severe` count values beyond Tukey's fences."""

    median: float
    p10: float
    p90: float
    count: int
    mild: int
    severe: int

    @property
    def outliers(self) -> int:
        """Return how many values lie beyond the inner fences; all of them are in the median."""
        return self.mild + self.severe


@dataclass(frozen=True)
class Interval:
    """An estimate between two limits, from `blocks` independent blocks."""

    estimate: float
    low: float
    high: float
    blocks: int

    def inverse(self) -> "Interval":
        """Return the interval of the reciprocal."""
        return Interval(1 / self.estimate, 1 / self.high, 1 / self.low, self.blocks)

    def within(self, band: float) -> bool:
        """Return whether the whole interval lies within `band` of 1."""
        return 1 - band <= self.low and self.high <= 1 + band

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def spread(values: Times) -> Spread:
    """Return median, 10th and 90th percentile, and Tukey's outliers (1.5 and 3 quartile distances) of `values`."""
    p10, q1, median, q3, p90 = (float(q) for q in np.quantile(values, (0.1, 0.25, 0.5, 0.75, 0.9)))
    beyond = np.maximum(q1 - values, values - q3)  # how far outside the quartiles
    reach = max(q3 - q1, 1e-12 * abs(median))  # values that are all alike have no outliers but rounding
    severe = int(np.count_nonzero(beyond > 3 * reach))
    mild = int(np.count_nonzero(beyond > 1.5 * reach)) - severe
    return Spread(median, p10, p90, int(values.size), mild, severe)


def bootstrap_median(
    values: Times, rng: np.random.Generator, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Interval:
    """Return the median of one value a block and its percentile bootstrap interval; blocks are resampled whole."""
    medians = _resampled_medians(values, rng, resamples)
    return _percentile(float(np.median(values)), medians, confidence, values.size)


def paired_ratio(
    subject: Times,
    baseline: Times,
    rng: np.random.Generator,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return subject / baseline with its interval, from one time of each in every block, in block order.

    Below 1 the subject is faster. Raises ValueError for sides of different length: they were not paired.
    """
    if subject.shape != baseline.shape or subject.ndim != 1:
        raise ValueError(f"a paired ratio needs one time a block on both sides, got {subject.shape}, {baseline.shape}")
    return bootstrap_median(subject / baseline, rng, confidence, resamples)


def unpaired_ratio(
    subject: Times,
    baseline: Times,
    rng: np.random.Generator,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return subject / baseline of two separate sessions: each side's blocks are resampled by themselves.

    What differed between the sessions (clocks, temperature, neighbours) is not in this interval.
    """
    above = _resampled_medians(subject, rng, resamples)
    below = _resampled_medians(baseline, rng, resamples)
    estimate = float(np.median(subject) / np.median(baseline))
    return _percentile(estimate, above / below, confidence, min(subject.size, baseline.size))


def geometric_mean(ratios: Times) -> float:
    """Return the geometric mean, the one mean under which a ratio and its reciprocal agree."""
    return float(np.exp(np.mean(np.log(ratios))))


def _resampled_medians(values: Times, rng: np.random.Generator, resamples: int) -> Times:
    """Return the medians of resamples with replacement, some at a time so that thousands of blocks fit the memory."""
    at_once = max(1, MOST_DRAWN // values.size)
    medians = np.empty(resamples)
    for first in range(0, resamples, at_once):
        place = slice(first, min(first + at_once, resamples))
        picked = rng.integers(0, values.size, (place.stop - first, values.size))
        medians[place] = np.median(values[picked], axis=1)
    return medians


def _percentile(estimate: float, resampled: Times, confidence: float, blocks: int) -> Interval:
    tail = (1 - confidence) / 2
    low, high = (float(q) for q in np.quantile(resampled, (tail, 1 - tail)))
    return Interval(estimate, min(low, estimate), max(high, estimate), blocks)
