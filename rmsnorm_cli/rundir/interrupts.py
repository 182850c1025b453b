"""SIGINT and SIGTERM as exceptions, and stretches of code that one of them must not cut in two."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rmsnorm_cli.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handled(handler: Callable[[int, Any], Any], signals: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[None]:
    """Use `handler` for these signals in the block; without effect outside the main thread, where Python has none.

    A signal that the parent made us ignore (nohup, a background job) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signals}
    changed = [number for number, old in before.items() if old not in (signal.SIG_IGN, None)]
    for number in changed:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])


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
