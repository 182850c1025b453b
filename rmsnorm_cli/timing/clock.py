"""What one reading of a clock is, what can be entered into a timed session, and the wall clock of the CPU.

Nothing here knows what is timed. A clock that runs calls and returns a Reading is injected everywhere, so the
protocol runs unchanged on CUDA events, on the CPU's wall clock and on a simulated clock.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

Call = Callable[[], Any]

STARVED = "starved"  # the GPU reached the timed work before the host had queued all of it


@dataclass(frozen=True)
class Reading:
    """One sample: seconds of one call (the sample's length over its calls), and what was odd about it."""

    seconds: float
    flags: tuple[str, ...] = ()


class Clock(Protocol):
    """What times `count` whole calls as a user's loop pays them."""

    label: str

    def calls(self, call: Call, count: int) -> Reading:
        """Return the time of one of `count` calls made one after the other."""


def nothing() -> None:
    """Stand in where an entry needs no preparation."""


def unchecked() -> str | None:
    """Stand in where an entry has no output to check: nothing is wrong."""
    return None


@dataclass(frozen=True)
class Entry:
    """One contestant of a session.

    `measure` takes one sample. `prepare` runs before each sample and `check` after it, both outside the timed
    interval; `check` says what is wrong with the outputs that the timed calls left, or None.
    """

    name: str
    measure: Callable[[], Reading]
    prepare: Callable[[], None] = field(default=nothing)
    check: Callable[[], str | None] = field(default=unchecked)


class WallClock:
    """The CPU's monotonic clock around calls that are finished when they return; `now` is injected in tests."""

    label = "wall clock, CPU"

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def calls(self, call: Call, count: int) -> Reading:
        """Return the wall time of one of `count` calls, in seconds."""
        start = self._now()
        for _ in range(count):
            call()
        return Reading((self._now() - start) / count)
