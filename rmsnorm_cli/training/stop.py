"""SIGINT and SIGTERM while training: the first lets the step in hand end, the second does not."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rmsnorm_cli.errors import Interrupted
from rmsnorm_cli.rundir import interrupts

ECHO = 3.0  # seconds in which torchrun repeats to its processes a signal that the terminal has already sent them


class Stop:
    """The signal that asked for an end, 0 while there was none."""

    def __init__(self) -> None:
        self.signal = 0
        self._since = 0.0

    def note(self, number: int, frame: object) -> None:
        """Take a signal: remember the first, raise Interrupted at a second."""
        if self.signal == 0:
            self.signal, self._since = number, time.monotonic()
            return
        if "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._since < ECHO:
            return
        raise Interrupted(number, "stopped at once at a second signal; the newest checkpoint stands")


@contextmanager
def listening() -> Iterator[Stop]:
    """Collect signals in the block instead of being ended by them."""
    stop = Stop()
    with interrupts.handled(stop.note):
        yield stop


def name(number: int) -> str:
    """Return a signal's name."""
    return signal.Signals(number).name
