"""Loss curves against the yardstick: how far the implementation's curve lies from the reference's, and the twins'.

    D(t) = |loss of the implementation − loss of the reference|      E(t) = the largest |loss of a twin − …| up to t

D may not pass `twin_factor` · E(t) + FLOOR · loss, as long as E is small beside the noise of seeds: from there on (the
divergence horizon) trajectories have parted for chaotic reasons, and only the final error has a meaning.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rmsnorm_cli.results import Status

# Declared limits. Right norms (float64 arithmetic, another order of summation, PyTorch's own, `rowwise`; widths 2 to
# 1025) reached 0.52 of the limit with twin_factor 3, eps × 10 passed it 34-fold, the planted mistakes 235-fold and
# more; 2026-11-29, CPU.
FLOOR = 2.0**-21  # relative to the loss: four roundings of fp32, where the twins happen to agree with the reference
HORIZON = 0.01  # of the seeds' standard deviation of the test error
HORIZON_ALONE = 1e-3  # of the loss, where fewer than two seeds ran
FEWEST = 10  # steps before the horizon, below which there is no verdict
SEED_DEVIATIONS = 3.0  # of the seeds' mean, in which a final error must lie beyond the horizon


@dataclass(frozen=True)
class Curve:
    """The verdict about one optimizer's curve: `worst` is D as a fraction of its limit, first passed at `passed_at`.

    Steps count from 1. `horizon` is the number of steps that could be judged.
    """

    status: Status
    detail: str
    steps: int
    horizon: int
    worst: float
    worst_step: int
    passed_at: int | None
    largest_difference: float
    largest_twin: float

    def record(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Losses:
    """Losses by step (steps,) of one optimizer's paths and their errors on the test partition."""

    reference: Tensor
    implementation: Tensor
    twins: Tensor  # (twins, steps)
    test: Mapping[str, float]  # "reference", "implementation"
    twin_tests: Sequence[float]
    seed_tests: Sequence[float]


def judged(losses: Losses, factor: float) -> Curve:
    """Hold one optimizer's loss curve against its twins'."""
    base = losses.reference
    steps = len(base)
    spread = (losses.twins - base).abs().amax(0).cummax(0).values  # E
    difference = (losses.implementation - base).abs()  # D
    horizon = first(~(spread <= parting(losses)), steps)  # a NaN of the reference's or a twin's ends it too
    limit = factor * spread + FLOOR * base.abs()
    share = torch.nan_to_num((difference / limit)[:horizon], nan=math.inf)
    over = first(share > 1.0, horizon)
    worst = float(share.max()) if horizon else math.nan
    worst_step = int(share.argmax()) + 1 if horizon else 0
    status: Status = "passed"
    detail = f"indistinguishable from one rounding for {horizon} of {steps} steps"
    if over < horizon:
        status = "failed"
        detail = f"leaves the envelope at step {over + 1}: {worst:.3g} times its limit at step {worst_step}"
    elif horizon < min(FEWEST, steps):
        status = "inconclusive"
        detail = f"one rounding outgrows the noise of seeds after {horizon} of {steps} steps: a smaller lr is needed"
    elif horizon < steps:
        status, detail = beyond(losses, detail)
    return Curve(
        status=status,
        detail=detail,
        steps=steps,
        horizon=horizon,
        worst=worst,
        worst_step=worst_step,
        passed_at=over + 1 if over < horizon else None,
        largest_difference=float(difference[:horizon].max()) if horizon else math.nan,
        largest_twin=float(spread[horizon - 1]) if horizon else math.nan,
    )


def test_error(losses: Losses, curve: Curve, factor: float) -> tuple[Status, float, str]:
    """Hold the final test error against the twins': status, fraction of the limit, what was seen."""
    reference, ours = losses.test["reference"], losses.test["implementation"]
    if curve.horizon < curve.steps:
        return "skipped", math.nan, "trajectories part before the end; the final error is part of the curve's verdict"
    limit = factor * max(abs(twin - reference) for twin in losses.twin_tests) + FLOOR * abs(reference)
    share = abs(ours - reference) / limit
    seen = f"reference {reference:.9g}, implementation {ours:.9g}, difference {ours - reference:.2e}, limit {limit:.2e}"
    return ("passed" if share <= 1.0 else "failed"), share, seen  # NaN fails


def parting(losses: Losses) -> Tensor:
    """Return, for each step, the spread of the twins above which trajectories have parted."""
    if len(losses.seed_tests) > 1:
        deviation = float(torch.tensor(losses.seed_tests, dtype=torch.float64).std())
        return torch.full_like(losses.reference, HORIZON * deviation)
    return HORIZON_ALONE * losses.reference.abs()


def beyond(losses: Losses, detail: str) -> tuple[Status, str]:
    """Judge what is left to judge after the horizon: whether the final error lies among the seeds'."""
    if len(losses.seed_tests) < 2:
        return "passed", f"{detail}; nothing is said of the rest, which needs seed_noise_runs of 2 or more"
    seeds = torch.tensor(losses.seed_tests, dtype=torch.float64)
    away = abs(losses.test["implementation"] - float(seeds.mean())) / float(seeds.std())
    if away <= SEED_DEVIATIONS:
        return "passed", f"{detail}; its final error lies {away:.1f} standard deviations from the seeds' mean"
    return "failed", f"{detail}, but its final error lies {away:.1f} standard deviations from the seeds' mean"


def first(condition: Tensor, otherwise: int) -> int:
    """Return the first index at which a condition holds, or `otherwise`."""
    found = condition.nonzero()
    return int(found[0]) if len(found) else otherwise
