"""`rmsnorm bench`: how long implementations take, each verified on the timed inputs in the same run before it counts.

All of them are timed in one run, interleaved, beside a control (one implementation entered twice), canaries and a plain
stream of the same bytes. A verdict is spoken only where the intervals allow one, and no finer than the control allows.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rmsnorm_cli.errors import ConfigError, EnvironmentProblem, exit_code_of, flat
from rmsnorm_cli.results import Outcome, overall

if TYPE_CHECKING:
    from rmsnorm_cli.bench.lab import Lab, Standing
    from rmsnorm_cli.bench.workload import Cell
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.config.fields import Sizes
    from rmsnorm_cli.console import Console
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.kernels import Implementation
    from rmsnorm_cli.rundir.run import Run
    from rmsnorm_cli.timing import WallClock
    from rmsnorm_cli.timing.cuda import CudaClock

WARM_UP = 1.0  # seconds of a measurement's warm-up, at most


def check(settings: "Settings") -> None:
    """Raise ConfigError where there is nothing to compare with."""
    if settings.bench.compare is not None:
        from rmsnorm_cli.bench import earlier

        earlier.load(settings.bench.compare, settings.folder)


def run(settings: "Settings", run: "Run", console: "Console", device: "Device") -> Outcome:
    """Time settings.run.impl on every cell; raises EnvironmentProblem for a Triton kernel without a GPU."""
    from rmsnorm_cli.bench import earlier, rows, summary, tables
    from rmsnorm_cli.bench.workload import Cell

    table = settings.bench
    refuse_without_gpu(settings, device)
    cells = [Cell(shape.M, shape.N, dtype, shape.start) for shape, dtype in _shapes(settings)]
    facts = _facts(run, device)
    before, unlike = None, list[str]()
    if table.compare is not None:
        before = earlier.load(table.compare, run.dir.parent, asking=run.dir)
        unlike = earlier.refuse_unlike(before, facts, table.across)
        earlier.refuse_disjoint(before, [cell.name for cell in cells], table.perimeters, settings.run.impl)
    declined = _preflight(settings, cells, device)
    hopeless = {name for name in settings.run.impl if len(declined.get(name, ())) == len(cells)}  # not even imported
    impls = _implementations(settings, [name for name in settings.run.impl if name not in hopeless])
    clock, active = _clock(device)
    lab = _lab(settings, run, device, clock)
    total = sum(len(table.perimeters) * len(lab.kinds(cell)) for cell in cells)
    measured: list[dict[str, Any]] = []

    def told() -> dict[str, Any]:
        return facts | {
            "gpu": device.execution == "cuda",
            "protocol": summary.protocol(lab, table.warmup),
            "overheads": summary.overheads(lab),
            "implementations": [_described(impl, device) for impl in impls.values()],
            "baselines": list(lab.baselines),
            "cells": measured,
            "overall": rows.overall(measured, lab.baselines),
            "controls": summary.controls(measured),
            "first_calls": summary.first_calls(measured),
            "slower": list(summary.slower(measured, table.fail_if_slower_than)),
            "compared": None,
            "limits": list(tables.LIMITS if device.execution == "cuda" else tables.WALL_LIMITS),
        }

    with console.progress("bench", total) as progress, active(), _foreseen():
        lab = replace(lab, advance=progress.advance)
        try:
            measured.extend(_all_measured(cells, settings.run.impl, impls, declined, lab))
        except KeyboardInterrupt:
            if measured:
                run.keep(told())
                console.warn(f"{len(measured)} of {len(cells)} cells were finished; rmsnorm report shows them")
            raise
    found = told()
    if before is not None:
        numbers = earlier.block_times(run.records(), earlier.numbered(measured))
        compared = earlier.compared(before, measured, numbers, lab.rules, _rng(settings))
        found["compared"] = {"run": before.dir.name, "unlike": unlike, "rows": compared}
    counts = summary.counts(measured, table.fail_if_slower_than)
    return Outcome(
        status="failed" if found["slower"] else overall(counts),
        execution=device.execution,
        counts=counts,
        summary=found,
        tables=tuple(tables.tables(found)),
        notes=tuple(tables.notes(found)),
    )


def plan(settings: "Settings") -> list[str]:
    """Say what would be timed, and for how long at most, without timing it."""
    table = settings.bench
    cells = [f"{shape.rows} {dtype}" for shape, dtype in _shapes(settings)]
    kinds = [word for word in table.measures if word != "gpu"] + ["gpu"] * ("gpu" in table.measures) * len(table.caches)
    measurements = len(cells) * len(table.perimeters) * len(["whole"] if table.wall else kinds)
    minutes = measurements * (table.seconds + WARM_UP) / 60
    first = len(cells) * len(settings.run.impl)
    return [
        f"would time {', '.join(settings.run.impl)} on device {settings.run.device}",
        f"{len(cells)} cells ({', '.join(cells)}), each as {', '.join(table.perimeters)}",
        f"{table.samples} samples or more of {table.calls} calls after {table.warmup} warm-up calls and more until "
        f"stable; {', '.join(table.measures)}; GPU time with L2 {' and '.join(table.caches)}",
        f"{measurements} measurements of {table.seconds:g} s and {WARM_UP:g} s of warm-up at most, "
        f"{minutes:.1f} minutes in all, unless {table.samples} samples take longer; besides, the first calls of "
        f"{first} pairs of implementation and cell, which compile, {table.compile_seconds:g} s each at most",
    ]


def refuse_without_gpu(settings: "Settings", device: "Device") -> None:
    """Raise EnvironmentProblem where there is no GPU and no wall clock was asked for."""
    if device.execution == "cuda":
        return
    if settings.bench.wall:
        if "whole" not in settings.bench.measures:
            raise ConfigError(
                f"bench.measures: got {', '.join(settings.bench.measures)}; without a GPU whole calls alone can be "
                "timed, expected whole among them"
            )
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


def _lab(settings: "Settings", run: "Run", device: "Device", clock: "CudaClock | WallClock") -> "Lab":
    from rmsnorm_cli.bench.lab import Lab
    from rmsnorm_cli.bench.rows import Rules
    from rmsnorm_cli.bench.summary import YARDSTICKS
    from rmsnorm_cli.timing import Plan

    table = settings.bench
    plan = Plan(
        samples=table.samples,
        seconds=table.seconds,
        warmup_samples=-(-table.warmup // table.calls),
        warmup_limit=WARM_UP,
    )
    wanted = dict.fromkeys([*filter(None, [table.fail_if_slower_than]), *YARDSTICKS])
    return Lab(
        clock=clock,
        device=device,
        plan=plan,
        rules=Rules(table.band, table.confidence, table.bootstrap, table.min_blocks, plan.canary_within),
        perimeters=table.perimeters,
        measures=table.measures,
        caches=table.caches,
        calls=table.calls,
        baselines=[name for name in wanted if name in settings.run.impl],
        eps=settings.operator.eps,
        seed=settings.seed,
        compile_seconds=table.compile_seconds,
        record=run.record,
    )


def _implementations(settings: "Settings", names: Sequence[str]) -> "dict[str, Implementation]":
    """Look all names up; EnvironmentProblem with every install line that is missing."""
    from rmsnorm_cli.kernels import implementation
    from rmsnorm_cli.kernels.peers import MissingPackage

    found, missing = {}, []
    for name in names:
        try:
            found[name] = implementation(name, settings.run.rounding)
        except MissingPackage as problem:
            missing.append(str(problem))
    if missing:
        raise EnvironmentProblem("; ".join(missing))
    return found


def _preflight(settings: "Settings", cells: "Sequence[Cell]", device: "Device") -> "dict[str, dict[str, Standing]]":
    """Return, by foreign callable and cell, who is not let into the timing process."""
    from rmsnorm_cli.bench.preflight import preflight

    rounding, eps, seed = settings.run.rounding, settings.operator.eps, settings.seed
    where, seconds = device.torch_device, settings.bench.compile_seconds
    foreign = [name for name in settings.run.impl if ":" in name]
    return {name: preflight(name, cells, where, eps, rounding, seed, seconds) for name in foreign}


def _all_measured(
    cells: "Sequence[Cell]",
    names: Sequence[str],
    impls: "Mapping[str, Implementation]",
    declined: "Mapping[str, Mapping[str, Standing]]",
    lab: "Lab",
) -> Iterator[dict[str, Any]]:
    """Yield what each cell came to; after one that lost the GPU, the rest are errors that say so."""
    from rmsnorm_cli.bench.admission import DeviceLost
    from rmsnorm_cli.bench.measure import unmeasured

    lost: DeviceLost | None = None
    for cell in cells:
        here = {name: by[cell.name] for name, by in declined.items() if cell.name in by}
        if lost is None:
            try:
                yield _measured(cell, names, impls, here, lab)
                continue
            except DeviceLost as problem:
                lost = problem
        yield unmeasured(cell, names, lab, f"{lost}: nothing can be timed after that")


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
    except (MemoryError, RuntimeError) as problem:
        if exit_code_of(problem) != EnvironmentProblem.exit_code:  # all else than memory
            raise
        detail = f"out of memory: {flat(problem)[:200] or 'no more is known'}"
    if lab.device.execution == "cuda":
        torch.cuda.empty_cache()  # here, where the frames of the failure are gone
    return unmeasured(cell, names, lab, detail)


def _shapes(settings: "Settings") -> list[tuple["Sizes", str]]:
    """Return shape and dtype of each cell: a shape's own dtype, else all of bench.dtypes; no cell twice."""
    from rmsnorm_cli.config import sizes

    found = []
    for shape in map(sizes, settings.bench.shapes):
        dtypes = [shape.dtype] if shape.dtype else settings.bench.dtypes
        found += [(shape._replace(dtype=None), dtype) for dtype in dtypes]
    return list(dict.fromkeys(found))


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


def _described(impl: "Implementation", device: "Device") -> dict[str, Any]:
    from rmsnorm_cli.environment import executes_on

    return {"impl": impl.name, "execution": executes_on(impl, device), "rounding": impl.rounding, "ours": impl.ours}


def _rng(settings: "Settings") -> Any:
    import numpy as np

    return np.random.default_rng([settings.seed, 1])
