"""The sessions of a cell as on a GPU: graphs, cold and warm caches, host time; clock and graphs are stood in for.

The stand-ins run every body on the CPU at a price in simulated seconds, so all that is not CUDA itself is as it is.
"""

import contextlib
import time
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from rmsnorm_cli.bench import measure
from rmsnorm_cli.bench.lab import Lab
from rmsnorm_cli.bench.rows import Rules
from rmsnorm_cli.bench.workload import Buffers, Cell
from rmsnorm_cli.environment import Device
from rmsnorm_cli.kernels import Implementation, implementation
from rmsnorm_cli.timing import Plan, Reading
from rmsnorm_cli.timing.cuda import CudaClock

CELL = Cell(6, 33, "float32")
STREAM_PRICE = 1e-6
PRICES = {"torch": 2e-6, "reference": 4e-6}


class _Clock(CudaClock):
    """Prices what it is given instead of timing it; `hidden` is what an audit will find."""

    def __init__(self, l2_bytes=1500, hidden=None, memory_bytes=2**30):
        self.memory_bytes = memory_bytes
        self.l2_bytes, self.hidden, self.rng = l2_bytes, hidden, np.random.default_rng(0)
        self.price, self.broken, self.replaying = 0.0, False, False

    def _reading(self, count):
        price, self.price = self.price, 0.0
        return Reading((price or STREAM_PRICE * count) / count * float(np.exp(self.rng.normal(0, 1e-4))))

    def calls(self, call, count):
        for _ in range(count):
            call()
        return self._reading(count)

    def host(self, call, count, spin):
        assert spin.seconds > 0
        return self.calls(call, count)

    def hidden_work(self, call, count, tries=3):
        call()
        return self.hidden

    def lost(self):
        return self.broken

    def canaries(self):
        return {"core clock": lambda: Reading(1e-4)}


class _Graph:
    """Runs its bodies at every replay and copies the results to where the captured ones lie, as a graph does."""

    made: ClassVar = []

    def __init__(self, clock, make, sets):
        self.clock, self.bodies = clock, make(2 * sets)
        self.calls = len(self.bodies)
        self.outputs = [()] * sets
        for i, body in enumerate(self.bodies):
            self.outputs[i % sets] = tuple(output.detach().clone() for output in body())
        _Graph.made.append(self)

    def measure(self, before=lambda: None):
        before()
        self.clock.price, self.clock.replaying = 0.0, True
        with torch.no_grad():
            for i, body in enumerate(self.bodies):
                with torch.enable_grad():
                    fresh = body()
                for held, new in zip(self.outputs[i % len(self.outputs)], fresh, strict=True):
                    held.copy_(new)
        self.clock.replaying = False
        return self.clock._reading(self.calls)

    def poison(self, place):
        for output in self.outputs[place]:
            output.fill_(float("nan"))

    def release(self):
        self.released = True


@pytest.fixture
def measured(monkeypatch):
    """Return a function that measures CELL with the named implementations on the stand-ins."""
    monkeypatch.setattr(measure, "captured", _Graph)
    _Graph.made = []

    def call(
        impls,
        clock=None,
        perimeters=("forward", "backward"),
        caches=("cold", "warm"),
        measures=("whole", "gpu", "host"),
        compile_seconds=60.0,
    ):
        clock = clock or _Clock()
        records = []
        lab = Lab(
            clock=clock,
            device=Device("cuda", "cuda", "cpu", "stand-in"),
            plan=Plan(samples=40, seconds=1e-3),
            rules=Rules(0.01, 0.99, 300, 20, 0.02),
            perimeters=perimeters,
            measures=measures,
            caches=caches,
            calls=3,
            baselines=["torch"],
            eps=1e-6,
            seed=5,
            compile_seconds=compile_seconds,
            record=records.append,
        )
        priced = {name: priced_at(clock, impl) for name, impl in impls.items()}
        return measure.measure_cell(CELL, list(impls), priced, {}, lab), records

    return call


def priced_at(clock, impl):
    def pay(gradient=None):
        clock.price += PRICES.get(impl.name, 2e-6)

    def call(x, gamma, eps):
        pay()
        y = impl.call(x, gamma, eps)
        if y.requires_grad:
            y.register_hook(pay)
        return y

    return Implementation(impl.name, call)


def known(*names):
    return {name: implementation(name) for name in names}


def table_of(cell, **wanted):
    (table,) = [t for t in cell["tables"] if all(t[key] == value for key, value in wanted.items())]
    return table


@pytest.mark.case("B71")
def test_each_perimeter_has_whole_calls_cold_and_warm_gpu_time_and_host_time(measured):
    cell, _ = measured(known("torch", "reference"), _Clock(l2_bytes=2000))
    kinds = [(t["measure"], t["cache"]) for t in cell["tables"] if t["perimeter"] == "backward"]
    assert kinds == [("calls", "loop"), ("gpu", "cold"), ("gpu", "warm"), ("host", "loop")]
    assert {row["status"] for table in cell["tables"] for row in table["rows"]} == {"passed"}
    assert all(graph.released for graph in _Graph.made)


def test_a_working_set_larger_than_the_cache_has_no_warm_time(measured):
    cell, _ = measured(known("torch"), _Clock(l2_bytes=1500))
    assert cell["fits_l2"] is False
    assert {t["cache"] for t in cell["tables"] if t["measure"] == "gpu"} == {"cold"}


@pytest.mark.case("B71")
@pytest.mark.parametrize(
    ("cache", "memory", "sets"), [(2000, 2**30, 26), (20000, 2**30, 64), (60000, 2**30, 114), (2000, 2**18, 10)]
)
def test_cold_graphs_walk_through_sets_that_hold_three_times_the_cache(measured, cache, memory, sets):
    """A set of x and y takes 1584 bytes: 26 hold twenty times 2000, 64 are enough for 20000, 114 hold 3 x 60000.

    Ten are a sixteenth of a memory of 256 KiB.
    """
    cell, _ = measured(known("torch"), _Clock(l2_bytes=cache, memory_bytes=memory), perimeters=("forward",))
    assert cell["sets_in_rotation"] == sets
    assert sorted({len(graph.outputs) for graph in _Graph.made}) == [1, sets]


def test_gpu_time_is_told_as_a_share_of_the_stream_measured_beside_it(measured):
    cell, _ = measured(known("torch", "reference"), perimeters=("forward",))
    table = table_of(cell, measure="gpu")
    assert table["stream"]["median"] == pytest.approx(STREAM_PRICE, rel=1e-2)
    shares = {row["impl"]: row["share_of_stream"]["estimate"] for row in table["rows"]}
    assert shares["torch"] == pytest.approx(0.5, rel=1e-2)
    assert shares["reference"] == pytest.approx(0.25, rel=1e-2)


@pytest.mark.case("B70")
def test_a_program_faster_than_the_stream_when_cold_is_invalid(measured, monkeypatch):
    monkeypatch.setitem(PRICES, "torch", 0.3e-6)
    cell, _ = measured(known("torch", "reference"), perimeters=("forward",))
    rows = {row["impl"]: row for row in table_of(cell, measure="gpu")["rows"]}
    assert rows["torch"]["status"] == "failed"
    assert rows["reference"]["status"] == "passed"


@pytest.mark.case("B70")
def test_work_found_on_another_stream_leaves_a_row_without_any_number(measured):
    cell, _ = measured(known("torch"), _Clock(hidden=2.5e-4), perimeters=("forward",))
    for table in cell["tables"]:
        (row,) = table["rows"]
        assert row["status"] == "failed"
        assert row["detail"] == "it left 250 µs of work on another stream when its own was empty"


def test_a_program_that_cannot_be_captured_keeps_its_whole_call_time(measured, monkeypatch):
    def refusing(clock, make, sets):
        bodies = make(1)
        if bodies[0].__qualname__.startswith("Program") and clock.price >= 0 and refusing.turn == 0:
            refusing.turn += 1
            raise RuntimeError("operation not permitted when stream is capturing")
        return _Graph(clock, make, sets)

    refusing.turn = 0
    monkeypatch.setattr(measure, "captured", refusing)
    cell, _ = measured(known("torch", "reference"), perimeters=("forward",), caches=("cold",))
    gpu = {row["impl"]: row for row in table_of(cell, measure="gpu")["rows"]}
    assert gpu["torch"]["status"] == "error"
    assert "no CUDA graph of it could be made" in gpu["torch"]["detail"]
    assert gpu["reference"]["status"] == "passed"
    assert {row["status"] for row in table_of(cell, measure="calls")["rows"]} == {"passed"}


def test_a_replay_that_leaves_poison_behind_is_a_wrong_output(measured, monkeypatch):
    class _Idle(_Graph):
        def measure(self, before=lambda: None):
            before()
            return Reading(1e-6)

    monkeypatch.setattr(measure, "captured", _Idle)
    cell, _ = measured(known("torch"), perimeters=("forward",), caches=("cold",))
    (row,) = table_of(cell, measure="gpu")["rows"]
    assert row["status"] == "failed"
    assert row["detail"].startswith("wrong output in a timed sample: y: ")


def test_only_the_measures_asked_for_are_taken_and_each_output_is_verified_all_the_same(measured):
    cell, records = measured(known("torch"), measures=("gpu",), caches=("cold",))
    assert [(t["perimeter"], t["measure"]) for t in cell["tables"]] == [("forward", "gpu"), ("backward", "gpu")]
    assert {r["perimeter"] for r in records if r["kind"] == "verification"} == {"forward", "backward"}
    host, _ = measured(known("torch", "reference"), measures=("host",))
    assert all(row["against"] == {} for t in host["tables"] for row in t["rows"]), "no pair of them is controlled"
    assert {t["unsaid"] for t in host["tables"]} == {None}


def test_a_program_that_takes_too_long_to_compile_is_a_row_and_the_others_are_timed(measured):
    def compiling(x, gamma, eps):
        while True:
            with contextlib.suppress(Exception):  # as a tuner that tries one launch after another
                time.sleep(0.01)

    impls = {"slow": SimpleNamespace(name="slow", call=compiling), **known("torch")}
    cell, _ = measured(impls, perimeters=("forward",), compile_seconds=1.5)
    for table in cell["tables"]:
        slow, torchs = table["rows"]
        assert slow["status"] == "error"
        assert slow["detail"] == "its first calls, which compile it, took more than 1.5 s (bench.compile_seconds)"
        assert torchs["status"] == "passed"
    assert cell["first_calls"]["slow"] >= 1.5 > cell["first_calls"]["torch"]


def test_a_backward_that_takes_too_long_is_interrupted_too(measured):
    threaded = []

    class Slow(_Consuming):
        @staticmethod
        def backward(ctx, dy):
            threaded.append(torch._C._is_multithreading_enabled())
            time.sleep(60)

    slow = SimpleNamespace(name="slow", call=lambda x, gamma, eps: Slow.apply(x, gamma, eps))
    cell, _ = measured({"slow": slow}, perimeters=("backward",), compile_seconds=0.5)
    assert {table["rows"][0]["status"] for table in cell["tables"]} == {"error"}
    assert cell["first_calls"]["slow"] < 30
    assert threaded == [False], "on a GPU a backward of its own thread would not be reached"


def test_one_program_that_does_not_fit_the_memory_is_an_error_and_the_others_are_timed(measured):
    def hungry(x, gamma, eps):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")

    impls = {"hungry": SimpleNamespace(name="hungry", call=hungry), **known("torch")}
    cell, _ = measured(impls, perimeters=("forward",))
    for table in cell["tables"]:
        first, second = table["rows"]
        assert (first["status"], second["status"]) == ("error", "passed")
        assert "Tried to allocate 2 TiB" in first["detail"]


def test_a_stream_that_does_not_fit_the_memory_leaves_times_without_a_share(measured, monkeypatch):
    def full(self, perimeter, sets):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Buffers, "streams", full)
    cell, _ = measured(known("torch"), perimeters=("forward",), caches=("cold",))
    table = table_of(cell, measure="gpu")
    assert table["stream"] is None
    assert table["rows"][0]["status"] == "passed"
    assert table["rows"][0]["share_of_stream"] is None


def test_a_program_that_breaks_the_gpu_ends_the_cell_by_its_name(measured):
    from rmsnorm_cli.bench.admission import DeviceLost

    clock = _Clock()

    def breaking(x, gamma, eps):
        clock.broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    impls = {**known("torch"), "breaking": SimpleNamespace(name="breaking", call=breaking)}
    with pytest.raises(DeviceLost, match=r"context was lost when breaking ran \(RuntimeError: CUDA error: an illegal"):
        measured(impls, clock)


def test_a_program_that_writes_to_x_only_when_it_is_replayed_is_caught(measured):
    """Whole calls leave x alone; the graph's calls, which no autograd watches, do not."""
    clock = _Clock()
    values = []

    def writing(x, gamma, eps):
        if clock.replaying:
            x.data[0, 0] += 1  # and what it returns is right for the values that it was given before
        else:
            values[:] = [x.detach().clone()]
        return implementation("torch").call(values[0], gamma, eps)

    impls = {"writing": SimpleNamespace(name="writing", call=writing)}
    cell, _ = measured(impls, clock, perimeters=("forward",), measures=("gpu",))
    (row,) = cell["tables"][0]["rows"]
    assert row["status"] == "failed"
    assert row["detail"] == "wrong output in a timed sample: it wrote to x"


def test_a_consumer_of_dy_meets_fresh_values_in_every_call_of_a_graph(measured):
    def consuming(x, gamma, eps):
        return _Consuming.apply(x, gamma, eps)

    cell, _ = measured({"consuming": SimpleNamespace(name="consuming", call=consuming)}, perimeters=("backward",))
    assert cell["consumes_dy"] == ["consuming"]
    assert {row["status"] for table in cell["tables"] for row in table["rows"]} == {"passed"}


class _Consuming(torch.autograd.Function):
    """A right RMSNorm whose backward writes dx over dy."""

    @staticmethod
    def forward(ctx, x, gamma, eps):
        ctx.save_for_backward(x, gamma)
        ctx.eps = eps
        return implementation("reference").call(x.detach(), gamma.detach(), eps)

    @staticmethod
    def backward(ctx, dy):
        from rmsnorm_cli.kernels import reference

        x, gamma = ctx.saved_tensors
        dx, dgamma = reference.backward(dy, x, gamma, ctx.eps)
        return dy.copy_(dx), dgamma, None


def test_every_session_leaves_its_raw_samples_and_canaries(measured):
    _, records = measured(known("torch"), perimeters=("forward",), caches=("cold",))
    kinds = {(r["kind"], r.get("measure"), r.get("impl")) for r in records}
    for name in ("torch", "torch (A/A)"):
        assert ("samples", "gpu", name) in kinds
        assert ("samples", "calls", name) in kinds
    assert ("samples", "gpu", "stream") in kinds
    assert ("canaries", "gpu", None) in kinds
    for record in records:
        if record["kind"] == "samples":
            assert len(record["seconds"]) == 40


@pytest.mark.case("B71")
def test_the_bytes_of_a_cell_are_those_of_the_model_that_is_printed():
    """4096 × 4096 in 2 bytes: 2·M·N·s = 67,108,864 and N·s = 8,192; the backward moves three matrices."""
    cell = Cell(4096, 4096, "float16")
    assert cell.bytes_moved("forward") == 67_108_864 + 8_192
    assert cell.bytes_moved("forward_train") == cell.bytes_moved("forward") + 4 * 4096
    assert cell.bytes_moved("backward") == 100_663_296 + 16_384 + 16_384
    assert cell.bytes_moved("forward_backward") == cell.bytes_moved("forward_train") + cell.bytes_moved("backward")
    assert [cell.stream_bytes(p) for p in ("forward", "backward", "forward_backward")] == [
        67_108_864,
        100_663_296,
        167_772_160,
    ]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_rows_start_where_the_cell_says_and_the_stream_on_16_bytes(start, monkeypatch):
    """Those of every set; what the stream reads is theirs, in memory that begins on 16 bytes."""
    cell = Cell(6, 33, "float16", start)
    assert cell.name == f"6x33{f'+{start}' if start else ''} float16"
    buffers = Buffers(cell, 2, "cpu", 0)
    for tensor in (*buffers.x, *buffers.dy):
        assert tensor.data_ptr() % 16 == 2 * start
        assert tensor.is_contiguous()
        assert tensor.is_leaf
    assert [tensor.requires_grad for tensor in buffers.x] == [True, True]
    read = []
    monkeypatch.setattr(torch, "add", lambda x, dy, out: read.extend((x, dy)))
    for body in buffers.streams("backward", 2):
        body()
    assert len(read) == 4
    for tensor, want in zip(read, (buffers.x[0], buffers.dy[0], buffers.x[1], buffers.dy[1]), strict=True):
        assert tensor.data_ptr() % 16 == 0
        assert torch.equal(tensor, want)


def test_refilled_buffers_hold_other_values_at_the_same_addresses():
    buffers = Buffers(CELL, 3, "cpu", 0)
    before = buffers.pristine()
    where = [tensor.data_ptr() for tensor in (*buffers.x, *buffers.dy, buffers.gamma)]
    buffers.refill(1)
    assert where == [tensor.data_ptr() for tensor in (*buffers.x, *buffers.dy, buffers.gamma)]
    assert not torch.equal(buffers.x[0], before.x)
    assert all(torch.equal(other, buffers.x[0]) for other in buffers.x)
    assert all(torch.equal(other, buffers.dy[0]) for other in buffers.dy)
    buffers.refill(0)
    assert torch.equal(buffers.x[2], before.x), "the same seed gives the same values"


def test_each_stream_moves_the_bytes_it_says_and_no_formula():
    buffers = Buffers(CELL, 2, "cpu", 0)
    x, dy = buffers.x[1].detach(), buffers.dy[1]
    assert torch.equal(buffers.streams("forward", 2)[1]()[0], x)
    assert torch.equal(buffers.streams("backward", 2)[1]()[0], x + dy)
    copied, added = buffers.streams("forward_backward", 2)[1]()
    assert torch.equal(copied, x)
    assert torch.equal(added, x + dy)
