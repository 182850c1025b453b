"""The session on a simulated machine: order, pairing, warm-up, failures, flags. No real clock is read."""

import gc

import numpy as np
import pytest

from rmsnorm_cli.timing import Entry, Plan, Reading, WallClock, is_stable, mirrored, run_session

PLAN = Plan()


def session_of(machine, entries, plan=PLAN, **more):
    return run_session(entries, plan, np.random.default_rng(7), now=lambda: machine.now, **more)


def test_a_block_is_a_random_order_followed_by_its_mirror_image():
    names = list("abcde")
    rng = np.random.default_rng(0)
    orders = [mirrored(names, rng) for _ in range(200)]
    for order in orders:
        assert order[:5] == order[:4:-1]
        assert sorted(order[:5]) == names
    first = [order[0] for order in orders]
    assert {first.count(name) > 20 for name in names} == {True}, "every entry opens some blocks"


def test_every_entry_has_two_samples_in_every_block_and_fifty_in_all(simulated):
    machine = simulated.Machine(1)
    session = session_of(machine, [machine.entry("a", 1e-5), machine.entry("b", 2e-5), machine.entry("c", 3e-5)])
    assert session.blocks == 25
    for name in "abc":
        assert session.seconds(name).size == 50
        assert session.by_block(name).size == 25
        assert [s.block for s in session.samples if s.entry == name] == [i // 2 for i in range(50)]
    assert [s.position for s in session.samples[:6]] == [0, 1, 2, 3, 4, 5]


def test_a_straight_drift_within_a_block_falls_on_all_entries_alike(simulated):
    """The block times of two equal programs are equal under a ramp without noise, whatever their order."""
    machine = simulated.Machine(1, slowness=lambda now: 1 + now, noise=0, spikes=0)
    session = session_of(machine, [machine.entry(name, 1e-5) for name in "abc"])
    assert session.seconds("a")[-1] > 1.01 * session.seconds("a")[0], "the ramp is there"
    for other in "bc":
        assert session.by_block("a") == pytest.approx(session.by_block(other), rel=2e-7)


def test_the_warm_up_goes_on_until_every_entry_has_settled_and_is_not_sampled(simulated):
    machine = simulated.Machine(1, noise=0, spikes=0)
    runs = {"n": 0}

    def settling():
        runs["n"] += 1
        return Reading(machine.run(1e-6 * (1 + 3 * 0.7 ** runs["n"])))

    session = session_of(machine, [Entry("settling", settling), machine.entry("steady", 1e-6)])
    assert session.unstable == ()
    assert session.warmup_rounds > 10, "two windows of five are the least"
    assert runs["n"] == session.warmup_rounds + 50
    assert session.seconds("settling").max() < 1.01e-6


def test_an_entry_that_never_settles_is_told_and_does_not_hold_the_session_up(simulated):
    machine = simulated.Machine(1, noise=0, spikes=0)
    growing = iter(1.03**i for i in range(10_000))
    entries = [Entry("growing", lambda: Reading(machine.run(1e-3 * next(growing)))), machine.entry("steady", 1e-3)]
    session = session_of(machine, entries, Plan(samples=4, warmup_limit=1.0))
    assert session.unstable == ("growing",)
    assert session.seconds("steady").size == 4


@pytest.mark.parametrize(
    ("times", "stable"),
    [([1.0] * 9, False), ([1.0] * 10, True), ([1.0] * 5 + [1.004] * 5, True), ([1.0] * 5 + [1.006] * 5, False)],
)
def test_stable_means_that_two_windows_of_medians_differ_by_less_than_half_a_percent(times, stable):
    assert is_stable(times, window=5, within=0.005) is stable


def test_an_entry_that_raises_leaves_with_its_exception_and_the_others_go_on(simulated):
    machine = simulated.Machine(1)
    calls = {"n": 0}

    def breaking():
        calls["n"] += 1
        if calls["n"] > 30:
            raise KeyError("broken")
        return Reading(machine.run(1e-5))

    session = session_of(machine, [Entry("breaking", breaking), machine.entry("sound", 1e-5)])
    assert isinstance(session.failures["breaking"], KeyError)
    assert session.failures["breaking"].__traceback__ is None, "frames would keep tensors alive"
    assert session.seconds("sound").size == 50


def test_an_entry_whose_outputs_are_wrong_in_one_sample_leaves_with_what_was_found(simulated):
    machine = simulated.Machine(1)
    checks = {"n": 0}

    def check():
        checks["n"] += 1
        return "y[0] is NaN" if checks["n"] == 40 else None

    entry = Entry("skips", lambda: Reading(machine.run(1e-5)), check=check)
    session = session_of(machine, [entry, machine.entry("sound", 1e-5)])
    assert session.failures == {"skips": "y[0] is NaN"}
    assert session.seconds("skips").size < 50


def test_every_sample_is_prepared_before_and_checked_after_it():
    log = []

    def measure():
        log.append("measure")
        return Reading(1e-6)

    entry = Entry("a", measure, lambda: log.append("prepare"), lambda: log.append("check"))
    run_session([entry], Plan(samples=4), np.random.default_rng(0))
    assert log == ["prepare", "measure", "check"] * (len(log) // 3)


def test_what_is_declared_fatal_passes_through():
    """A full disk or an interrupt is no entry's failure."""

    def stopped():
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        run_session([Entry("a", stopped)], PLAN, np.random.default_rng(0))


def test_blocks_are_added_by_quarters_while_the_caller_has_not_seen_enough(simulated):
    machine = simulated.Machine(1)
    asked = []

    def enough(session):
        asked.append(session.blocks)
        return session.blocks >= 50

    session = session_of(machine, [machine.entry("a", 1e-5)], enough=enough)
    assert asked == [25, 31, 39, 49, 61]
    assert session.seconds("a").size == 122
    assert not session.out_of_time


def test_sampling_ends_with_its_time_but_never_before_the_planned_samples(simulated):
    """A sample takes 2 ms of virtual time, a block 4 ms: 0.5 s hold 125 blocks, 1 µs holds none, 25 are taken."""
    for seconds, least, most in ((0.5, 115, 128), (1e-6, 25, 25)):
        machine = simulated.Machine(1)
        plan = Plan(seconds=seconds)
        session = session_of(machine, [machine.entry("a", 1e-4)], plan, enough=lambda session: False)
        assert least <= session.blocks <= most
        assert session.out_of_time
        assert session.sampled_seconds == pytest.approx(session.blocks * 4e-3, rel=0.1)


def test_a_session_whose_entries_have_all_left_ends(simulated):
    entry = Entry("a", lambda: Reading(1e-6), check=lambda: "wrong")
    session = run_session([entry], PLAN, np.random.default_rng(0), enough=lambda session: False)
    assert session.blocks == 0
    assert not session.out_of_time


def test_a_canary_runs_once_a_block_and_tells_which_blocks_were_disturbed(simulated):
    machine = simulated.Machine(1, slowness=simulated.step(0.2, at=0.15), noise=0, spikes=0)
    canary = {"core clock": lambda: Reading(machine.run(1e-4))}
    session = session_of(machine, [machine.entry("a", 1e-4)], canaries=canary)
    assert len(session.canaries["core clock"]) == session.blocks == 25
    readings = np.array(session.canaries["core clock"])
    off = np.flatnonzero(np.abs(readings / np.median(readings) - 1) > 0.02).tolist()
    assert session.disturbed(0.02) == off
    assert 0 < len(off) < 13, "the minority speed is the disturbed one"
    assert session.seconds("a").size == 50, "disturbed blocks are flagged, not dropped"


def test_flags_stay_with_their_samples_in_the_raw_series():
    turn = iter(range(10_000))
    entry = Entry("a", lambda: Reading(1e-6, ("starved",) if next(turn) % 25 == 24 else ()))
    session = run_session([entry], Plan(samples=50), np.random.default_rng(0))
    series = session.series("a")
    assert session.flagged("a", "starved") == 2
    assert list(series["flags"].values()) == [["starved"], ["starved"]]
    assert len(series["seconds"]) == len(series["block"]) == len(series["position"]) == 50


def test_the_cyclic_collector_is_off_during_a_session_and_back_after_it():
    seen = []

    def measure():
        seen.append(gc.isenabled())
        return Reading(1e-6)

    assert gc.isenabled()
    run_session([Entry("a", measure)], Plan(samples=2), np.random.default_rng(0))
    assert set(seen) == {False}
    assert gc.isenabled()


def test_two_entries_of_one_name_are_refused():
    entry = Entry("a", lambda: Reading(1e-6))
    with pytest.raises(ValueError, match="one name"):
        run_session([entry, entry], PLAN, np.random.default_rng(0))


def test_the_wall_clock_divides_the_sample_by_its_calls():
    times = iter([10.0, 14.0])
    made = []
    reading = WallClock(now=lambda: next(times)).calls(lambda: made.append(1), 20)
    assert reading == Reading(0.2)
    assert len(made) == 20
