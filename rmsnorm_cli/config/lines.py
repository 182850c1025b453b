"""Read a TOML file and know on which line each key stands, which no TOML reader tells.

A file is cut into statements by parsing growing prefixes: a line opens a statement, and following lines join it until
the whole parses, so that a value may span lines. Each statement is parsed under the header above it; the keys that
appear are on the statement's first line. The same cut lets the reader go on behind a faulty statement, so that one
stray character does not hide the other problems of a file.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KeyPath = tuple[str, ...]

LARGEST_FILE = 2**18  # bytes; also what keeps /dev/zero from being read for ever
MOST_FAULTS = 10  # syntax faults of one file, after which the rest is not read
DEEPEST_KEY = (
    8  # parts of a key that are told apart; dotted keys of thousands are valid TOML, and ours have four at most
)
MOST_DOTS = 200  # on a line; a reader's time grows with the square of a dotted key's parts
MOST_TRIES = 300  # closing brackets or quotes that one statement may have before its end is no longer looked for


@dataclass(frozen=True)
class Fault:
    """A place that is not valid TOML: the line (counted from 1; 0 for the file as a whole), and what is wrong."""

    line: int
    text: str


@dataclass(frozen=True)
class TomlFile:
    """What a file says: its tables, the line of each key, and the places that are not valid TOML."""

    data: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class _Statement:
    """Lines first..last (from 0) that parse together; `header` for [table]; the key paths that it writes."""

    first: int
    last: int
    header: bool
    keys: tuple[KeyPath, ...]


def read_toml(path: Path) -> TomlFile:
    """Read a TOML file; anything that is wrong with it comes back as a fault and nothing is raised."""
    try:
        if path.is_dir():
            return _unreadable("is a directory, expected a TOML file")
        if path.is_fifo() or path.is_socket():  # opening one waits for somebody who writes
            return _unreadable("is no regular file, expected a TOML file")
        with path.open("rb") as stream:
            raw = stream.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        return _unreadable("does not exist, expected a TOML file")
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the path
        return _unreadable(f"cannot be read ({getattr(problem, 'strerror', None) or problem}), expected a TOML file")
    if len(raw) > LARGEST_FILE:
        return _unreadable(f"is larger than {LARGEST_FILE} bytes, expected a configuration file")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in raw[:4]:
        return _unreadable("is encoded as UTF-16 or UTF-32, expected UTF-8: save it again as UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        byte = raw[problem.start]
        return TomlFile(faults=(Fault(line, f"byte 0x{byte:02x} is not UTF-8, expected a file saved as UTF-8"),))
    return parse(text)


def parse(text: str) -> TomlFile:
    """Parse TOML text, going on behind faulty statements."""
    lines = text.replace("\r\n", "\n").split("\n")
    for number, line in enumerate(lines, 1):
        if line.count(".") > MOST_DOTS and not line.lstrip().startswith("#"):
            return TomlFile(faults=(Fault(number, f"more than {MOST_DOTS} dots, expected keys of a few parts"),))
    faults: list[Fault] = []
    while len(faults) < MOST_FAULTS:
        try:
            data = tomllib.loads("\n".join(lines))
        except (ValueError, RecursionError) as problem:
            lines = _without_fault(lines, problem, faults)
        else:
            return TomlFile(data, _key_lines(lines), tuple(faults))
    return TomlFile(
        faults=(*faults, Fault(faults[-1].line, "too many faults, expected a TOML file; the rest is not read"))
    )


def _unreadable(text: str) -> TomlFile:
    return TomlFile(faults=(Fault(0, text),))


def _key_lines(lines: list[str]) -> dict[KeyPath, int]:
    found: dict[KeyPath, int] = {}
    for statement in _statements(lines)[0]:
        for key in statement.keys:
            found.setdefault(key, statement.first + 1)
    return found


def _statements(lines: list[str]) -> tuple[list[_Statement], int | None]:
    """Cut lines into statements; also the line (from 0) of the first that never becomes whole, or None."""
    found: list[_Statement] = []
    header = ""
    first, tries = 0, 0
    for last, line in enumerate(lines):
        if last > first and (tries > MOST_TRIES or not re.search(r"""[\]}]|\"\"\"|'''""", line)):
            continue  # nothing on this line can end a value that spans lines
        tries += 1
        chunk = "\n".join(lines[first : last + 1])
        is_header = chunk.lstrip(" \t").startswith("[")
        try:
            data = tomllib.loads(chunk if is_header else f"{header}\n{chunk}")
        except (ValueError, RecursionError):
            continue
        if is_header:
            header = chunk
        found.append(_Statement(first, last, is_header, tuple(_paths(data)) if chunk.strip() else ()))
        first, tries = last + 1, 0
    return found, first if first < len(lines) else None


def _paths(data: Mapping[str, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in data.items():
        yield (*above, key)
        inner = value[-1] if isinstance(value, list) and value and isinstance(value[-1], dict) else value
        if isinstance(inner, dict) and len(above) < DEEPEST_KEY:
            yield from _paths(inner, (*above, key))


def _without_fault(lines: list[str], problem: Exception, faults: list[Fault]) -> list[str]:
    """Note the fault that a parser stopped at and return the lines with that statement blanked."""
    message, line = _explain(problem, len(lines))
    statements, broken = _statements(lines)
    if broken is not None:  # a statement that is not TOML by itself
        opener = lines[broken].strip()
        spans = any(mark in opener for mark in ("[", '"""', "'''"))  # what alone lets a value go on on the next line
        if line is None or line == broken or not spans:
            wrong = f"{message}, in: {_short(opener)}, expected key = value with text in quotes"
            faults.append(Fault(broken + 1, f"not valid TOML: {wrong}"))
            return _blank(lines, broken, broken)
        wrong = (
            f"{message} on line {line + 1}, in what begins: {_short(opener)}, expected its closing bracket or quotes"
        )
        faults.append(Fault(broken + 1, f"not valid TOML: {wrong}"))
        return lines[:broken]
    reached = [s for s in statements if s.keys and (line is None or s.first <= line)]
    culprit = reached[-1]  # statements that are right by themselves and contradict one another
    key = culprit.keys[-1]
    earlier = [s.first + 1 for s in reached[:-1] if key in s.keys]
    name = _short(".".join(key))
    what = f"{name}: given twice, first on line {earlier[0]}" if earlier else f"{name}: {message}"
    faults.append(Fault(culprit.first + 1, f"{what}, expected every key and table once"))
    last = culprit.last
    if culprit.header:  # what stands under a refused header must not slide into the table above it
        last = next((s.first - 1 for s in statements if s.header and s.first > culprit.first), len(lines) - 1)
    return _blank(lines, culprit.first, last)


def _explain(problem: Exception, count: int) -> tuple[str, int | None]:
    """Return a parser's message without its position, and the line (from 0) it stopped at, None where unknown."""
    if isinstance(problem, RecursionError):
        return "nested too deeply", None
    if not isinstance(problem, tomllib.TOMLDecodeError):
        return "an integer has too many digits", None
    text = str(problem)
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", text)
    if found is None:
        return text, None
    message = text[: found.start()]
    return message[:1].lower() + message[1:], int(found[1]) - 1 if found[1] else count - 1


def _blank(lines: list[str], first: int, last: int) -> list[str]:
    return [*lines[:first], *[""] * (last - first + 1), *lines[last + 1 :]]


def printable(text: str) -> str:
    """Return text as it is where a terminal and a log can show it on one line, else with escapes."""
    return text if text.isprintable() else text.encode("unicode_escape", "surrogatepass").decode("ascii")


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."
