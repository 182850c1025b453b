"""A machine whose clock is simulated: programs of known true time under drift, steps, spikes and slow wandering."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from rmsnorm_cli.timing import Entry, Reading

Slowness = Callable[[float], float]  # virtual time -> factor on every duration then


class Machine:
    """Virtual time that passes only while something is measured.

    Every sample lasts its true seconds times the machine's slowness at that moment, times lognormal noise; a share of
    the samples are spikes. `slowness` is what all programs suffer alike.
    """

    def __init__(
        self,
        seed: int,
        slowness: Slowness = lambda now: 1.0,
        noise: float = 0.008,
        spikes: float = 0.02,
        calls: int = 20,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.now = 0.0
        self.slowness, self.noise, self.spikes, self.calls = slowness, noise, spikes, calls

    def entry(self, name: str, true_seconds: float) -> Entry:
        """Return an entry whose true time of one call is known."""
        return Entry(name, lambda: Reading(self.run(true_seconds)))

    def run(self, true_seconds: float) -> float:
        """Let one sample pass and return its time of one call."""
        factor = self.slowness(self.now) * float(np.exp(self.rng.normal(0, self.noise)))
        if self.rng.random() < self.spikes:
            factor *= 1 + self.rng.exponential(0.5)
        self.now += true_seconds * factor * self.calls
        return true_seconds * factor


def ramp(total: float, length: float) -> Slowness:
    """Slow down by a share `total` over `length` seconds, in a straight line: a card warming up."""
    return lambda now: 1 + total * min(now / length, 1.0)


def step(size: float, at: float) -> Slowness:
    """Change speed once by a share `size`: a clock change."""
    return lambda now: 1.0 if now < at else 1 + size


def wander(seed: int, spread: float, length: float, memory: float) -> Slowness:
    """Drift about 1 as a first-order autoregression with the given memory in seconds."""
    rng = np.random.default_rng(seed)
    points = 400
    keep = np.exp(-length / points / memory)
    levels = np.empty(points)
    level = rng.normal(0, spread)
    for i in range(points):
        level = keep * level + rng.normal(0, spread * np.sqrt(1 - keep**2))
        levels[i] = level
    grid = np.linspace(0, length, points)
    return lambda now: float(1 + np.interp(now, grid, levels))


@pytest.fixture(scope="session")
def simulated() -> SimpleNamespace:
    """Return the simulated machine and what can be wrong with its clock."""
    return SimpleNamespace(Machine=Machine, ramp=ramp, step=step, wander=wander)
