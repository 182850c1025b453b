"""Clocks that need a GPU: events around whole calls, replay of a CUDA graph, host time, and an audit for hidden work.

All of it happens on one stream of its own, entered with `CudaClock.active()`: inputs are made, programs run, graphs
captured and outputs read there, so that a program that leaves this stream can be seen to do so. Times in seconds.
The empty interval between two events is measured and reported, never subtracted.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from rmsnorm_cli.timing.clock import STARVED, Call, Reading, nothing

L2_ROTATION = 3  # cold: the buffers in rotation hold at least this many times the L2 cache,
L2_FAR = 20  # and so many times where FAR_SETS are enough: no cache forgets in order, and a kernel may tell it to keep
FAR_SETS = 64
FAR_SHARE = 16  # ... and where they are no more than this part of the GPU's memory: results take several times as much
GRAPH_SECONDS = 5e-4  # shortest graph replay: a launch takes some 2 µs, 0.4 % of this
MOST_REPLAYED = 4096  # calls in one graph
SPIN_SECONDS = 2e-4  # first guess of how long the host needs to queue one replay
LONGEST_SPIN = 0.2
SPIN_TRIES = 5  # each twice as long as the one before
HIDDEN_SECONDS = 3e-5  # work found elsewhere after the stream was empty: more than waking the host varies by
CANARY_SECONDS = 1e-4
CANARY_SIZE = 2  # the copied canary reads this many times the L2 cache, so what ran before does not matter to it

Outputs = tuple[torch.Tensor, ...]
Body = Callable[[], Outputs]


@dataclass(frozen=True)
class Overheads:
    """What this clock costs by itself: an interval with nothing in it, and a device-wide wait for nothing."""

    empty_interval: float
    empty_wait: float


@dataclass
class Spin:
    """How long a program's launch needs the stream to be held, learnt from its own samples."""

    seconds: float = SPIN_SECONDS


class CudaClock:
    """Event clock of one GPU. Build it once; it measures its own overheads and the GPU's clock rate on the way."""

    label = "CUDA events"

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        with torch.cuda.device(self.device):
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(self.device)
        self.l2_bytes, self.memory_bytes = int(properties.L2_cache_size), int(properties.total_memory)
        with self.active():
            self._cycles_per_second = self._calibrate()
            self._canary = torch.empty(2, CANARY_SIZE * self.l2_bytes // 4, device=self.device).normal_()
            self.overheads = self._measure_overheads()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this clock's GPU and stream current, and wait for whatever ran before and whatever is left after."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):
                try:
                    yield
                finally:
                    with suppress(RuntimeError):  # a lost context was told where it was met
                        torch.cuda.synchronize()

    def calls(self, call: Call, count: int) -> Reading:
        """Return the time of one of `count` whole calls between two events on an idle stream, host time included."""
        start, end = _event(), _event()
        self.stream.synchronize()
        start.record(self.stream)
        for _ in range(count):
            call()
        end.record(self.stream)
        end.synchronize()
        return Reading(_seconds(start, end) / count)

    def host(self, call: Call, count: int, spin: "Spin") -> Reading:
        """Return what one call costs the host: the GPU is kept busy meanwhile, so no call waits for it.

        `count` calls must fit the launch queue (1024 kernels). The sample is flagged starved where the GPU was done
        with its spin before the host was done calling; `spin` learns from each sample how long the next must be.
        """
        released = _event()
        self.stream.synchronize()
        self._spin(spin.seconds)
        released.record(self.stream)
        start = time.perf_counter()
        for _ in range(count):
            call()
        elapsed = time.perf_counter() - start
        starved = bool(released.query())  # type: ignore[no-untyped-call]
        self.stream.synchronize()
        spin.seconds = min(1.5 * elapsed, LONGEST_SPIN)
        return Reading(elapsed / count, (STARVED,) if starved else ())

    def queued(self, launch: Call, count: int, before: Call = nothing, spin: "Spin | None" = None) -> Reading:
        """Return the GPU's time for one launch, over its `count` calls, with all of it queued before it begins.

        A spin holds the stream until the host has queued everything; where the spin was too short it is doubled and
        the sample taken again, after `before`. A sample that stays short of host time is flagged. Who keeps `spin`
        begins the next sample with the length that this one needed.
        """
        spin = spin or Spin()
        for _ in range(SPIN_TRIES):
            before()
            start, end = _event(), _event()
            self.stream.synchronize()
            self._spin(spin.seconds)
            start.record(self.stream)
            launch()
            end.record(self.stream)
            starved = bool(start.query())  # type: ignore[no-untyped-call]
            end.synchronize()
            if not starved:
                break
            spin.seconds = min(2 * spin.seconds, LONGEST_SPIN)
        return Reading(_seconds(start, end) / count, (STARVED,) if starved else ())

    def hidden_work(self, call: Call, count: int, tries: int = 3) -> float | None:
        """Return the seconds of work that `count` calls left on other streams, or None where there is none.

        After the calls' own stream is empty the whole device is waited for; what is left then was never ordered before
        the end event. The least of some tries counts, and only beyond what waiting for nothing takes, here and now: on
        a GPU that other processes use, that is long too.
        """
        left, nothing_left = [], [self.overheads.empty_wait]
        for _ in range(tries):
            left.append(self._wait_after(call, count))
            nothing_left.append(self._wait_after(nothing, 1)[0])
        beyond = min(wait for wait, _ in left) - max(nothing_left)
        shortest = min(length for _, length in left)
        return beyond if beyond > HIDDEN_SECONDS + 0.02 * shortest else None

    def canaries(self) -> dict[str, Callable[[], Reading]]:
        """Return two fixed programs: one whose time is the core clock's, one whose time is the memory's."""
        cycles = int(CANARY_SECONDS * self._cycles_per_second)
        source, target = self._canary

        def copy() -> None:
            target.copy_(source)

        return {
            "core clock": lambda: self.queued(lambda: _sleep(cycles), 1),
            "memory": lambda: self.queued(copy, 1),
        }

    def lost(self) -> bool:
        """Return whether a program has broken the GPU's context, so that nothing in this process runs on it again."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def sets_in_rotation(self, bytes_of_one: int) -> int:
        """Return how many sets of buffers must take turns so that each is out of the L2 cache when its turn comes."""
        one = max(1, bytes_of_one)
        enough, far = (-(-times * self.l2_bytes // one) for times in (L2_ROTATION, L2_FAR))
        return max(1, enough, min(far, FAR_SETS, self.memory_bytes // FAR_SHARE // one))

    def fits_l2(self, bytes_of_one: int) -> bool:
        """Return whether a call's whole working set fits the L2 cache."""
        return bytes_of_one <= self.l2_bytes

    def _wait_after(self, call: Call, count: int) -> tuple[float, float]:
        start, end, late = _event(), _event(), _event()
        torch.cuda.synchronize()
        start.record(self.stream)
        for _ in range(count):
            call()
        end.record(self.stream)
        torch.cuda.synchronize()
        late.record(self.stream)
        late.synchronize()
        return _seconds(end, late), _seconds(start, end)

    def _spin(self, seconds: float) -> None:
        _sleep(int(seconds * self._cycles_per_second))

    def _calibrate(self) -> float:
        """Return the cycles that the spin kernel counts in a second."""
        cycles = 2_000_000
        rates = []
        for _ in range(4):  # the first pays for loading the kernel
            start, end = _event(), _event()
            start.record(self.stream)
            _sleep(cycles)
            end.record(self.stream)
            end.synchronize()
            rates.append(cycles / _seconds(start, end))
        return min(rates[1:])

    def _measure_overheads(self) -> Overheads:
        empty = sorted(self.queued(lambda: None, 1).seconds for _ in range(21))
        waits = sorted(self._wait_after(lambda: None, 1)[0] for _ in range(21))
        return Overheads(empty[10], waits[10])


class GraphReplay:
    """A CUDA graph of the bodies, one after the other; its time is the GPU's alone.

    The outputs of the last `ring` bodies stay alive at fixed addresses, so they can be poisoned before a replay and
    read after it. Raises what the program raises while it is captured.
    """

    def __init__(self, clock: CudaClock, bodies: Sequence[Body], ring: int) -> None:
        self.clock, self.calls, self._spin = clock, len(bodies), Spin()
        self.outputs: list[Outputs] = [()] * ring
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=clock.stream):
            for i, body in enumerate(bodies):
                self.outputs[i % ring] = tuple(output.detach() for output in body())
        torch.cuda.synchronize()

    def measure(self, before: Call = nothing) -> Reading:
        """Return the GPU's time of one call; `before` runs ahead of every attempt, outside the interval."""
        return self.clock.queued(self._graph.replay, self.calls, before, self._spin)

    def poison(self, place: int) -> None:
        """Overwrite the outputs at one place of the ring with NaN, which a replay must replace."""
        for output in self.outputs[place]:
            output.fill_(float("nan"))

    def release(self) -> None:
        """Give the graph's memory back."""
        self.outputs.clear()
        self._graph.reset()


def captured(clock: CudaClock, make: Callable[[int], Sequence[Body]], sets: int) -> GraphReplay:
    """Capture whole walks through `sets` sets of buffers, enough for a replay of at least GRAPH_SECONDS.

    `make(turns)` returns that many bodies, set after set. They must have run on the clock's stream before:
    compilation and first allocations cannot be captured.
    """
    once = GraphReplay(clock, make(sets), sets)
    once.measure()  # the first replay uploads the graph
    seconds = once.measure().seconds * once.calls
    walks = int(min(-(-GRAPH_SECONDS // max(seconds, 1e-7)), MOST_REPLAYED // sets))
    if walks <= 1:
        return once
    once.release()
    return GraphReplay(clock, make(sets * walks), sets)


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Return the most memory that one call had allocated at once beyond what was allocated before it, in bytes."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del held
    return int(peak)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3


def _sleep(cycles: int) -> None:
    """Hold the current stream with a kernel that only counts cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
