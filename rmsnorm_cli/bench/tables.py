"""What people read of a bench: one table for each cell and perimeter, one for memory, one over all cells, and notes.

Every table names card, driver, versions, shape, dtype, perimeter and the state of the cache. All numbers come from the
summary that the JSON document holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rmsnorm_cli.bench.rows import STREAMS
from rmsnorm_cli.results import Table
from rmsnorm_cli.timing import Interval, duration, resolved

Row = Mapping[str, Any]

ORDER = {"gpu": 0, "calls": 1, "wall": 1, "host": 2}  # of the measures, from the left
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
    for perimeter in dict.fromkeys(table["perimeter"] for cell in summary["cells"] for table in cell["tables"]):
        yield from _shares(summary, perimeter)
    if shown is not None and len(summary["cells"]) > 1:
        for perimeter in dict.fromkeys(entry["perimeter"] for entry in summary["overall"]):
            yield _overall(summary, perimeter, shown)
    if summary["compared"]:
        yield _compared(summary)


def notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield what stands beside the tables: controls, noise, odd samples, refusals, and the limits of it all."""
    yield controls(summary)
    first = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in summary["first_calls"].items())
    yield f"first calls over all cells, compiling included: {first or 'none'}"
    yield from remarks(summary)
    yield "What these numbers do not show:"
    yield from (f"  - {line}" for line in summary["limits"])


def controls(summary: Mapping[str, Any]) -> str:
    """Say how the A/A controls of a run came out."""
    held = summary["controls"]
    coarse = held["tables"] - held["held"] - held["biased"]
    more = f", {coarse} coarser (the coarsest resolves {resolved(held['coarsest'])})" if coarse else ""
    more += f", {held['biased']} biased" if held["biased"] else ""
    return (
        f"A/A controls: {held['held']} of {held['tables']} within {summary['protocol']['band'] * 100:g} %{more}; "
        f"{held['hold_1']} of {held['tables']} intervals contain 1"
    )


def remarks(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was odd about single measurements, and where an implementation is slower than it may be."""
    for cell in summary["cells"]:
        for table in cell["tables"]:
            where = f"{cell['cell']}, {table['perimeter']}, {measure_name(table)}"
            yield from (f"{where}: {text}" for text in _remarks(table))
    yield from summary["slower"]


def _remarks(table: Mapping[str, Any]) -> Iterator[str]:
    control = table["control"]
    spent = f", after {table['seconds']:.1f} s and {table['blocks']} blocks" if table["out_of_time"] else ""
    if table["unsaid"] is not None:
        yield f"inconclusive, nothing could be said: {table['unsaid']}{spent}"
    elif control is not None and not control["held"]:
        yield control["text"] + spent
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
    group = sorted(group, key=lambda table: ORDER[table["measure"]])
    columns = ["implementation"]
    for table in group:
        columns.append(measure_name(table) + " (p10–p90)")
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
    streams = [f"{measure_name(table)} {duration(_middle(table['stream']))}" for table in group if table["stream"]]
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
    cells = [duration(_middle(row), (row["p10"], row["p90"]))]
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


def _shares(summary: Mapping[str, Any], perimeter: str) -> Iterator[Table]:
    """Yield GPU time from a cold cache over all cells: the stream's time, and what share of its speed each one reaches.

    A run of one cell has them in that cell's table.
    """
    rows: list[tuple[str, ...]] = []
    names: list[str] = []
    for cell in summary["cells"] if len(summary["cells"]) > 1 else ():
        for table in cell["tables"]:
            if (table["perimeter"], table["measure"], table["cache"]) == (perimeter, "gpu", "cold"):
                names = [row["impl"] for row in table["rows"]]
                stream = table["stream"]
                time = "" if stream is None else duration(_middle(stream))
                rows.append((cell["cell"], time, *(_share(row) for row in table["rows"])))
    if rows:
        kind = STREAMS[perimeter]
        title = f"{perimeter}: GPU time, L2 cold, as a share of the speed of a plain {kind}, on {summary['card']}"
        caption = f"{_environment(summary)}; time of the {kind} over the time measured, of the same bytes and run"
        yield Table(title, ("cell", f"plain {kind}", *names), tuple(rows), caption)


def _share(row: Row) -> str:
    if row["status"] != "passed":
        return str(row["status"])
    share = row["share_of_stream"]
    return "" if share is None else f"{share['estimate'] * 100:.1f} %"


def _overall(summary: Mapping[str, Any], perimeter: str, shown: str) -> Table:
    """Return what holds over all cells of one perimeter: mean and worst speed-up against the yardstick, and counts."""
    mine = [entry for entry in summary["overall"] if (entry["perimeter"], entry["baseline"]) == (perimeter, shown)]
    kinds = list(dict.fromkeys((entry["measure"], entry["cache"]) for entry in mine))
    kinds.sort(key=lambda kind: ORDER[kind[0]])
    columns = ["implementation"]
    for measure, cache in kinds:
        name = measure_name({"measure": measure, "cache": cache})
        columns += [name, "worst cell", "verdicts"]
    rows = []
    for impl in dict.fromkeys(entry["impl"] for entry in mine):
        row = [impl]
        for kind in kinds:
            entry = next((e for e in mine if e["impl"] == impl and (e["measure"], e["cache"]) == kind), None)
            row += ["", "", ""] if entry is None else _speedup(entry)
        rows.append(tuple(row))
    cells = len(summary["cells"])
    title = f"{perimeter}: speed-up over {shown}, geometric mean of {cells} cells, on {summary['card']}"
    return Table(title, tuple(columns), tuple(rows), _environment(summary))


def _speedup(entry: Mapping[str, Any]) -> list[str]:
    words = ("faster", "equal", "slower", "inconclusive", "no number")
    verdicts = ", ".join(f"{entry[word]} {word}" for word in words if entry[word])
    if entry["speedup"] is None:
        return ["", "", verdicts]
    return [f"{entry['speedup']:.2f}×", f"{entry['worst']['speedup']:.2f}× at {entry['worst']['cell']}", verdicts]


def _compared(summary: Mapping[str, Any]) -> Table:
    found = summary["compared"]
    rows = [
        (row["cell"], row["perimeter"], measure_name(row), row["impl"], row["text"])
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


def measure_name(table: Mapping[str, Any]) -> str:
    """Return what a measure is called: what was timed, and the state of the cache."""
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


def protocol_lines(protocol: Mapping[str, Any], *, gpu: bool) -> list[str]:
    """Say in sentences how the times were taken, from the protocol that the summary holds."""
    percent = {key: f"{protocol[key] * 100:g} %" for key in ("confidence", "band")}
    lines = [
        f"{protocol['samples']} samples or more after {protocol['warmup']} warm-up calls and more until stable; all "
        "implementations in one run, in random mirrored order. A sample is "
        f"{protocol['calls']} whole calls, or one replay of a graph.",
        "Sampling went on until the A/A control, which is one implementation entered twice, was narrow, or "
        f"{protocol['seconds']:g} s were spent. Under a coarser control a difference must be larger than what that "
        "shows, and nothing is called equal.",
        "Each implementation's outputs were held against float64 on the timed inputs before a number stood, and again "
        "after every sample.",
        f"Intervals of {percent['confidence']} by a bootstrap of paired blocks ({protocol['bootstrap']} resamples); "
        f"equal means within {percent['band']}.",
    ]
    if gpu:
        lines.append(
            f"GPU time is a CUDA graph's replay; L2 cold means that at least {protocol['rotation']} times the cache "
            f"rotates. A cold time more than {protocol['floor_margin'] * 100:g} % below a plain stream of its bytes is "
            "invalid."
        )
    return lines
