"""Where the command `rmsnorm` and `python -m rmsnorm_cli` start: signals are taken before anything is imported.

The imports of a command line take tenths of a second, in which Python would answer Ctrl-C with a traceback.
"""

import os
import signal

early: list[int] = []


def note(number: int, frame: object) -> None:
    """Keep a signal for the command line, which answers it in its own words; a second one ends the process at once."""
    early.append(number)
    if len(early) > 1:
        os._exit(128 + early[0])


def main() -> None:
    """Take SIGINT and SIGTERM, unless the parent made us ignore them; then import and run the command line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, note)
    from rmsnorm_cli import cli

    cli.main(early=early)


if __name__ == "__main__":
    main()
