"""A timed session: every entry warmed up alike, then sampled in blocks of random, mirrored order beside a canary.

One block takes each entry once in a random order and once more in the reverse of it (ABBA for two), so a drift that
is a straight line within a block falls on all alike. What differs between blocks cancels in the ratio of each block.
Nothing is dropped: odd samples and disturbed blocks carry flags.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmsnorm_cli.timing.clock import Entry, Reading
from rmsnorm_cli.timing.statistics import Times

Measure = Callable[[], Reading]


@dataclass(frozen=True)
class Plan:
    """How a session runs. Times in seconds; shares and limits as fractions."""

    samples: int = 50  # of each entry; two fall in one block
    warmup_samples: int = 1  # of each entry at least, before anything is judged stable
    window: int = 5  # stable: the medians of the last two windows of samples ...
    stable_within: float = 0.005  # ... differ by less than this
    warmup_limit: float = 1.0  # a session that is not stable by then starts all the same, and says so
    canary_within: float = 0.02  # a block whose canary is further than this from the session's median is disturbed
    seconds: float = 5.0  # sampling goes on no longer than this, the planned samples apart
    growth: float = 1.25  # of the number of blocks between two looks at whether they are enough

    @property
    def blocks(self) -> int:
        """Return how many blocks are taken whatever they show."""
        return max(1, self.samples // 2)


@dataclass(frozen=True)
class Sample:
    """One reading in its place: which block, which position within it."""

    entry: str
    block: int
    position: int
    seconds: float
    flags: tuple[str, ...] = ()


@dataclass
class Session:
    """What a session left: all samples in the order taken, and what was seen beside them.

    `failures` holds the entries that left it: the exception that one raised, or what its check found.
    """

    samples: list[Sample] = field(default_factory=list)
    failures: dict[str, Exception | str] = field(default_factory=dict)
    canaries: dict[str, list[float]] = field(default_factory=dict)  # one reading a block
    warmup_rounds: int = 0
    unstable: tuple[str, ...] = ()  # entries still moving when the warm-up ended
    blocks: int = 0
    sampled_seconds: float = 0.0  # from the first block to the last
    out_of_time: bool = False  # sampling ended before the caller had seen enough
    fatal: tuple[type[BaseException], ...] = ()

    def seconds(self, entry: str) -> Times:
        """Return all times of an entry in the order taken."""
        return np.array([sample.seconds for sample in self.samples if sample.entry == entry])

    def by_block(self, entry: str) -> Times:
        """Return one time a block: the mean of the two mirrored samples, which a straight drift leaves alone."""
        means: Times = self.seconds(entry).reshape(-1, 2).mean(axis=1)
        return means

    def flagged(self, entry: str, flag: str) -> int:
        """Return how many samples of an entry carry a flag."""
        return sum(flag in sample.flags for sample in self.samples if sample.entry == entry)

    def disturbed(self, within: float) -> list[int]:
        """Return the blocks in which some canary lies further than `within` from its median over the session."""
        found: set[int] = set()
        for readings in self.canaries.values():
            values = np.array(readings)
            found |= {int(i) for i in np.flatnonzero(np.abs(values / np.median(values) - 1) > within)}
        return sorted(found)

    def series(self, entry: str) -> dict[str, Any]:
        """Return the raw samples of an entry as plain values, in the order taken."""
        mine = [sample for sample in self.samples if sample.entry == entry]
        return {
            "seconds": [sample.seconds for sample in mine],
            "block": [sample.block for sample in mine],
            "position": [sample.position for sample in mine],
            "flags": {str(i): list(sample.flags) for i, sample in enumerate(mine) if sample.flags},
        }


def run_session(
    entries: Sequence[Entry],
    plan: Plan,
    rng: np.random.Generator,
    canaries: Mapping[str, Measure] | None = None,
    enough: Callable[[Session], bool] | None = None,
    fatal: tuple[type[BaseException], ...] = (OSError,),
    now: Callable[[], float] = time.perf_counter,
) -> Session:
    """Warm up, then take `plan.samples` samples of every entry in mirrored random blocks.

    An entry that raises, or whose check finds its outputs wrong, leaves the session with its reason; the others go on.
    An exception of a `fatal` kind is nobody's program failing and passes through.
    `enough` is asked after the planned blocks; while it says no, blocks are added until `plan.seconds` are spent.
    """
    alive = {entry.name: entry for entry in entries}
    if len(alive) != len(entries):
        raise ValueError("two entries of a session have one name")
    session = Session(canaries={name: [] for name in canaries or {}}, fatal=fatal)
    with undisturbed_by_collection():
        _warm_up(session, alive, plan, rng, now)
        start = now()
        for goal in _looks(plan):
            while alive and session.blocks < goal and (session.blocks < plan.blocks or now() - start < plan.seconds):
                _block(session, alive, rng, canaries or {})
            if not alive or enough is None or enough(session):
                break
            if now() - start >= plan.seconds:
                session.out_of_time = True
                break
        session.sampled_seconds = now() - start
    return session


def _looks(plan: Plan) -> Iterator[int]:
    """Yield the numbers of blocks after which it is asked whether they are enough.

    They grow in proportion: a look after every block would sooner or later meet one that is narrow by chance.
    """
    goal = plan.blocks
    while True:
        yield goal
        goal = max(goal + 1, round(goal * plan.growth))


@contextmanager
def undisturbed_by_collection() -> Iterator[None]:
    """Keep Python's cyclic collector from running inside a sample: it would charge one entry for everyone's garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def mirrored(names: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Return the names in a random order followed by its mirror image."""
    order = [names[i] for i in rng.permutation(len(names))]
    return order + order[::-1]


def is_stable(times: Sequence[float], window: int, within: float) -> bool:
    """Return whether the medians of the last two windows of samples differ by less than `within`."""
    if len(times) < 2 * window:
        return False
    last, before = np.median(times[-window:]), np.median(times[-2 * window : -window])
    return bool(abs(last - before) < within * before)


def _warm_up(
    session: Session, alive: dict[str, Entry], plan: Plan, rng: np.random.Generator, now: Callable[[], float]
) -> None:
    """Sample all entries in turn, checks included, until each has once stopped moving or the limit is reached."""
    seen: dict[str, list[float]] = {name: [] for name in alive}
    settled: set[str] = set()
    start = now()
    while alive:
        for name in [list(alive)[i] for i in rng.permutation(len(alive))]:
            reading = _take(session, alive, name)
            if reading is not None:
                seen[name].append(reading.seconds)
        session.warmup_rounds += 1
        settled |= {name for name in alive if is_stable(seen[name], plan.window, plan.stable_within)}
        moving = [name for name in alive if name not in settled]
        done = not moving or now() - start > plan.warmup_limit
        if done and session.warmup_rounds >= plan.warmup_samples:
            session.unstable = tuple(moving)
            return


def _block(
    session: Session, alive: dict[str, Entry], rng: np.random.Generator, canaries: Mapping[str, Measure]
) -> None:
    for name, measure in canaries.items():
        session.canaries[name].append(measure().seconds)
    for position, name in enumerate(mirrored(list(alive), rng)):
        if name not in alive:  # left in the first half of this block
            continue
        reading = _take(session, alive, name)
        if reading is not None:
            session.samples.append(Sample(name, session.blocks, position, reading.seconds, reading.flags))
    session.blocks += 1


def _take(session: Session, alive: dict[str, Entry], name: str) -> Reading | None:
    """Take one sample of an entry, or remove it from the session with the reason."""
    entry = alive[name]
    try:
        entry.prepare()
        reading = entry.measure()
        wrong = entry.check()
    except session.fatal:
        raise
    except Exception as problem:  # a program under test may raise anything; it is a row that says so
        session.failures[name] = problem.with_traceback(None)  # whose frames would keep its tensors alive
    else:
        if wrong is None:
            return reading
        session.failures[name] = wrong
    del alive[name]
    return None
