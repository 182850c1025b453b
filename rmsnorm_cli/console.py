"""All printing: tables and progress on a terminal, plain lines when piped, and with --json exactly one document.

People's output goes to stdout, or to stderr when stdout belongs to the JSON document. A reader that closes the pipe
early ends the printing, never the run; what a full disk or a missing reader cost is told at the end (`lost`).
"""

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rmsnorm_cli.results import CaseResult, Outcome, Table, strict_json

ANNOTATIONS = 10  # GitHub shows ten annotations of a kind for one step


class Progress:
    """What a loop tells about itself: `advance` after each unit of work, with a few words beside the bar."""

    def advance(self, n: int = 1, text: str = "") -> None:
        """Count `n` more units as done."""


class _Bar(Progress):
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, n: int = 1, text: str = "") -> None:
        self._bar.update(self._task, advance=n, detail=text)


class Console:
    """Where a command prints.

    `json` reserves stdout for one JSON document; `quiet` keeps the verdict and errors only; `silent` keeps errors only.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False, silent: bool = False) -> None:
        self.json, self.quiet, self.silent = json, quiet or silent, silent
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a narrow locale must not end a run
        self._stream: TextIO | None = sys.stderr if json else sys.stdout
        self._closed: dict[int, Exception] = {}
        self._undelivered = False
        self.terminal = self._stream is not None and self._stream.isatty()

    def _write(self, text: str, stream: TextIO | None) -> bool:
        """Write one piece; a stream that was closed, is full, or whose reader has gone is silent from then on."""
        if stream is None or id(stream) in self._closed:
            return False
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError) as problem:
            self._closed[id(stream)] = problem
            # Python flushes at exit and would complain there: give the descriptor somewhere harmless to go
            with suppress(OSError, ValueError), open(os.devnull, "w") as sink:
                os.dup2(sink.fileno(), stream.fileno())
            return False
        return True

    def lost(self) -> str:
        """Say what did not reach stdout, "" where nothing is missed: a reader who leaves early had what it wanted."""
        problem = self._closed.get(id(sys.stdout))
        number = getattr(problem, "errno", None)
        why = os.strerror(number) if number else "it is closed"
        if self._undelivered:
            return f"the JSON document did not reach stdout: {why}"
        if not self.json and number not in (None, errno.EPIPE):
            return f"not all that was printed reached stdout: {why}"
        return ""

    def note(self, text: str) -> None:
        """Print a line for people; `quiet` drops it."""
        if not self.quiet:
            self._write(text + "\n", self._stream)

    def verdict(self, text: str) -> None:
        """Print a line for people that even `quiet` keeps."""
        if not self.silent:
            self._write(text + "\n", self._stream)

    def warn(self, text: str) -> None:
        """Print a warning on stderr."""
        self._write(f"warning: {text}\n", sys.stderr)

    def error(self, text: str) -> None:
        """Print an error on stderr, and as an annotation under GitHub Actions."""
        self._write("".join(f"error: {line}\n" for line in text.splitlines()), sys.stderr)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            self._annotate("error", "rmsnorm", text)

    def table(self, table: Table) -> None:
        """Print a table: drawn on a terminal, aligned plain columns when piped."""
        if self.quiet:
            return
        if self.terminal:
            self._write(_drawn(table), self._stream)
        else:
            self._write(_plain(table), self._stream)

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Progress]:
        """Show a bar over `total` units on a terminal; when piped, one line when the loop is over."""
        if self.quiet:
            yield Progress()
        elif not (self.terminal and sys.stderr is not None and sys.stderr.isatty()):
            start = time.monotonic()
            yield Progress()
            self.note(f"{title}: {total} done in {time.monotonic() - start:.1f} s")
        else:
            from rich.console import Console as Rich
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
            )
            with RichProgress(*columns, console=Rich(stderr=True), transient=True) as bar:
                yield _Bar(bar, bar.add_task(title, total=total, detail=""))

    def outcome(self, outcome: Outcome) -> None:
        """Print tables, notes, failures and, under GitHub Actions, annotations and a step summary."""
        for table in outcome.tables:
            self.table(table)
        for note in outcome.notes:
            self.note(note)
        if os.environ.get("GITHUB_ACTIONS") == "true" and not self.silent:
            bad = [result for result in outcome.results if result.status in ("failed", "error")]
            for result in bad[:ANNOTATIONS]:
                self._annotate("error", f"{result.impl} {result.scope} ({result.gate})", _one_line(result))
            if path := os.environ.get("GITHUB_STEP_SUMMARY"):
                _append_summary(path, outcome, self)

    def _annotate(self, level: str, title: str, text: str) -> None:
        """Write a workflow command; GitHub reads both streams, so stdout can stay one JSON document."""
        escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        safe = title.replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
        self._write(f"::{level} title={safe}::{escaped}\n", self._stream)

    def document(self, document: Mapping[str, Any]) -> None:
        """Print the one JSON document, if this console speaks JSON."""
        if self.json:
            self._undelivered = not self._write(strict_json(document) + "\n", sys.stdout)


def _one_line(result: CaseResult) -> str:
    hint = f" Points to: {result.hint}" if result.hint else ""
    return f"{result.case}: {result.detail}{hint}"


def _plain(table: Table) -> str:
    """Align columns with two spaces and draw nothing, so that a pipe sees plain text of any width."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([table.title, *lines, *([table.caption] if table.caption else []), "", ""])


def _drawn(table: Table) -> str:
    import io

    from rich.console import Console as Rich
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(table.title), caption=Text(table.caption) if table.caption else None)
    for column in table.columns:
        drawn.add_column(Text(column))
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    size = shutil.get_terminal_size((120, 40)).columns
    buffer = io.StringIO()
    Rich(file=buffer, force_terminal=not os.environ.get("NO_COLOR"), width=max(size, 60)).print(drawn)
    return buffer.getvalue()


def _append_summary(path: str, outcome: Outcome, console: Console) -> None:
    """Append the tables as Markdown to GitHub's step summary; a summary that cannot be written is a warning."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [f"### rmsnorm: {outcome.status}", ""]
    for table in outcome.tables:
        lines += [f"**{table.title}**", "", "| " + " | ".join(map(cell, table.columns)) + " |"]
        lines += ["|" + " --- |" * len(table.columns)]
        lines += ["| " + " | ".join(map(cell, row)) + " |" for row in table.rows]
        lines += ["", cell(table.caption), ""]
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError as problem:
        console.warn(f"the step summary could not be written: {problem.strerror}")
