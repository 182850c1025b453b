"""What the cells of a run share, and a cell while it is measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmsnorm_cli.bench.answers import Answers
from rmsnorm_cli.bench.programs import Program
from rmsnorm_cli.bench.rows import Rules
from rmsnorm_cli.bench.workload import Buffers, Cell
from rmsnorm_cli.environment import Device
from rmsnorm_cli.timing import Plan, WallClock
from rmsnorm_cli.timing.cuda import CudaClock

LOOP = "loop"  # the cache as a loop over the same buffers leaves it
Standing = dict[str, str]  # status and detail of an implementation that has no number


@dataclass(frozen=True)
class Lab:
    """What all cells of a run share: the clock, the plan, the declared rules, the yardsticks, where records go."""

    clock: CudaClock | WallClock
    device: Device
    plan: Plan
    rules: Rules
    perimeters: Sequence[str]
    measures: Sequence[str]
    caches: Sequence[str]
    calls: int
    baselines: Sequence[str]
    eps: float
    seed: int
    compile_seconds: float
    record: Callable[[Mapping[str, Any]], None]
    advance: Callable[[int, str], None] = lambda done, text: None

    def sets(self, cell: Cell) -> int:
        """Return how many sets of buffers a cell needs."""
        if isinstance(self.clock, CudaClock) and "cold" in self.caches:
            return self.clock.sets_in_rotation(cell.set_bytes)
        return 1

    def kinds(self, cell: Cell) -> list[tuple[str, str]]:
        """Return measure and cache of each table that a perimeter of a cell has.

        GPU time from a warm cache means something only where a call's data fits the cache.
        """
        if not isinstance(self.clock, CudaClock):
            return [("wall", LOOP)] * ("whole" in self.measures)
        fits = self.clock.fits_l2(cell.set_bytes)
        gpu = [("gpu", cache) for cache in self.caches if cache == "cold" or fits]
        found = [("calls", LOOP)] * ("whole" in self.measures)
        found += gpu * ("gpu" in self.measures)
        return found + [("host", LOOP)] * ("host" in self.measures)


@dataclass
class Bench:
    """A cell while it is measured: its buffers, its programs, and the standing of those that have none."""

    lab: Lab
    cell: Cell
    buffers: Buffers
    programs: list[Program] = field(default_factory=list)
    refused: dict[str, Standing] = field(default_factory=dict)
    answers: dict[str, Answers] = field(default_factory=dict)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    first_calls: dict[str, float] = field(default_factory=dict)  # seconds of an implementation's first calls

    def rng(self, *place: str) -> np.random.Generator:
        """Return the generator of one place in the run, the same in every process."""
        return np.random.default_rng([self.lab.seed, *"/".join((self.cell.name, *place)).encode()])
