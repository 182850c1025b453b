"""`rmsnorm bench`: how long implementations take, each verified on the timed inputs in the same run before it counts.

All of them are timed in one run, interleaved, beside a control (one implementation entered twice), canaries and a plain
stream of the same bytes. A verdict is spoken only where the intervals allow one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_cli.errors import EnvironmentProblem
from rmsnorm_cli.results import STATUSES, Outcome, overall

if TYPE_CHECKING:
    from rmsnorm_cli.bench.lab import Lab, Standing
    from rmsnorm_cli.bench.workload import Cell
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.console import Console
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.kernels import Implementation
    from rmsnorm_cli.rundir.run import Run
    from rmsnorm_cli.timing import WallClock
    from rmsnorm_cli.timing.cuda import CudaClock

YARDSTICKS = ("torch", "reference", "compile")  # verdicts are against these, where they are timed; the first is printed


def check(settings: "Settings") -> None:
    """Raise ConfigError where there is nothing to compare with."""
    if settings.bench.compare is not None:
        from rmsnorm_cli.bench import earlier

        earlier.load(settings.bench.compare, Path(settings.run.dir))


def run(settings: "Settings", run: "Run", console: "Console", device: "Device") -> Outcome:
    """Time settings.run.impl on every cell; raises EnvironmentProblem for a Triton kernel without a GPU."""
    from rmsnorm_cli.bench import earlier, rows, tables
    from rmsnorm_cli.kernels import implementation

    table = settings.bench
    refuse_without_gpu(settings, device)
    cells = _cells(settings)
    facts = _facts(run, device)
    before, unlike = None, list[str]()
    if table.compare is not None:
        before = earlier.load(table.compare, run.dir.parent, asking=run.dir)
        unlike = earlier.refuse_unlike(before, facts, table.across)
        earlier.refuse_disjoint(before, [cell.name for cell in cells], table.perimeters, settings.run.impl)
    declined = _preflight(settings, cells, device)
    hopeless = {name for name in settings.run.impl if len(declined.get(name, ())) == len(cells)}  # not even imported
    impls = {name: implementation(name, settings.run.rounding) for name in settings.run.impl if name not in hopeless}
    clock, active = _clock(device)
    total = len(cells) * len(table.perimeters) * (2 + len(table.caches) if device.execution == "cuda" else 1)
    with console.progress("bench", total) as progress, active(), _foreseen():
        lab = _lab(settings, run, device, clock, lambda text: progress.advance(1, text))
        measured = [
            _measured(
                cell, settings.run.impl, impls, {n: by[cell.name] for n, by in declined.items() if cell.name in by}, lab
            )
            for cell in cells
        ]
    summary = facts | {
        "gpu": device.execution == "cuda",
        "protocol": _protocol(lab, settings),
        "overheads": _overheads(clock),
        "implementations": [_described(impl, device) for impl in impls.values()],
        "baselines": list(lab.baselines),
        "cells": measured,
        "overall": rows.overall(measured, lab.baselines),
        "controls": _controls(measured),
        "slower": list(_slower(measured, table.fail_if_slower_than)),
        "compared": None,
        "limits": list(tables.LIMITS if device.execution == "cuda" else tables.WALL_LIMITS),
    }
    if before is not None:
        numbers = earlier.block_times(run.records(), earlier.numbered(measured))
        found = earlier.compared(before, numbers, lab.rules, _rng(settings))
        summary["compared"] = {"run": before.dir.name, "unlike": unlike, "rows": found}
    counts = _counts(measured)
    return Outcome(
        status="failed" if summary["slower"] else overall(counts),
        execution=device.execution,
        counts=counts,
        summary=summary,
        tables=tuple(tables.tables(summary)),
        notes=tuple(tables.notes(summary)),
    )


def plan(settings: "Settings") -> list[str]:
    """Say what would be timed, without timing it."""
    table = settings.bench
    return [
        f"would time {', '.join(settings.run.impl)} on device {settings.run.device}",
        f"{len(table.shapes) * len(table.dtypes)} cells ({', '.join(f'{m}x{n}' for m, n in table.shapes)} in "
        f"{', '.join(table.dtypes)}), each as {', '.join(table.perimeters)}",
        f"{table.samples} samples of {table.calls} calls after {table.warmup} warm-up calls and more until stable; GPU "
        f"time with L2 {' and '.join(table.caches)}",
    ]


def refuse_without_gpu(settings: "Settings", device: "Device") -> None:
    """Raise EnvironmentProblem where there is no GPU and no wall clock was asked for."""
    if device.execution == "cuda" or settings.bench.wall:
        return
    raise EnvironmentProblem(
        "bench needs a CUDA GPU: the time of a Triton kernel in the interpreter says nothing about the kernel; run it "
        "on a machine with a GPU, or give --wall to time the implementations that PyTorch runs on this CPU"
    )


@contextmanager
def _foreseen() -> Iterator[None]:
    """Let torch.compile's backward run twice on one graph, which `backward` does: a donated buffer forbids it."""
    from torch._functorch import config

    with config.patch(donated_buffer=False):
        yield


def _clock(device: "Device") -> "tuple[CudaClock | WallClock, Callable[[], AbstractContextManager[None]]]":
    if device.execution == "cuda":
        from rmsnorm_cli.timing.cuda import CudaClock

        clock = CudaClock(device.torch_device)
        return clock, clock.active
    from rmsnorm_cli.timing import WallClock

    return WallClock(), nullcontext


def _lab(
    settings: "Settings",
    run: "Run",
    device: "Device",
    clock: "CudaClock | WallClock",
    advance: Callable[[str], None],
) -> "Lab":
    from rmsnorm_cli.bench.lab import Lab
    from rmsnorm_cli.bench.rows import Rules
    from rmsnorm_cli.timing import Plan

    table = settings.bench
    plan = Plan(samples=table.samples, warmup_samples=-(-table.warmup // table.calls))
    wanted = dict.fromkeys([*filter(None, [table.fail_if_slower_than]), *YARDSTICKS])
    return Lab(
        clock=clock,
        device=device,
        plan=plan,
        rules=Rules(table.band, table.confidence, table.bootstrap, table.min_blocks, plan.canary_within),
        perimeters=table.perimeters,
        caches=table.caches,
        calls=table.calls,
        baselines=[name for name in wanted if name in settings.run.impl],
        eps=settings.operator.eps,
        seed=settings.seed,
        record=run.record,
        advance=advance,
    )


def _preflight(settings: "Settings", cells: "Sequence[Cell]", device: "Device") -> "dict[str, dict[str, Standing]]":
    """Return, by foreign callable and cell, who is not let into the timing process."""
    from rmsnorm_cli.bench.preflight import preflight

    rounding, eps, seed = settings.run.rounding, settings.operator.eps, settings.seed
    foreign = [name for name in settings.run.impl if ":" in name]
    return {name: preflight(name, cells, device.torch_device, eps, rounding, seed) for name in foreign}


def _measured(
    cell: "Cell",
    names: Sequence[str],
    impls: "Mapping[str, Implementation]",
    declined: "Mapping[str, Standing]",
    lab: "Lab",
) -> dict[str, Any]:
    """Measure a cell; one that does not fit the memory is a row for each implementation, and the run goes on."""
    import torch

    from rmsnorm_cli.bench.measure import measure_cell, unmeasured

    try:
        return measure_cell(cell, names, impls, declined, lab)
    except (torch.OutOfMemoryError, MemoryError) as problem:
        detail = f"out of memory before anything was timed: {str(problem).splitlines()[0][:200]}"
        return unmeasured(cell, names, lab, detail)


def _cells(settings: "Settings") -> "list[Cell]":
    from rmsnorm_cli.bench.workload import Cell

    return [Cell(M, N, dtype) for M, N in settings.bench.shapes for dtype in settings.bench.dtypes]


def _facts(run: "Run", device: "Device") -> dict[str, Any]:
    """Return what every table names: card, driver, versions, clock; from the run's env.json."""
    environment = json.loads(run.path("env.json").read_text(encoding="utf-8"))
    cuda = device.execution == "cuda"
    return {
        "card": device.name if cuda else "CPU",
        "driver": environment.get("driver"),
        "versions": environment["versions"],
        "clock": "CUDA events" if cuda else "wall clock, CPU",
    }


def _protocol(lab: "Lab", settings: "Settings") -> dict[str, Any]:
    from rmsnorm_cli.timing import FLOOR_MARGIN, SUSPECT
    from rmsnorm_cli.timing.cuda import GRAPH_SECONDS, L2_ROTATION

    table = settings.bench
    return {
        "samples": lab.plan.samples,
        "calls": lab.calls,
        "warmup": table.warmup,
        "min_blocks": table.min_blocks,
        "extensions": lab.plan.extensions,
        "bootstrap": table.bootstrap,
        "confidence": table.confidence,
        "band": table.band,
        "floor_margin": FLOOR_MARGIN,
        "suspect": SUSPECT,
        "rotation": L2_ROTATION,
        "graph_seconds": GRAPH_SECONDS,
        "seed": settings.seed,
        "eps": settings.operator.eps,
    }


def _overheads(clock: "CudaClock | WallClock") -> dict[str, Any] | None:
    from rmsnorm_cli.timing import WallClock

    if isinstance(clock, WallClock):
        return None
    found = clock.overheads
    return {"empty_interval": found.empty_interval, "empty_wait": found.empty_wait, "l2_bytes": clock.l2_bytes}


def _described(impl: "Implementation", device: "Device") -> dict[str, Any]:
    from rmsnorm_cli.environment import executes_on

    return {"impl": impl.name, "execution": executes_on(impl, device), "rounding": impl.rounding, "ours": impl.ours}


def _controls(cells: Sequence[dict[str, Any]]) -> dict[str, int]:
    found = [table["control"] for cell in cells for table in cell["tables"] if table["measure"] != "host"]
    held = [control for control in found if control is not None]
    return {
        "tables": len(held),
        "held": sum(control["held"] for control in held),
        "hold_1": sum(control["holds_1"] for control in held),
    }


def _counts(cells: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count rows by status; a table whose control did not hold counts as inconclusive once more."""
    counts: dict[str, int] = dict.fromkeys(STATUSES, 0)
    for cell in cells:
        for table in cell["tables"]:
            for row in table["rows"]:
                counts[row["status"]] += 1
            control = table["control"]
            counts["inconclusive"] += control is not None and not control["held"]
    return counts


def _slower(cells: Sequence[dict[str, Any]], than: str | None) -> Iterator[str]:
    """Yield a sentence for each place where an implementation that is no yardstick is slower than the one named."""
    for cell in cells if than is not None else ():
        for table in cell["tables"]:
            for row in table["rows"]:
                against = row["against"].get(than)
                if row["impl"] not in YARDSTICKS and against is not None and against["word"] == "slower":
                    where = f"{cell['cell']}, {table['perimeter']}, {table['measure']} {table['cache']}"
                    yield f"{row['impl']} is slower than {than} at {where}: {against['text']}"


def _rng(settings: "Settings") -> Any:
    import numpy as np

    return np.random.default_rng([settings.seed, 1])
