"""What people read of a bench: one table for each cell and perimeter, one for memory, one over all cells, and notes.

Every table names card, driver, versions, shape, dtype, perimeter and the state of the cache. All numbers come from the
summary that the JSON document holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rmsnorm_cli.bench.workload import STREAMS
from rmsnorm_cli.results import Table
from rmsnorm_cli.timing import Interval, duration

Row = Mapping[str, Any]

LIMITS = (
    "Another shape, dtype, card, driver or version may order these programs differently.",
    "Perimeters are measured, each by itself; differences and ratios between perimeters mean nothing.",
    "GPU time leaves out the host; a loop of small calls pays the whole-call time, a captured graph the GPU time.",
    "A network around the operator shares caches, clocks and the host with it; its step is not the sum of such times.",
    "Clocks were as found: nothing was locked, and a shared card may have had neighbours.",
    "A verified output says nothing of other inputs; that is what `rmsnorm verify` is for.",
)
WALL_LIMITS = (
    "These are wall clocks of PyTorch's code on this CPU: no evidence about any GPU, or about any Triton kernel.",
    *LIMITS[:2],
    LIMITS[5],
)


def tables(summary: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of a summary: cells by perimeter, memory, then what holds over all cells."""
    shown = summary["baselines"][0] if summary["baselines"] else None
    for cell in summary["cells"]:
        for perimeter, group in groupby(cell["tables"], key=lambda table: table["perimeter"]):
            yield _cell(summary, cell, perimeter, list(group), shown)
        if summary["gpu"] and cell["memory"]:
            yield _memory(summary, cell)
    if summary["overall"] and len(summary["cells"]) > 1:
        yield _overall(summary)
    if summary["compared"]:
        yield _compared(summary)


def notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield what stands beside the tables: controls, noise, odd samples, refusals, and the limits of it all."""
    held = summary["controls"]
    yield (
        f"A/A controls: {held['held']} of {held['tables']} within {summary['protocol']['band'] * 100:g} %, "
        f"{held['hold_1']} of {held['tables']} intervals contain 1"
    )
    for cell in summary["cells"]:
        for table in cell["tables"]:
            where = f"{cell['cell']}, {table['perimeter']}, {_measure(table)}"
            yield from (f"{where}: {text}" for text in _remarks(table))
    yield from summary["slower"]
    yield "What these numbers do not show:"
    yield from (f"  - {line}" for line in summary["limits"])


def _remarks(table: Mapping[str, Any]) -> Iterator[str]:
    control = table["control"]
    if control is not None and not control["held"]:
        yield control["text"]
    if table["warmup"]["unstable"]:
        yield f"still moving when the warm-up ended: {', '.join(table['warmup']['unstable'])}"
    if table["disturbed_blocks"]:
        yield f"the canary was off in {len(table['disturbed_blocks'])} of {table['blocks']} blocks (kept, flagged)"
    for row in table["rows"]:
        if row["status"] != "passed":
            yield f"{row['impl']} {row['status']}: {row['detail']}"
        elif row["starved"]:
            yield f"{row['impl']}: {row['starved']} of {row['samples']} samples waited for the host"
        if "noisy" in row["flags"]:
            yield f"{row['impl']}: {row['outliers']['severe']} of {row['samples']} samples far out (kept)"


def _cell(
    summary: Mapping[str, Any], cell: Mapping[str, Any], perimeter: str, group: Sequence[Row], shown: str | None
) -> Table:
    order = {"gpu": 0, "calls": 1, "wall": 1, "host": 2}
    group = sorted(group, key=lambda table: order[table["measure"]])
    columns = ["implementation"]
    for table in group:
        columns.append(_measure(table) + " (p10–p90)")
        if table["measure"] == "gpu":
            columns.append(f"of {STREAMS[perimeter]}")
        if table["measure"] != "host" and shown is not None:
            columns.append(f"against {shown}")
    names = list(dict.fromkeys(row["impl"] for table in group for row in table["rows"]))
    rows = []
    for name in names:
        cells = [name]
        for table in group:
            row = next((row for row in table["rows"] if row["impl"] == name), None)
            cells += _numbers(table, row, shown)
        rows.append(tuple(cells))
    streams = [f"{_measure(table)} {duration(_middle(table['stream']))}" for table in group if table["stream"]]
    bytes_ = f"{cell['bytes'][perimeter]:,} bytes at least"
    ceiling = f"; plain {STREAMS[perimeter]}: {', '.join(streams)}" if streams else ""
    return Table(
        f"{perimeter}, {cell['cell']}, on {summary['card']}",
        tuple(columns),
        tuple(rows),
        f"{_environment(summary)}; {bytes_}{ceiling}",
    )


def _numbers(table: Mapping[str, Any], row: Row | None, shown: str | None) -> list[str]:
    """Return a row's cells under one measure: time, share of the stream, verdict, as far as the measure has them."""
    width = 1 + (table["measure"] == "gpu") + (table["measure"] != "host" and shown is not None)
    if row is None:
        return [""] * width
    if row["status"] != "passed":
        return [f"{row['status']}: {row['detail'][:60]}", *[""] * (width - 1)]
    cells = [f"{duration(_middle(row))} ({_ends(row)})"]
    if table["measure"] == "gpu":
        share = row["share_of_stream"]
        cells.append("" if share is None else f"{share['estimate'] * 100:.0f} %")
    if table["measure"] != "host" and shown is not None:
        cells.append(row["against"][shown]["text"] if shown in row["against"] else "–")
    return cells


def _memory(summary: Mapping[str, Any], cell: Mapping[str, Any]) -> Table:
    perimeters = list(cell["bytes"])
    rows = []
    for name, found in cell["memory"].items():
        peaks = [f"{found[perimeter]['peak_bytes']:,}" if perimeter in found else "" for perimeter in perimeters]
        saved = next((entry for entry in found.values() if "saved_bytes" in entry), None)
        kept = "" if saved is None else f"{saved['saved_bytes']:,} ({saved['saved_bytes_beyond_inputs']:,})"
        rows.append((name, *peaks, kept))
    columns = ("implementation", *(f"peak of {name}" for name in perimeters), "saved for backward (beyond x, gamma)")
    return Table(f"memory in bytes, {cell['cell']}, on {summary['card']}", columns, tuple(rows), _environment(summary))


def _overall(summary: Mapping[str, Any]) -> Table:
    words = ("faster", "equal", "slower", "inconclusive", "no number")
    rows = [
        (
            entry["impl"],
            entry["baseline"],
            entry["perimeter"],
            _measure(entry),
            "" if entry["speedup"] is None else f"{entry['speedup']:.2f}×",
            "" if entry["worst"] is None else f"{entry['worst']['speedup']:.2f}× at {entry['worst']['cell']}",
            *(str(entry[word]) for word in words),
        )
        for entry in summary["overall"]
    ]
    columns = ("implementation", "against", "perimeter", "time", "geometric mean", "worst cell", *words)
    return Table(f"over all cells, on {summary['card']}", columns, tuple(rows), _environment(summary))


def _compared(summary: Mapping[str, Any]) -> Table:
    found = summary["compared"]
    rows = [
        (row["cell"], row["perimeter"], _measure(row), row["impl"], row["text"])
        for row in found["rows"]
        if row["impl"] != "stream"
    ]
    unlike = f"; these runs differ: {'; '.join(found['unlike'])}" if found["unlike"] else ""
    return Table(
        f"now against {found['run']}, on {summary['card']}",
        ("cell", "perimeter", "time", "implementation", "now against then"),
        tuple(rows),
        f"two runs, not interleaved: what differed between them is in these ratios{unlike}",
    )


def _measure(table: Mapping[str, Any]) -> str:
    return {
        "gpu": f"GPU time, L2 {table['cache']}",
        "calls": "whole call",
        "host": "host time of a call",
        "wall": "wall clock, CPU",
    }[table["measure"]]


def _environment(summary: Mapping[str, Any]) -> str:
    versions = summary["versions"]
    driver = f"driver {summary['driver']}, " if summary["driver"] else ""
    return f"{summary['card']}, {driver}torch {versions['torch']}, triton {versions['triton']}; {summary['clock']}"


def _middle(row: Row) -> Interval:
    return Interval(row["median"], row["low"], row["high"], 0)


def _ends(row: Row) -> str:
    scale = 1e3 if row["median"] >= 1e-2 else 1e6
    return f"{_short(row['p10'] * scale)}–{_short(row['p90'] * scale)}"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def protocol_lines(protocol: Mapping[str, Any]) -> list[str]:
    """Say in sentences how the times were taken, from the protocol that the summary holds."""
    return [
        f"{protocol['samples']} samples at least of {protocol['calls']} whole calls, {protocol['warmup']} warm-up "
        "calls and more until stable; all implementations in one run, in random mirrored order",
        f"GPU time: CUDA graph replay; L2 cold by {protocol['rotation']} times the cache in rotating buffers",
        f"{protocol['confidence'] * 100:g} % intervals by a block-paired bootstrap ({protocol['bootstrap']} "
        f"resamples); equal means within {protocol['band'] * 100:g} %; invalid means below "
        f"{(1 - protocol['floor_margin']) * 100:g} % of the plain stream's time from a cold cache",
    ]
