"""Where the command `rmsnorm` and `python -m rmsnorm_cli` start: signals are taken before anything is imported.

The imports of a command line take tenths of a second, in which Python would answer Ctrl-C with a traceback.
"""

import os
import signal
import sys

STOPPED = (130, 143)

early: list[int] = []


def note(number: int, frame: object) -> None:
    """Keep a signal for the command line, which answers it in its own words; a second one ends the process at once."""
    early.append(number)
    if len(early) > 1:
        os._exit(128 + early[0])


def main() -> None:
    """Take SIGINT and SIGTERM, unless the parent made us ignore them; then import and run the command line."""
    taken = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, note)
    try:
        from rmsnorm_cli import cli

        cli.main(early=early)
    except SystemExit as end:
        if end.code in STOPPED:
            leave(end.code)
        raise
    finally:
        for number in taken:  # the exit code stands; while Python takes itself down a signal would replace it
            signal.signal(number, signal.SIG_IGN)


def leave(code: int) -> None:
    """End a process that was asked to stop, once all is recorded and said, without what others do when Python ends.

    torch.compile waits there for the processes that compile for it: 300 seconds at most, and 18 were seen.
    """
    from contextlib import suppress

    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, nobody reads it, closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
