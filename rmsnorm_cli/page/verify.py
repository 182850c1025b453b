"""A run of `verify` on the page: worst error over tolerance by N and dtype, verdicts by gate, what failed."""

from collections.abc import Iterator, Mapping
from typing import Any

from rmsnorm_cli import figures
from rmsnorm_cli.figures import Drawing
from rmsnorm_cli.page import html
from rmsnorm_cli.page.html import Markup
from rmsnorm_cli.results import STATUSES, Table, folded

GATE = "declared tolerance"
SHOWN = 20  # failures on the page; all of them are in metrics.jsonl
LIMITS = (
    "A verdict holds for the cases asked: these shapes, dtypes, layouts and values, on this device.",
    "Results of the interpreter are evidence about a kernel's arithmetic and addresses; they say nothing about the "
    "GPU's own code, races or speed.",
    "The declared tolerance is a contract, not a detector: what it lets pass, the sharper gates beside it look for.",
)


def parts(summary: Mapping[str, Any], records: list[dict[str, Any]]) -> Iterator[Markup | Drawing]:
    """Yield what stands on the page, from the run's summary and its records, one a case."""
    yield html.element("h3", "Error against tolerance")
    yield from _errors(records, summary["device"])
    yield html.element("h3", "Verdicts")
    yield html.table(_verdicts(summary["scopes"]))
    bad = [record for record in records if record.get("status") in ("failed", "error", "inconclusive", "refused")]
    if bad:
        yield html.element("h3", "What did not pass")
        yield html.table(_failures(bad))
    for impl, said in summary["diagnoses"].items():
        if said:
            yield html.element("p", f"The pattern of {impl}'s failures: {said}")
    yield html.element("p", f"Tolerances: {summary['tolerances']}, sha256 {summary['tolerances_sha256']}.")
    yield html.element("h3", "What these results do not show")
    yield html.bullets(LIMITS)


def _errors(records: list[dict[str, Any]], device: str) -> Iterator[Drawing]:
    """Yield one figure for each implementation: the worst case of each N, whatever its rows and values."""
    judged = [record for record in records if record.get("gate") == GATE and record.get("N") is not None]
    for impl, execution in dict.fromkeys((record["impl"], record["execution"]) for record in judged):
        panels: dict[str, dict[str, dict[int, tuple[float, bool]]]] = {}
        for record in judged:
            if (record["impl"], record["execution"]) != (impl, execution) or not _number(record["worst"]):
                continue
            line = panels.setdefault(record["scope"], {}).setdefault(record["dtype"], {})
            worst, passed = line.get(record["N"], (0.0, True))
            line[record["N"]] = (max(worst, record["worst"]), passed and record["status"] == "passed")
        if panels:
            dtypes = ", ".join(dict.fromkeys(dtype for lines in panels.values() for dtype in lines))
            yield figures.errors(
                f"error-{'-'.join(''.join(c if c.isalnum() else ' ' for c in impl).split())}",
                f"{impl} on {execution} ({device}), {dtypes}: the largest error of all cases of a width, as a share of "
                "the declared tolerance; a cross marks a width with a failed case. Output and gradients apart.",
                f"{impl}: worst error / tolerance\n{execution}, {device}",
                panels,
            )


def _number(value: Any) -> bool:
    return isinstance(value, (int, float))  # what is not finite stands as text in the records


def _verdicts(scopes: list[dict[str, Any]]) -> Table:
    columns = ("implementation", "scope", "gate", "dtype", "verdicts", "worst error / tolerance")
    rows = []
    for entry in folded(scopes):
        worst = entry["worst"] or {"value": None, "case": ""}
        value = f"{worst['value']:.2g}  {worst['case']}" if _number(worst["value"]) else str(worst["case"])
        counts = ", ".join(f"{entry[status]} {status}" for status in STATUSES if entry[status])
        name = f"{entry['impl']} ({entry['execution']})"
        rows.append((name, entry["scope"], entry["gate"], entry["dtype"], counts, value))
    return Table("verdicts", columns, tuple(rows))


def _failures(bad: list[dict[str, Any]]) -> Table:
    columns = ("implementation", "status", "scope", "gate", "case", "seen", "points to")
    rows = [
        (r["impl"], r["status"], r["scope"], r["gate"], r["case"], r["detail"], r.get("hint") or "")
        for r in bad[:SHOWN]
    ]
    more = f"The first {len(rows)} of {len(bad)}; all are in metrics.jsonl." if len(bad) > SHOWN else ""
    return Table("what did not pass", columns, tuple(rows), more)
