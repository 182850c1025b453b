"""What the cells of a run come to: counts, controls, slower places, and the protocol they were measured by. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rmsnorm_cli.bench.lab import Lab
from rmsnorm_cli.bench.rows import NARROW
from rmsnorm_cli.results import STATUSES
from rmsnorm_cli.timing import FLOOR_MARGIN, SUSPECT, WallClock
from rmsnorm_cli.timing.cuda import FAR_SETS, FAR_SHARE, GRAPH_SECONDS, L2_FAR, L2_ROTATION

YARDSTICKS = ("torch", "reference", "compile")  # verdicts are against these, where they are timed; the first is printed


def counts(cells: Sequence[Mapping[str, Any]], gate: str | None) -> dict[str, int]:
    """Count rows by status, and once more as inconclusive each table over which nothing could be said.

    `gate` is the implementation that nobody may be slower than: where its control was too coarse to tell, the
    question that was asked has no answer either.
    """
    found: dict[str, int] = dict.fromkeys(STATUSES, 0)
    for cell in cells:
        for table in cell["tables"]:
            for row in table["rows"]:
                found[row["status"]] += 1
            found["inconclusive"] += table["unsaid"] is not None or _undecided(table, gate)
    return found


def _undecided(table: Mapping[str, Any], gate: str | None) -> bool:
    control = table["control"]
    coarse = control is None or not control["held"]
    asked = [row["against"].get(gate) for row in table["rows"] if row["impl"] not in YARDSTICKS]
    return coarse and any(against is not None and against["word"] == "inconclusive" for against in asked)


def controls(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the A/A controls by how they came out."""
    found = [table["control"] for cell in cells for table in cell["tables"] if table["control"] is not None]
    return {
        "tables": len(found),
        "held": sum(control["held"] for control in found),
        "biased": sum(control["biased"] for control in found),
        "hold_1": sum(control["holds_1"] for control in found),
        "coarsest": max((control["resolution"] for control in found if not control["biased"]), default=None),
    }


def first_calls(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return, by implementation, the seconds that its first calls took over all cells, compiling included."""
    found: dict[str, float] = {}
    for cell in cells:
        for name, seconds in cell["first_calls"].items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def slower(cells: Sequence[Mapping[str, Any]], than: str | None) -> Iterator[str]:
    """Yield a sentence for each place where an implementation that is no yardstick is slower than the one named."""
    for cell in cells if than is not None else ():
        for table in cell["tables"]:
            for row in table["rows"]:
                against = row["against"].get(than)
                if row["impl"] not in YARDSTICKS and against is not None and against["word"] == "slower":
                    where = f"{cell['cell']}, {table['perimeter']}, {table['measure']} {table['cache']}"
                    yield f"{row['impl']} is slower than {than} at {where}: {against['text']}"


def protocol(lab: Lab, warmup: int) -> dict[str, Any]:
    """Return what was declared before anything was timed."""
    return {
        "samples": lab.plan.samples,
        "seconds": lab.plan.seconds,
        "calls": lab.calls,
        "warmup": warmup,
        "measures": list(lab.measures),
        "min_blocks": lab.rules.min_blocks,
        "narrow": NARROW,
        "bootstrap": lab.rules.resamples,
        "confidence": lab.rules.confidence,
        "band": lab.rules.band,
        "floor_margin": FLOOR_MARGIN,
        "suspect": SUSPECT,
        "rotation": L2_ROTATION,
        "far_rotation": L2_FAR,
        "far_sets": FAR_SETS,
        "far_share": FAR_SHARE,
        "graph_seconds": GRAPH_SECONDS,
        "compile_seconds": lab.compile_seconds,
        "seed": lab.seed,
        "eps": lab.eps,
    }


def overheads(lab: Lab) -> dict[str, Any] | None:
    """Return what the GPU's clock costs by itself, in seconds, and the size of the cache in bytes."""
    if isinstance(lab.clock, WallClock):
        return None
    found = lab.clock.overheads
    return {
        "empty_interval": found.empty_interval,
        "empty_wait": found.empty_wait,
        "l2_bytes": lab.clock.l2_bytes,
    }
