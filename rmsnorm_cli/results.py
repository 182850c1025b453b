"""What a check and a command hand back: frozen, made once, read by tables, JSON, JUnit and exit code."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "refused", "skipped", "inconclusive", "error"]
STATUSES: tuple[Status, ...] = ("passed", "failed", "refused", "skipped", "inconclusive", "error")
Execution = Literal["cuda", "interpreter", "cpu"]
Scope = Literal["forward", "dx", "dgamma", "contract", "properties"]


@dataclass(frozen=True)
class CaseResult:
    """One verdict: which implementation, what was checked (scope), how (gate), on which case, and how it came out.

    `worst` is the largest error as a fraction of its tolerance (1.0 is the limit), where the gate has one.
    `detail` says in one or a few lines what was seen; `hint` what the pattern of failures points to.
    """

    impl: str
    execution: Execution
    scope: Scope
    gate: str
    dtype: str
    case: str
    status: Status
    worst: float | None = None
    detail: str = ""
    hint: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the plain values of one line of metrics.jsonl."""
        fields = ("impl", "execution", "scope", "gate", "dtype", "case", "status", "worst", "detail", "hint")
        return {name: getattr(self, name) for name in fields} | dict(self.extra)


@dataclass(frozen=True)
class Table:
    """A table for people: title, column names, rows of text. `console` decides how it looks.

    `prose`: the last column holds sentences, so on a terminal each row becomes a paragraph.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    prose: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a command returns: its status, its counts, what the JSON document adds, and what people read.

    `said` stands in the last line where the counts would not say what was done.
    """

    status: Literal["passed", "failed", "error", "inconclusive", "interrupted"]
    execution: str
    counts: Mapping[str, int]
    summary: Mapping[str, Any] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    results: tuple[CaseResult, ...] = ()
    said: str = ""

    @property
    def exit_code(self) -> int:
        """Return 0 only for a pass; every other status that a command can return is 1."""
        return 0 if self.status == "passed" else 1


def count(results: Iterable[CaseResult]) -> dict[str, int]:
    """Count results by status; every status is present, so that readers need no defaults."""
    found = Counter(result.status for result in results)
    return {status: found[status] for status in STATUSES}


def folded(scopes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of `scopes` for a table: dtypes of which all passed at one gate become one row."""
    rows: list[dict[str, Any]] = []
    joined: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in scopes:
        row = dict(entry)
        alike = row
        if entry["passed"] == entry["cases"]:
            alike = joined.setdefault(tuple(str(entry[name]) for name in ("impl", "execution", "scope", "gate")), row)
        if alike is row:
            rows.append(row)
            continue
        alike["dtype"] += f", {entry['dtype']}"
        alike["cases"] += entry["cases"]
        alike["passed"] += entry["passed"]
        both = [one for one in (alike["worst"], entry["worst"]) if one is not None]
        alike["worst"] = max(both, key=lambda one: one["value"], default=None)
    return rows


def overall(counts: Mapping[str, int]) -> Literal["passed", "failed", "error", "inconclusive"]:
    """Return the worst verdict; a run in which nothing passed is never a pass."""
    if counts["failed"]:
        return "failed"
    if counts["error"]:
        return "error"
    if counts["inconclusive"] or not counts["passed"]:
        return "inconclusive"
    return "passed"


def strict_json(value: Any, *, indent: int | None = 2) -> str:
    """Return JSON without NaN literals: a number that is not finite becomes the string "nan", "inf" or "-inf"."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
