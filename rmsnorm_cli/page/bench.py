"""A run of `bench` on the page: latency with intervals, share of the measured ceiling, tables, what has no number."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rmsnorm_cli import figures
from rmsnorm_cli.bench import tables
from rmsnorm_cli.bench.rows import STREAMS
from rmsnorm_cli.figures import Drawing, Point
from rmsnorm_cli.page import html
from rmsnorm_cli.page.html import Markup
from rmsnorm_cli.results import Table

Summary = Mapping[str, Any]


def parts(summary: Summary, records: list[dict[str, Any]]) -> Iterator[Markup | Drawing]:
    """Yield what stands on the page, from the run's summary."""
    made = list(tables.tables(summary))
    of_a_cell = {table.title: cell["cell"] for cell in summary["cells"] for table in made if _about(table, cell)}
    yield html.element("h3", "The answer")
    for table in made:
        if table.title not in of_a_cell:
            yield from _titled(table)
    yield html.element("p", tables.controls(summary))
    yield html.element("h3", "How it was measured")
    yield html.bullets(tables.protocol_lines(summary["protocol"], gpu=summary["gpu"]))
    missing = list(_unmeasured(summary))
    if missing:
        yield html.element("h3", "Without a number")
        yield html.element("ul", missing)
    yield html.element("h3", "Latency")
    yield from _latency(summary)
    if summary["gpu"]:
        yield html.element("h3", "Bandwidth")
        yield from _bandwidth(summary)
    yield html.element("h3", "Tables")
    for cell in summary["cells"]:
        mine = [table for table in made if of_a_cell.get(table.title) == cell["cell"]]
        yield html.folded(cell["cell"], [part for table in mine for part in _titled(table)])
    yield html.folded("Remarks on single measurements", [html.bullets(list(tables.remarks(summary)) or ["None."])])
    yield html.element("h3", "What these numbers do not show")
    yield html.bullets(summary["limits"])


def _about(table: Table, cell: Summary) -> bool:
    return f", {cell['cell']}, on" in table.title


def _titled(table: Table) -> Iterator[Markup]:
    yield html.element("h4", table.title)
    yield html.table(table)


def _unmeasured(summary: Summary) -> Iterator[Markup]:
    """Yield implementation, reason and places; reasons that differ in their numbers alone are told once."""
    places: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    said: dict[tuple[str, str, str], list[str]] = {}
    for cell in summary["cells"]:
        for table in cell["tables"]:
            for row in table["rows"]:
                if row["status"] != "passed":
                    kind = (row["impl"], row["status"], re.sub(r"[0-9]+", "0", row["detail"]))
                    said.setdefault(kind, []).append(row["detail"])
                    places.setdefault(kind, {}).setdefault(cell["cell"], []).append(table["perimeter"])
    for kind, cells in places.items():
        (impl, status, _), reasons = kind, list(dict.fromkeys(said[kind]))
        alike = ", and the like" if len(reasons) > 1 else ""
        perimeters = {cell: ", ".join(dict.fromkeys(found)) for cell, found in cells.items()}
        by_perimeter = [
            f"{found}: {', '.join(cell for cell in cells if perimeters[cell] == found)}"
            for found in dict.fromkeys(perimeters.values())
        ]
        word = html.element("span", status, class_=f"status {status}")
        where = html.element("div", "; ".join(by_perimeter), class_="soft")
        yield html.element("li", [html.element("strong", impl), " ", word, f": {reasons[0]}{alike}", where])


def _kinds(summary: Summary) -> list[tuple[str, str, str]]:
    """Return perimeter, measure and cache of every kind of table, in order."""
    found = [(t["perimeter"], t["measure"], t["cache"]) for cell in summary["cells"] for t in cell["tables"]]
    return list(dict.fromkeys(found))


def _names(summary: Summary) -> list[str]:
    """Return all implementations, in the order in which they were asked for."""
    return list(dict.fromkeys(row["impl"] for cell in summary["cells"] for t in cell["tables"] for row in t["rows"]))


def _rows(summary: Summary, kind: tuple[str, str, str]) -> Iterator[tuple[Summary, Summary, Summary]]:
    """Yield cell, table and row of every number of a kind; cells by dtype, then N, then M."""
    for cell in sorted(summary["cells"], key=lambda cell: (cell["N"], cell["M"])):
        for table in cell["tables"]:
            if (table["perimeter"], table["measure"], table["cache"]) == kind:
                yield from ((cell, table, row) for row in table["rows"] if row["status"] == "passed")


def _latency(summary: Summary) -> Iterator[Drawing]:
    """Yield one figure for each perimeter and measure, a panel for each dtype."""
    for kind in _kinds(summary):
        perimeter, measure, cache = kind
        panels: dict[str, list[Point]] = {}
        for cell, _, row in _rows(summary, kind):
            median, low, high, p10, p90 = (row[key] * 1e6 for key in ("median", "low", "high", "p10", "p90"))
            point = Point(_place(cell), row["impl"], median, low, high, (p10, p90))
            panels.setdefault(cell["dtype"], []).append(point)
        if panels and measure != "host":
            what = tables.measure_name({"measure": measure, "cache": cache})
            confidence = f"{summary['protocol']['confidence'] * 100:g} %"
            yield figures.latency(
                f"latency-{perimeter}-{measure}-{cache}",
                f"{perimeter}, {what}, {', '.join(panels)}, on {summary['card']}. Mark: median; thick: {confidence} "
                "interval of the median; thin: 10th to 90th percentile. Shapes in the order of N. Lower is better.",
                f"{perimeter}: {what} ({summary['card']})",
                panels,
                _names(summary),
            )


def _bandwidth(summary: Summary) -> Iterator[Drawing]:
    """Yield one figure for each perimeter: share of the plain stream's speed, shapes in the order of N."""
    for kind in _kinds(summary):
        perimeter, measure, cache = kind
        if measure != "gpu" or cache != "cold":
            continue
        panels: dict[str, list[Point]] = {}
        for cell, table, row in _rows(summary, kind):
            if row["share_of_stream"] is None:
                continue
            ceiling = f"{table['stream']['bytes_per_second'] / 1e12:.2g} TB/s"
            share, low, high = (100 * row["share_of_stream"][key] for key in ("estimate", "low", "high"))
            point = Point(f"{_place(cell)}\n{ceiling}", row["impl"], share, low, high)
            panels.setdefault(cell["dtype"], []).append(point)
        if panels:
            yield figures.shares(
                f"bandwidth-{perimeter}",
                f"{perimeter}, GPU time, L2 {cache}, {', '.join(panels)}, on {summary['card']}: time of a plain stream "
                f"({STREAMS[perimeter]}) of the same bytes over the time measured, shapes in the order of N; under "
                "each shape the rate that the stream itself reached. Higher is better.",
                f"{perimeter}: share of the measured ceiling ({summary['card']})",
                panels,
                _names(summary),
            )


def _place(cell: Summary) -> str:
    return f"{cell['M']} × {cell['N']}"
