"""`--compare`: this run's times against an earlier run's, where the two can be compared at all.

The sides were not interleaved, so clocks, temperature and neighbours may differ between them. The plain stream of both
runs is compared as well: where it moved, so may everything else, and the text says by how much.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rmsnorm_cli.bench.rows import STREAM, TWIN, Rules
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.rundir import history
from rmsnorm_cli.timing import Interval, Times, Verdict, judge, unpaired_ratio, void

Key = tuple[str, str, str, str, str]  # cell, perimeter, measure, cache, implementation
Place = tuple[str, str, str, str]  # a key without the implementation
IDENTITY = (("card", "card"), ("driver", "driver"), ("clock", "clock"))


@dataclass(frozen=True)
class Earlier:
    """What an earlier run left: where it lies, what it ran on, and the block times behind each of its numbers."""

    dir: Path
    facts: Mapping[str, Any]
    blocks: Mapping[Key, Times]
    controls: Mapping[Place, Mapping[str, Any]]


def load(name: str, runs_dir: Path, asking: Path | None = None) -> Earlier:
    """Read an earlier run of bench; ConfigError where there is none, or none that was finished with numbers.

    `asking` is the run that compares: `latest` points at it by then, and means the one before.
    """
    info = history.find(name, runs_dir)
    if asking is not None and info.dir.name == asking.name:
        others = [run for run in history.list_runs(runs_dir) if run.command == "bench" and run.dir.name != asking.name]
        if not others:
            raise ConfigError(f"bench.compare: {name} is this very run; expected an earlier run of bench")
        info = others[-1]
    if info.command != "bench":
        raise ConfigError(f"bench.compare: {name} is a run of {info.command}; expected a run of bench")
    summary = info.facts.get("summary") or {}
    if not summary.get("cells"):
        raise ConfigError(
            f"bench.compare: {name} holds no times (its status is {info.status}); expected a finished run"
        )
    cells = summary["cells"]
    with history.unaltered(info):
        return Earlier(info.dir, summary, block_times(history.read_records(info.dir), numbered(cells)), controls(cells))


def refuse_unlike(earlier: Earlier, here: Mapping[str, Any], across: bool) -> list[str]:
    """Return how the two runs' machines differ, for the report; ConfigError where they do and `across` is not set."""
    told = [
        f"{what}: {earlier.facts.get(key)} then, {here.get(key)} now"
        for key, what in IDENTITY
        if earlier.facts.get(key) != here.get(key)
    ]
    if told and not across:
        raise ConfigError(
            f"bench.compare: {earlier.dir.name} was measured elsewhere ({'; '.join(told)}), so a ratio would compare "
            "machines, not programs; --across compares all the same and says so"
        )
    versions = {name: (earlier.facts.get("versions") or {}).get(name) for name in ("torch", "triton")}
    told += [
        f"{name}: {then} then, {here['versions'].get(name)} now"
        for name, then in versions.items()
        if then != here["versions"].get(name)
    ]
    return told


def refuse_disjoint(earlier: Earlier, cells: Iterable[str], perimeters: Iterable[str], names: Iterable[str]) -> None:
    """Raise ConfigError where nothing that will be timed was timed then; what is missing in part becomes rows."""
    wanted = {(cell, perimeter, name) for cell in cells for perimeter in perimeters for name in names}
    had = {(key[0], key[1], key[4]) for key in earlier.blocks}
    if wanted & had:
        return
    shapes = ", ".join(sorted({key[0] for key in earlier.blocks}))
    done = ", ".join(sorted({key[1] for key in earlier.blocks}))
    who = ", ".join(sorted({key[4] for key in earlier.blocks} - {STREAM}))
    raise ConfigError(
        f"bench.compare: {earlier.dir.name} has no time in common with this run; it timed {who} at {shapes}, in {done}"
    )


def compared(
    earlier: Earlier, cells: Sequence[Mapping[str, Any]], blocks: Mapping[Key, Times], rules: Rules, rng: Any
) -> list[dict[str, Any]]:
    """Return one row for each number of this run: its ratio to the earlier one, or why there is none.

    A verdict is as fine as the coarser of the two runs' A/A controls. Cold times over another number of sets of
    buffers are no ratio: from few sets a part may still lie in the cache.
    """
    made = []
    here = controls(cells)
    sets, sets_then = (
        {cell["cell"]: cell.get("sets_in_rotation") for cell in each} for each in (cells, earlier.facts["cells"])
    )
    streams: dict[Place, float] = {}
    for key in sorted(blocks, key=lambda key: (key[:4], key[4] != STREAM)):
        row: dict[str, Any] = dict(zip(("cell", "perimeter", "measure", "cache", "impl"), key, strict=True))
        then = earlier.blocks.get(key)
        if then is None:
            made.append(row | {"word": None, "text": "not timed in the earlier run"})
            continue
        now, before = sets[key[0]], sets_then.get(key[0])
        if key[3] == "cold" and now != before:
            made.append(row | {"word": None, "text": f"sets of buffers in rotation: {before} then, {now} now"})
            continue
        ratio = unpaired_ratio(blocks[key], then, rng, rules.confidence, rules.resamples)
        if key[4] == STREAM:
            streams[key[:4]] = ratio.estimate
        verdict = _verdict(
            ratio, [found for found in (here.get(key[:4]), earlier.controls.get(key[:4])) if found], rules
        )
        moved = streams.get(key[:4])
        beside = (
            "" if moved is None or key[4] == STREAM else f"; the plain stream took {moved:.2f} times as long as then"
        )
        made.append(
            row
            | {"word": verdict.word, "text": verdict.text + beside}
            | {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high}
        )
    return made


def _verdict(ratio: Interval, held: Sequence[Mapping[str, Any]], rules: Rules) -> Verdict:
    biased = next((found for found in held if found["biased"]), None)
    if biased is not None:
        return void(ratio, str(biased["text"]))
    coarsest = max((found["resolution"] for found in held if not found["held"]), default=None)
    return judge(ratio, rules.band, rules.confidence, coarsest)


def controls(cells: Iterable[Mapping[str, Any]]) -> dict[Place, Mapping[str, Any]]:
    """Return the A/A control of each table that has one."""
    return {
        (cell["cell"], table["perimeter"], table["measure"], table["cache"]): table["control"]
        for cell in cells
        for table in cell["tables"]
        if table["control"] is not None
    }


def numbered(cells: Iterable[Mapping[str, Any]]) -> set[Key]:
    """Return the keys that stand as numbers in a summary: verified, and not invalid."""
    return {
        (cell["cell"], table["perimeter"], table["measure"], table["cache"], name)
        for cell in cells
        for table in cell["tables"]
        for name in [row["impl"] for row in table["rows"] if row["status"] == "passed"]
        + [STREAM] * bool(table["stream"])
    }


def block_times(records: Iterable[Mapping[str, Any]], wanted: set[Key]) -> dict[Key, Times]:
    """Return one time a block for each wanted number, from the raw samples of metrics.jsonl."""
    found: dict[Key, Times] = {}
    for record in records:
        if record.get("kind") != "samples" or str(record["impl"]).endswith(TWIN):
            continue
        key = (record["cell"], record["perimeter"], record["measure"], record["cache"], record["impl"])
        if key in wanted:
            found[key] = np.asarray(record["seconds"], dtype=np.float64).reshape(-1, 2).mean(axis=1)
    return found
