"""A limit on how long Python code may take, for programs that compile themselves at their first call."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN = 1.0  # seconds until it is asked once more of code that swallowed the first asking


class TooSlow(BaseException):
    """The limit was reached. Not an Exception: a compiler or a tuner that catches every one of them would go on."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block once `seconds` have passed; without effect outside the main thread.

    It comes between two steps of Python: a single call into a compiler ends first, and a kernel that never ends is
    not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
