"""All printing: tables and progress on a terminal, plain lines when piped, and with --json exactly one document.

People's output goes to stdout, or to stderr when stdout belongs to the JSON document. A reader that closes the pipe
early ends the printing, never the run; what a full disk or a missing reader cost is told at the end (`lost`).
"""

import ctypes
import errno
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from itertools import zip_longest
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
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # neither a narrow locale nor a stray byte ends a run
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

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Keep stdout for the document: whatever prints in the block, a stranger's compiled code too, is on stderr."""
        if not self.json or sys.stdout is None or sys.stderr is None:
            yield
            return
        with ExitStack() as stack:
            with suppress(OSError, ValueError):  # a stream without a descriptor
                number, kept = sys.stdout.fileno(), os.dup(sys.stdout.fileno())
                stack.callback(_returned, number, kept)
                os.dup2(sys.stderr.fileno(), number)
            stack.enter_context(redirect_stdout(sys.stderr))
            yield

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
        """Print a line for people, on a terminal wrapped and two further in from the second on; `quiet` drops it."""
        if not self.quiet:
            hanging = " " * (len(text) - len(text.lstrip(" ")) + 2)
            self._write((_wrapped(text, hanging) if self.terminal else text) + "\n", self._stream)

    def ask(self, text: str) -> str:
        """Print a question and return the line that is typed, "" at the end of the input."""
        self.note(text)
        self._write("> ", self._stream)
        line = ""
        try:
            line = sys.stdin.readline()
            return line
        finally:
            if not line.endswith("\n"):  # Ctrl-C and Ctrl-D leave the cursor behind the question
                self._write("\n", self._stream)

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
        form = (_paragraphs if table.prose else _drawn) if self.terminal else _plain
        self._write(form(table), self._stream)

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


def _returned(number: int, kept: int) -> None:
    """Give a descriptor back what it was, once all that C code has buffered for it is out."""
    ctypes.CDLL(None).fflush(None)
    os.dup2(kept, number)
    os.close(kept)


def _one_line(result: CaseResult) -> str:
    hint = f" Points to: {result.hint}" if result.hint else ""
    return f"{result.case}: {result.detail}{hint}"


def _plain(table: Table) -> str:
    """Align columns with two spaces and draw nothing, so that a pipe sees plain text of any width."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([table.title, *lines, *([table.caption] if table.caption else []), "", ""])


def _wrapped(text: str, hanging: str, initial: str = "") -> str:
    """Break lines between words, never within one: a number or a path stays whole. All but the first are indented."""
    lines = textwrap.TextWrapper(
        _width(), initial, hanging, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(lines.fill(line) for line in text.split("\n"))


def _width() -> int:
    return max(shutil.get_terminal_size((120, 40)).columns, 60)


def _paragraphs(table: Table) -> str:
    """Set each row as a paragraph: what it is about, and under it, indented, its last cell."""
    lines = [_bold(table.title)]
    for *head, last in table.rows:
        named = head if table.prose else [f"{name} {cell}" for name, cell in zip(table.columns, head, strict=False)]
        about = "  ".join(text for text, cell in zip(named, head, strict=True) if cell)
        lines += [_bold(_wrapped(about, "  ")), _wrapped(last, "    ", "    ")]
    return _ended(lines, table)


def _drawn(table: Table) -> str:
    """Draw a grid where the terminal is wide enough for it, else narrow columns or, in the end, paragraphs."""
    columns = list(zip(table.columns, *table.rows, strict=True))
    whole = [max(map(len, cells)) for cells in columns]
    if sum(whole) + 3 * len(whole) + 1 <= _width():
        return _grid(table)
    widths = [max(len(word) for cell in cells for word in cell.split() or [""]) for cells in columns[:-1]]
    room = _width() - sum(widths) - len(widths) + 1
    if room < 0:
        return _paragraphs(table)
    for at, width in enumerate(widths):
        widths[at] += min(whole[at] - width, room)
        room -= widths[at] - width
    return _columns(table, widths)


def _columns(table: Table, widths: list[int]) -> str:
    """Set columns of these widths, cells broken between words; the last column's cell stands under its row."""

    def row(cells: tuple[str, ...]) -> list[str]:
        broken = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(cells, widths, strict=True)]
        return [
            " ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
            for parts in zip_longest(*broken, fillvalue="")
        ]

    lines = [_bold(line) for line in (table.title, *row(table.columns[:-1]))]
    for *cells, last in table.rows:
        lines += row(tuple(cells))
        lines += [_wrapped(f"{table.columns[-1]}: {last}", "    ", "  ")] if last else []
    return _ended(lines, table)


def _ended(lines: list[str], table: Table) -> str:
    return "\n".join([*lines, *([_wrapped(table.caption, "  ")] if table.caption else []), "", ""])


def _bold(text: str) -> str:
    return text if os.environ.get("NO_COLOR") else f"\x1b[1m{text}\x1b[0m"


def _grid(table: Table) -> str:
    import io

    from rich.console import Console as Rich
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(table.title), caption=Text(table.caption) if table.caption else None)
    for column in table.columns:
        drawn.add_column(Text(column))
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    buffer = io.StringIO()
    Rich(file=buffer, force_terminal=not os.environ.get("NO_COLOR"), width=_width()).print(drawn)
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
