"""What the cells of a run share, and a cell while it is measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmsnorm_cli.bench.programs import Answers, Program
from rmsnorm_cli.bench.rows import Rules
from rmsnorm_cli.bench.workload import Buffers, Cell
from rmsnorm_cli.environment import Device
from rmsnorm_cli.timing import Plan, WallClock
from rmsnorm_cli.timing.cuda import CudaClock

Standing = dict[str, str]  # status and detail of an implementation that has no number


@dataclass(frozen=True)
class Lab:
    """What all cells of a run share: the clock, the plan, the declared rules, the yardsticks, where records go."""

    clock: CudaClock | WallClock
    device: Device
    plan: Plan
    rules: Rules
    perimeters: Sequence[str]
    caches: Sequence[str]
    calls: int
    baselines: Sequence[str]
    eps: float
    seed: int
    record: Callable[[Mapping[str, Any]], None]
    advance: Callable[[str], None] = lambda text: None

    def sets(self, cell: Cell) -> int:
        """Return how many sets of buffers a cell needs."""
        if isinstance(self.clock, CudaClock) and "cold" in self.caches:
            return self.clock.sets_in_rotation(cell.set_bytes)
        return 1

    def caches_of(self, cell: Cell) -> list[str]:
        """Return the cache states in which GPU time means something: warm only where a call's data fits the cache."""
        if not isinstance(self.clock, CudaClock):
            return []
        fits = self.clock.fits_l2(cell.set_bytes)
        return [cache for cache in self.caches if cache == "cold" or fits]


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

    def rng(self, *place: str) -> np.random.Generator:
        """Return the generator of one place in the run, the same in every process."""
        return np.random.default_rng([self.lab.seed, *"/".join((self.cell.name, *place)).encode()])
