"""The whole protocol as `bench` applies it, on machines whose true times are known: stopping, resolution, verdicts."""

import numpy as np
import pytest

from rmsnorm_cli.bench import rows
from rmsnorm_cli.timing import Plan, run_session

RULES = rows.Rules(band=0.01, confidence=0.99, resamples=1000, min_blocks=20, canary_within=0.02)
TRUE_SECONDS = 1e-4
SECONDS = 1.2  # of virtual time that sampling may take: a block of three entries is 12 ms, so some 100 blocks
FINE, COARSE = 0.008, 0.08  # noise of a sample: a GPU's own time, and whole calls on a machine with neighbours
TRIALS = 60
DRIFTS = {
    "still": lambda simulated, trial: lambda now: 1.0,
    "ramp": lambda simulated, trial: simulated.ramp(0.03, SECONDS),
    "step": lambda simulated, trial: simulated.step(0.08, at=SECONDS * (0.1 + 0.8 * trial / TRIALS)),
    "wandering": lambda simulated, trial: simulated.wander(trial, 0.02, SECONDS, SECONDS / 10),
}


def measured(simulated, trial, drift, noise, true_ratio, twin=1.0):
    """Return the table of one session of ours against torch, `true_ratio` times as slow; `twin` is ours in its way."""
    machine = simulated.Machine(1000 * trial + 3, DRIFTS[drift](simulated, trial), noise=noise)
    times = {"ours": true_ratio, f"ours{rows.TWIN}": true_ratio * twin, "torch": 1.0}
    entries = [machine.entry(name, true * TRUE_SECONDS) for name, true in times.items()]
    rng = np.random.default_rng(trial)
    session = run_session(
        entries,
        Plan(seconds=SECONDS),
        rng,
        enough=lambda so_far: rows.twin_held(so_far, RULES, rng),
        now=lambda: machine.now,
    )
    timed = rows.Timed(session, ["ours", "torch"], ["torch"], 1, 1, False)
    return rows.table(timed, RULES, rng)


def verdicts(tables):
    return [table["rows"][0]["against"]["torch"] for table in tables]


@pytest.mark.parametrize("noise", [FINE, COARSE])
@pytest.mark.parametrize("drift", DRIFTS)
def test_equal_programs_never_have_a_winner_and_the_intervals_cover_the_truth(simulated, drift, noise):
    """Looking at the control again and again, and stopping by it, leaves the ratio's interval what it says it is."""
    tables = [measured(simulated, trial, drift, noise, 1.0) for trial in range(TRIALS)]
    found = verdicts(tables)
    assert {against["word"] for against in found} <= {"equal", "inconclusive"}
    assert np.mean([against["low"] <= 1 <= against["high"] for against in found]) >= 0.95


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_planted_slowdown_of_two_percent_is_found_where_the_control_is_narrow(simulated, drift):
    tables = [measured(simulated, trial, drift, FINE, 1.02) for trial in range(TRIALS)]
    assert sum(table["control"]["held"] for table in tables) >= 0.95 * TRIALS
    words = [against["word"] for against in verdicts(tables)]
    assert words.count("slower") >= 0.9 * TRIALS
    assert set(words) <= {"slower", "inconclusive"}


@pytest.mark.parametrize("drift", DRIFTS)
def test_under_a_coarse_control_a_small_difference_is_inconclusive_and_a_clear_one_is_told(simulated, drift):
    small = [measured(simulated, trial, drift, COARSE, 1.02) for trial in range(TRIALS // 2)]
    assert all(not table["control"]["held"] for table in small)
    assert all(table["out_of_time"] for table in small)
    assert {against["word"] for against in verdicts(small)} == {"inconclusive"}
    assert all(table["unsaid"] for table in small), "nothing could be said"
    for true, word in ((0.5, "faster"), (3.0, "slower")):
        clear = [measured(simulated, trial, drift, COARSE, true) for trial in range(TRIALS // 4)]
        found = verdicts(clear)
        assert {against["word"] for against in found} == {word}
        assert all("; A/A resolves " in against["text"] for against in found)
        assert not any(table["unsaid"] for table in clear)


def test_equality_is_said_under_a_narrow_control_alone(simulated):
    fine = [measured(simulated, trial, "wandering", FINE, 1.0) for trial in range(TRIALS // 2)]
    coarse = [measured(simulated, trial, "wandering", COARSE, 1.0) for trial in range(TRIALS // 2)]
    assert [a["word"] for a in verdicts(fine)].count("equal") >= 0.9 * len(fine)
    assert "equal" not in {a["word"] for a in verdicts(coarse)}


def test_a_biased_control_leaves_every_verdict_inconclusive_however_large_the_difference(simulated):
    tables = [measured(simulated, trial, "still", FINE, 3.0, twin=1.05) for trial in range(TRIALS // 4)]
    assert all(table["control"]["biased"] for table in tables)
    assert {against["word"] for against in verdicts(tables)} == {"inconclusive"}
    assert all(table["unsaid"].startswith("A/A control biased: 1.0") for table in tables)


def test_sampling_stops_early_on_a_quiet_machine_and_uses_its_time_on_a_noisy_one(simulated):
    quiet = measured(simulated, 0, "still", 1e-3, 1.0)
    noisy = measured(simulated, 0, "still", COARSE, 1.0)
    assert (quiet["blocks"], quiet["out_of_time"]) == (25, False)
    assert noisy["blocks"] > 80
    assert noisy["seconds"] == pytest.approx(SECONDS, rel=0.05)


def test_the_stopping_rule_does_not_change_with_the_ratios_of_interest(simulated):
    """Whatever torch's time is, sampling of one and the same pair stops after the same block."""

    def blocks(price):
        machine = simulated.Machine(4, noise=0.015)
        own = simulated.Machine(5, noise=0.0)
        entries = [machine.entry(name, TRUE_SECONDS) for name in ("ours", f"ours{rows.TWIN}")]
        entries.append(own.entry("torch", price))
        order = np.random.default_rng(0)
        rule = np.random.default_rng(0)
        session = run_session(
            entries,
            Plan(seconds=20.0, warmup_limit=0.0),
            order,
            enough=lambda so_far: rows.twin_held(so_far, RULES, rule),
            now=lambda: machine.now,
        )
        return session.blocks

    assert len({blocks(price) for price in (1e-5, 1e-4, 1.01e-4, 1e-3)}) == 1
