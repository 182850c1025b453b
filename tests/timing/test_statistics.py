"""Statistics against closed forms, and the whole protocol against machines whose true times are known."""

import numpy as np
import pytest

from rmsnorm_cli.timing import (
    Plan,
    bootstrap_median,
    geometric_mean,
    judge,
    paired_ratio,
    run_session,
    spread,
    unpaired_ratio,
)

TRIALS = 200
TRUE_SECONDS = 1e-4
LENGTH = 0.3  # seconds of virtual time that one session lasts, about
DRIFTS = {
    "still": lambda simulated, trial: lambda now: 1.0,
    "ramp": lambda simulated, trial: simulated.ramp(0.03, LENGTH),
    "step": lambda simulated, trial: simulated.step(0.08, at=LENGTH * (0.1 + 0.8 * trial / TRIALS)),
    "wandering": lambda simulated, trial: simulated.wander(trial, 0.02, LENGTH, LENGTH / 10),
}


def ratio_of(machine, seed, true_ratio):
    """Run the protocol on a simulated machine and return the interval of subject / baseline."""
    entries = [machine.entry("subject", true_ratio * TRUE_SECONDS), machine.entry("baseline", TRUE_SECONDS)]
    rng = np.random.default_rng(seed + 1)
    session = run_session(entries, Plan(), rng, now=lambda: machine.now)
    return paired_ratio(session.by_block("subject"), session.by_block("baseline"), rng, resamples=2000)


@pytest.mark.parametrize("drift", DRIFTS)
def test_equal_programs_never_have_a_winner_and_the_interval_covers_the_truth(simulated, drift):
    """With 0.8 % noise, 2 % spikes and any drift: no false verdict in 200 sessions, 99 % coverage within error."""
    ratios = [
        ratio_of(simulated.Machine(100 * trial, DRIFTS[drift](simulated, trial)), trial, 1.0) for trial in range(TRIALS)
    ]
    assert {judge(ratio).word for ratio in ratios} <= {"equal", "inconclusive"}
    covered = sum(1.0 in ratio for ratio in ratios) / TRIALS
    assert covered >= 0.95, "99 % asked for; the percentile interval of 25 blocks gives 97 to 99"


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_difference_of_four_percent_is_always_found_with_its_size(simulated, drift):
    ratios = [
        ratio_of(simulated.Machine(100 * trial + 7, DRIFTS[drift](simulated, trial)), trial, 1.04)
        for trial in range(TRIALS // 2)
    ]
    assert {judge(ratio).word for ratio in ratios} == {"slower"}
    assert np.mean([1.04 in ratio for ratio in ratios]) >= 0.94


def test_a_difference_of_two_percent_is_found_once_sampling_goes_on_until_the_control_is_narrow(simulated):
    """Sampling stops at a half width of 0.5 % of the A/A control, which is what `bench` asks for."""
    found = []
    for trial in range(60):
        machine = simulated.Machine(trial, simulated.wander(trial, 0.02, 3 * LENGTH, LENGTH / 10))
        pairs = (("subject", 1.02), ("baseline", 1.0), ("again", 1.0))
        entries = [machine.entry(name, true * TRUE_SECONDS) for name, true in pairs]
        rng = np.random.default_rng(trial)

        def narrow(session, rng=rng):
            ratio = paired_ratio(session.by_block("again"), session.by_block("baseline"), rng, resamples=1000)
            return ratio.within(0.01) and ratio.high - ratio.low < 0.01

        session = run_session(entries, Plan(), rng, enough=narrow, now=lambda machine=machine: machine.now)
        ratio = paired_ratio(session.by_block("subject"), session.by_block("baseline"), rng, resamples=2000)
        found.append(judge(ratio).word)
    assert found.count("slower") >= 57
    assert "faster" not in found
    assert "equal" not in found


def test_the_same_machine_fools_sequential_timing_with_independent_resampling(simulated):
    """The drift bites: measured one after the other under a 3 % ramp, equal programs have a winner almost always."""
    wrong = 0
    for trial in range(50):
        machine = simulated.Machine(trial, simulated.ramp(0.03, LENGTH))
        first = np.array([machine.run(TRUE_SECONDS) for _ in range(50)])
        second = np.array([machine.run(TRUE_SECONDS) for _ in range(50)])
        ratio = unpaired_ratio(second, first, np.random.default_rng(trial), resamples=1000)
        wrong += 1.0 not in ratio
    assert wrong > 45


def test_the_interval_of_a_median_has_the_coverage_of_its_order_statistics():
    """1000 samples of 25 exponentials: the median ln 2 lies inside the 99 % interval in 97 % of them or more."""
    rng = np.random.default_rng(3)
    inside = sum(np.log(2) in bootstrap_median(rng.exponential(size=25), rng, resamples=800) for _ in range(1000))
    assert inside >= 970


def test_a_narrower_confidence_gives_a_narrower_interval_around_the_same_estimate():
    values = np.random.default_rng(0).normal(1, 0.01, 40)
    wide = bootstrap_median(values, np.random.default_rng(1), confidence=0.99)
    narrow = bootstrap_median(values, np.random.default_rng(1), confidence=0.8)
    assert narrow.estimate == wide.estimate == np.median(values)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_a_paired_ratio_cancels_what_both_sides_of_a_block_share():
    shared = np.random.default_rng(0).lognormal(0, 0.5, 30)
    ratio = paired_ratio(1.25 * shared, shared, np.random.default_rng(1))
    assert (ratio.low, ratio.estimate, ratio.high) == pytest.approx((1.25, 1.25, 1.25))
    assert unpaired_ratio(1.25 * shared, shared, np.random.default_rng(1)).high > 1.4


def test_sides_that_were_not_paired_are_refused():
    with pytest.raises(ValueError, match="one time a block"):
        paired_ratio(np.ones(3), np.ones(4), np.random.default_rng(0))


def test_the_inverse_of_an_interval_swaps_its_limits():
    ratio = paired_ratio(np.array([0.5, 0.8, 0.5, 0.4]), np.ones(4), np.random.default_rng(0)).inverse()
    assert ratio.low <= ratio.estimate <= ratio.high
    assert ratio.estimate == 2.0


def test_outliers_are_counted_by_tukeys_fences_and_stay_in_the_median():
    """1..9 has quartiles 3 and 7: fences at -3, 13 (mild) and -9, 19 (severe)."""
    seen = spread(np.array([1.0, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert (seen.median, seen.mild, seen.severe) == (5, 0, 0)
    assert seen.p10 == pytest.approx(1.8)
    assert seen.p90 == pytest.approx(8.2)
    more = spread(np.array([1.0, 2, 3, 4, 5, 6, 7, 8, 9, 14, 100]))
    assert (more.count, more.median) == (11, 6)
    assert more.severe == 1
    assert more.outliers == 1, "with 14 and 100 the quartiles move to 3.5 and 8.5: 14 lies inside the fence at 16"


def test_values_that_are_all_alike_have_no_outliers():
    assert spread(np.full(50, 3.3e-6)).outliers == 0


def test_the_geometric_mean_of_a_ratio_and_its_reciprocal_is_one():
    assert geometric_mean(np.array([2.0, 0.5])) == pytest.approx(1.0)
    assert geometric_mean(np.array([1.0, 4.0])) == pytest.approx(2.0)
