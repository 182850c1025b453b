"""The GPU's clocks on programs of known cost: controls, an independent measurement, planted slowness, hidden work.

These run on a GPU alone; what they claim of statistics is proved on simulated clocks beside them.
"""

import time

import numpy as np
import pytest
import torch

from rmsnorm_cli.timing import STARVED, Entry, Plan, control, judge, paired_ratio, run_session

pytestmark = pytest.mark.gpu

MEGABYTE = 2**20


@pytest.fixture(scope="module")
def clock():
    from rmsnorm_cli.timing.cuda import CudaClock

    return CudaClock("cuda:0")


@pytest.fixture
def active(clock):
    with clock.active():
        yield clock


def doubled(source, target):
    """Return a program that reads `source` and writes `target`."""
    return lambda: (torch.mul(source, 2, out=target),)


def rotating(clock, megabytes, rows=1.0):
    """Return programs that each stream `megabytes` of fp32, times `rows`, enough of them for a cold cache."""
    count = int(megabytes * MEGABYTE * rows) // 4
    return [
        doubled(torch.randn(count, device=clock.device), torch.empty(count, device=clock.device))
        for _ in range(clock.sets_in_rotation(8 * count))
    ]


def graph_over(clock, bodies):
    """Return a graph that runs programs by turns."""
    from rmsnorm_cli.timing.cuda import captured

    for body in bodies:
        body()
    return captured(clock, lambda turns: [bodies[i % len(bodies)] for i in range(turns)], len(bodies))


def graph_of(clock, megabytes, rows=1.0):
    """Return a graph that streams `megabytes` of fp32, times `rows`, through rotating buffers from a cold cache."""
    return graph_over(clock, rotating(clock, megabytes, rows))


def ratio_of(clock, subject, baseline, measure=lambda program: program.measure):
    """Time two programs in one session and return subject / baseline."""
    rng = np.random.default_rng(0)
    entries = [Entry("subject", measure(subject)), Entry("baseline", measure(baseline))]
    session = run_session(entries, Plan(), rng, clock.canaries())
    assert not session.failures
    return paired_ratio(session.by_block("subject"), session.by_block("baseline"), rng), session


@pytest.mark.alone
@pytest.mark.parametrize("megabytes", [0.125, 4, 64])
def test_one_program_entered_twice_as_graphs_is_equal_to_itself_within_one_percent(active, megabytes):
    """Over the same buffers, as a benchmark's control: over different ones 128 KB were 1.2 and 1.3 % apart."""
    bodies = rotating(active, megabytes)
    ratio, session = ratio_of(active, graph_over(active, bodies), graph_over(active, bodies))
    assert control(ratio).held, ratio
    assert session.flagged("subject", STARVED) == 0


@pytest.mark.alone
def test_one_program_entered_twice_as_whole_calls_is_equal_to_itself_within_one_percent(active):
    source, target = torch.randn(2, 16 * MEGABYTE, device=active.device)
    program = doubled(source, target)
    ratio, _ = ratio_of(active, program, program, lambda call: lambda: active.calls(call, 20))
    assert control(ratio).held, ratio


@pytest.mark.alone
@pytest.mark.parametrize("megabytes", [128, 512])
def test_graph_time_agrees_with_tritons_own_benchmark_within_three_percent(active, megabytes):
    from triton.testing import do_bench_cudagraph

    count = megabytes * MEGABYTE // 4
    source, target = torch.randn(count, device=active.device), torch.empty(count, device=active.device)
    graph = graph_over(active, [doubled(source, target)])  # as theirs: over one set of buffers
    ours = float(np.median([graph.measure().seconds for _ in range(30)]))
    theirs = do_bench_cudagraph(doubled(source, target), return_mode="median") / 1e3
    assert ours == pytest.approx(theirs, rel=0.03)
    assert 8 * count / ours < 2e13, "no memory of any card is so fast: both would have timed nothing"


@pytest.mark.alone
def test_a_planted_slowdown_of_two_percent_is_detected_with_its_size(active):
    """Two percent more bytes, from a cold cache: slower, and 1.02 within half a percent."""
    ratio, _ = ratio_of(active, graph_of(active, 128, rows=1.02), graph_of(active, 128))
    assert judge(ratio).word == "slower", ratio
    assert ratio.estimate == pytest.approx(1.02, abs=0.005)


def test_a_replay_must_write_what_was_poisoned(active):
    """A graph whose work is there overwrites NaN; where a captured call leaves memory unwritten, NaN stays."""
    from rmsnorm_cli.timing.cuda import GraphReplay

    source = torch.randn(MEGABYTE, device=active.device)
    elsewhere = torch.empty_like(source)
    working = GraphReplay(active, [lambda: (source * 2,)], 1)
    skipping = GraphReplay(active, [lambda: (torch.mul(source, 2, out=elsewhere), torch.empty_like(source))[1:]], 1)
    for graph in (working, skipping):
        graph.poison(0)
        graph.measure()
    assert torch.equal(working.outputs[0][0], source * 2)
    assert bool(skipping.outputs[0][0].isnan().all())


@pytest.mark.case("B70")
def test_work_on_another_stream_is_found_and_work_that_is_joined_is_not(active):
    other = torch.cuda.Stream()
    source, target = torch.randn(2, 32 * MEGABYTE, device=active.device)

    def hiding():
        with torch.cuda.stream(other):
            torch.mul(source, 2, out=target)

    def joining():
        other.wait_stream(torch.cuda.current_stream())
        hiding()
        torch.cuda.current_stream().wait_stream(other)

    def honest():
        torch.mul(source, 2, out=target)

    for program in (hiding, joining, honest):
        program()
    assert active.hidden_work(honest, 20) is None
    assert active.hidden_work(joining, 20) is None
    found = active.hidden_work(hiding, 20)
    assert found is not None
    assert found > 1e-4, "20 copies of 256 MB in all take at least a millisecond"


def test_a_host_slower_than_the_first_spin_is_waited_for_and_costs_the_gpu_time_nothing(active):
    source, target = torch.randn(2, 16 * MEGABYTE, device=active.device)
    program = doubled(source, target)
    swift = active.queued(program, 1)

    def sluggish():
        time.sleep(1e-3)
        program()

    slow = active.queued(sluggish, 1)
    assert not slow.flags
    assert slow.seconds == pytest.approx(swift.seconds, rel=0.2)


def test_a_sample_that_no_spin_can_cover_is_flagged_starved(active):
    def endless():
        time.sleep(0.3)

    assert active.queued(endless, 1).flags == (STARVED,)


@pytest.mark.alone
def test_host_time_is_the_hosts_alone(active):
    """A call that sleeps 1 ms and launches a long kernel costs the host 1 ms, whatever the GPU has to do."""
    from rmsnorm_cli.timing.cuda import Spin

    source, target = torch.randn(2, 64 * MEGABYTE, device=active.device)

    def call():
        time.sleep(1e-3)
        torch.mul(source, 2, out=target)

    spin = Spin(0.05)
    reading = active.host(call, 20, spin)
    assert 1e-3 <= reading.seconds < 1.5e-3
    assert not reading.flags
    assert 0.02 <= spin.seconds <= 0.2, "the next spin covers what this sample took"


def test_the_clock_reports_what_it_costs_by_itself(active):
    assert 0 <= active.overheads.empty_interval < 2e-5
    assert 0 <= active.overheads.empty_wait < 1e-3


@pytest.mark.case("B71")
def test_cold_rotation_holds_three_times_the_cache(active):
    assert active.l2_bytes > MEGABYTE
    small, L2 = active.l2_bytes // 30, active.l2_bytes
    sets = active.sets_in_rotation(small)
    assert sets * small >= 3 * L2 > (sets - 1) * small
    assert active.sets_in_rotation(L2 // 10) == 64
    assert active.sets_in_rotation(L2) == 20
    assert active.sets_in_rotation(20 * L2) == 1


def test_peak_memory_counts_what_a_call_allocates_at_once(active):
    from rmsnorm_cli.timing.cuda import peak_bytes

    source = torch.randn(MEGABYTE, device=active.device)
    assert peak_bytes(lambda: source * 2, active.device) == 4 * MEGABYTE
    assert peak_bytes(lambda: (source * 2) + 1, active.device) == 8 * MEGABYTE
