"""SIGINT and SIGTERM as exceptions, and stretches of code that one of them must not cut in two.

Signals that come within a moment of one that is being answered are one request with it: a terminal, a shell and a
launcher may each send the same wish, and the second must not cut off the answer to the first.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rmsnorm_cli.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MOMENT = 0.2  # seconds; a person's second Ctrl-C comes later


class _Answered:
    """When this process last answered a signal, and how many blocks answer them now."""

    latest = -math.inf
    depth = 0


@contextmanager
def handled(handler: Callable[[int, Any], Any], signals: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[None]:
    """Use `handler` for these signals in the block; without effect outside the main thread, where Python has none.

    A signal that the parent made us ignore (nohup, a background job) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def answer(number: int, frame: object) -> None:
        now = time.monotonic()
        if now - _Answered.latest >= MOMENT:
            _Answered.latest = now
            handler(number, frame)

    before = {number: signal.getsignal(number) for number in signals}
    changed = [number for number, old in before.items() if old not in (signal.SIG_IGN, None)]
    _Answered.depth += 1
    for number in changed:
        signal.signal(number, answer)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])
        _Answered.depth -= 1
        if _Answered.depth == 0:
            _Answered.latest = -math.inf


def ignored() -> AbstractContextManager[None]:
    """Let no signal end the block: for a few milliseconds, in which a record is written."""
    return handled(lambda number, frame: None)


@contextmanager
def raised() -> Iterator[None]:
    """Turn SIGTERM, which would end Python without any `finally`, into Interrupted; an own handler keeps its place."""

    def stop(number: int, frame: object) -> None:
        raise Interrupted(number)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    with handled(stop, (signal.SIGTERM,)):
        yield


@contextmanager
def deferred() -> Iterator[list[int]]:
    """Keep a first signal waiting until the block ends, then raise Interrupted for it; a second one does so at once.

    Yields the list of signals that have come, so that a loop can leave at its next whole step.
    """
    waiting: list[int] = []

    def note(number: int, frame: object) -> None:
        waiting.append(number)
        if len(waiting) > 1:
            raise Interrupted(waiting[0])

    with handled(note):
        yield waiting
    if waiting:
        raise Interrupted(waiting[0])
