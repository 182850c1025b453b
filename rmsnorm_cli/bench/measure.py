"""The sessions of a cell: every perimeter as whole calls, as GPU time from a cold or warm cache, and as host time.

Each program is admitted on values that are then overwritten in place: it is verified, and timed, on others.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rmsnorm_cli.bench import rows
from rmsnorm_cli.bench.admission import admit, free, memory, still_there, verified
from rmsnorm_cli.bench.answers import Answers
from rmsnorm_cli.bench.lab import Bench, Lab, Standing
from rmsnorm_cli.bench.programs import Loop
from rmsnorm_cli.bench.workload import Buffers, Cell
from rmsnorm_cli.errors import RmsnormError
from rmsnorm_cli.gates.gate import attempt, classified
from rmsnorm_cli.kernels.api import Implementation
from rmsnorm_cli.timing import Entry, Session, run_session
from rmsnorm_cli.timing.cuda import CudaClock, GraphReplay, Spin, captured

FATAL = (RmsnormError, OSError)  # an interrupt or a full disk is no program's doing
HOST_CALLS = 20  # of an eager chain of 25 kernels each these still fit the launch queue

Table = dict[str, Any]


def measure_cell(
    cell: Cell, names: Sequence[str], impls: Mapping[str, Implementation], declined: Mapping[str, Standing], lab: Lab
) -> dict[str, Any]:
    """Verify and time implementations on one cell; return its part of the run's summary.

    Every one of `names` gets a row: those in `declined` with what is said there, the others are in `impls`.
    """
    bench = Bench(lab, cell, Buffers(cell, lab.sets(cell), lab.device.torch_device, lab.seed))
    bench.refused = dict(declined)
    for name in names:
        if name not in declined:
            admit(bench, impls[name])
    bench.buffers.refill(lab.seed + 1)
    inputs = bench.buffers.pristine()
    roundings = {program.impl.rounding for program in bench.programs}
    bench.answers = {rounding: Answers(inputs, lab.eps, rounding) for rounding in roundings}
    tables = [table for perimeter in lab.perimeters for table in _perimeter(bench, perimeter, names)]
    consumers = [program.impl.name for program in bench.programs if program.consumes_dy]
    return _described(cell, lab) | {
        "consumes_dy": consumers,
        "first_calls": bench.first_calls,
        "memory": bench.memory,
        "tables": tables,
    }


def unmeasured(cell: Cell, names: Sequence[str], lab: Lab, detail: str) -> dict[str, Any]:
    """Return the part of a cell that could not be measured at all: an error for every implementation and perimeter."""
    standing: Standing = {"status": "error", "detail": detail}
    bench = Bench(lab, cell, Buffers(Cell(1, 1, cell.dtype), 1, "cpu", lab.seed))
    bare = dict.fromkeys(names, standing)
    tables = [
        _table(bench, perimeter, *kind, Session(), bare, names)
        for perimeter in lab.perimeters
        for kind in lab.kinds(cell)
    ]
    return _described(cell, lab) | {"consumes_dy": [], "first_calls": {}, "memory": {}, "tables": tables}


def _described(cell: Cell, lab: Lab) -> dict[str, Any]:
    return {
        "cell": cell.name,
        "M": cell.M,
        "N": cell.N,
        "dtype": cell.dtype,
        "sets_in_rotation": lab.sets(cell),
        "fits_l2": lab.clock.fits_l2(cell.set_bytes) if isinstance(lab.clock, CudaClock) else None,
        "bytes": {perimeter: cell.bytes_moved(perimeter) for perimeter in lab.perimeters},
    }


def _perimeter(bench: Bench, perimeter: str, names: Sequence[str]) -> list[Table]:
    """Return the tables of one perimeter; who fails in one of them is not in the next."""
    lab = bench.lab
    bare = dict(bench.refused)
    tables = []
    with torch.set_grad_enabled(perimeter != "forward"):
        loops = [loop for program in bench.programs if (loop := verified(bench, program, perimeter, bare)) is not None]
        for loop in loops:
            bench.memory.setdefault(loop.program.impl.name, {})[perimeter] = memory(bench, loop, perimeter)
        for measure, cache in lab.kinds(bench.cell):
            alone: dict[str, Standing] = {}  # who has no number under this measure, and may have one under the next
            if measure == "gpu":
                session, alone = _gpu_time(bench, perimeter, cache, loops)
            elif measure == "host":
                session = _host_time(bench, perimeter, loops)
            else:
                session = _whole_calls(bench, perimeter, loops)
            for name, problem in list(session.failures.items())[:1]:  # the others may have failed for its sake
                still_there(bench, name, problem)
            table = _table(bench, perimeter, measure, cache, session, bare | alone, names)
            tables.append(table)
            bare |= {r["impl"]: r for r in table["rows"] if r["status"] != "passed" and r["impl"] not in alone}
            loops = [loop for loop in loops if loop.program.impl.name not in bare]
    for program in bench.programs:
        program.release()
    free()
    return tables


def _whole_calls(bench: Bench, perimeter: str, loops: Sequence[Loop]) -> Session:
    lab = bench.lab
    twins = [Loop(loop.program, perimeter, lab.calls, loop.check) for loop in loops[:1]]
    named = [(loop.program.impl.name, loop) for loop in loops]
    named += [(loop.program.impl.name + rows.TWIN, loop) for loop in twins]
    entries = [
        Entry(name, partial(lab.clock.calls, loop.call, lab.calls), loop.prepare, loop.verdict) for name, loop in named
    ]
    return _session(bench, entries, perimeter, "calls")


def _gpu_time(bench: Bench, perimeter: str, cache: str, loops: Sequence[Loop]) -> tuple[Session, dict[str, Standing]]:
    """Time graphs of every program and of the stream; return the session and who could not be captured."""
    clock = bench.lab.clock
    assert isinstance(clock, CudaClock)
    sets = len(bench.buffers.x) if cache == "cold" else 1
    rng = bench.rng(perimeter, cache, "places")
    graphs: list[GraphReplay] = []
    entries: list[Entry] = []
    bare: dict[str, Standing] = {}
    named = [(loop.program.impl.name, loop) for loop in loops]
    for name, loop in named + [(loop.program.impl.name + rows.TWIN, loop) for loop in loops[:1]]:
        loop.outputs = None
        make = partial(loop.program.bodies, perimeter, sets)
        graph, problem = attempt(loop.program.impl, partial(captured, clock, make, sets), bench.buffers.x[0])
        if graph is None:
            text = problem.text if problem else "nothing was captured"
            bare[name] = {"status": "error", "detail": f"no CUDA graph of it could be made: {text}"}
            free()
            continue
        graphs.append(graph)
        entries.append(_graph_entry(name, graph, loop, rng))
    if entries:
        graphs += _stream(bench, clock, perimeter, sets)
        entries += [Entry(rows.STREAM, plain.measure) for plain in graphs[len(entries) :]]
    session = _session(bench, entries, perimeter, f"gpu {cache}")
    for graph in graphs:
        graph.release()
    return session, bare


def _stream(bench: Bench, clock: CudaClock, perimeter: str, sets: int) -> list[GraphReplay]:
    """Return the graph of the plain stream; nothing where its own output does not fit the memory."""
    try:
        streams = bench.buffers.streams(perimeter, sets)
        return [captured(clock, lambda turns: [streams[i % sets] for i in range(turns)], sets)]
    except torch.OutOfMemoryError:
        return []


def _graph_entry(name: str, graph: GraphReplay, loop: Loop, rng: np.random.Generator) -> Entry:
    """Enter a graph: before each sample one place of its outputs is poisoned, after it that place is checked."""
    place = 0
    program = loop.program

    def prepare() -> None:
        nonlocal place
        place = int(rng.integers(len(graph.outputs)))
        graph.poison(place)

    def wrong() -> str | None:
        return loop.check(graph.outputs[place]) or loop.check.answers.written_input(program.buffers)

    restore = program.restore if program.consumes_dy else (lambda: None)
    return Entry(name, partial(graph.measure, restore), prepare, wrong)


def _host_time(bench: Bench, perimeter: str, loops: Sequence[Loop]) -> Session:
    """Time what calls cost the host while the GPU is kept busy."""
    clock = bench.lab.clock
    assert isinstance(clock, CudaClock)
    calls = min(bench.lab.calls, HOST_CALLS)
    entries = [
        Entry(loop.program.impl.name, partial(clock.host, loop.call, calls, Spin()), loop.prepare) for loop in loops
    ]
    return _session(bench, entries, perimeter, "host")


def _session(bench: Bench, entries: Sequence[Entry], perimeter: str, what: str) -> Session:
    """Sample until the A/A control is narrow or the time is spent; see `rows.twin_held` for why it alone is asked."""
    lab = bench.lab
    lab.advance(0, f"{bench.cell.name} {perimeter} {what}")
    session = run_session(
        entries,
        lab.plan,
        bench.rng(perimeter, what),
        lab.clock.canaries() if isinstance(lab.clock, CudaClock) and entries else {},
        enough=lambda so_far: rows.twin_held(so_far, lab.rules, bench.rng(perimeter, what, "control")),
        fatal=FATAL,
    )
    lab.advance(1, f"{bench.cell.name} {perimeter} {what}")
    return session


def _table(
    bench: Bench,
    perimeter: str,
    measure: str,
    cache: str,
    session: Session,
    bare: Mapping[str, Mapping[str, Any]],
    names: Sequence[str],
) -> Table:
    """Return one session's table with a row for every implementation asked for, and record its raw samples."""
    lab, cell = bench.lab, bench.cell
    entered = [name for name in names if any(sample.entry == name for sample in session.samples)]
    baselines = [] if measure == "host" else lab.baselines  # no pair of host times is controlled
    timed = rows.Timed(
        session, entered, baselines, cell.bytes_moved(perimeter), cell.stream_bytes(perimeter), cache == "cold"
    )
    made = rows.table(timed, lab.rules, bench.rng(perimeter, measure, cache, "bootstrap"))
    found = {row["impl"]: row for row in made["rows"]}
    impls = {program.impl.name: program.impl for program in bench.programs}
    for name, problem in session.failures.items():
        if name in impls:
            found[name] = {"impl": name, "against": {}, "flags": [], **_failure(impls[name], problem)}
    for name, standing in bare.items():
        found.setdefault(
            name, {"impl": name, "against": {}, "flags": [], "status": standing["status"], "detail": standing["detail"]}
        )
    made["rows"] = [found[name] for name in names if name in found]
    made = {"perimeter": perimeter, "measure": measure, "cache": cache} | made
    where = {"cell": cell.name, "perimeter": perimeter, "measure": measure, "cache": cache}
    for name in dict.fromkeys(sample.entry for sample in session.samples):
        lab.record({"kind": "samples", **where, "impl": name, **session.series(name)})
    lab.record({"kind": "canaries", **where, "seconds": session.canaries})
    return made


def _failure(impl: Implementation, problem: Exception | str) -> Standing:
    if isinstance(problem, str):
        return {"status": "failed", "detail": f"wrong output in a timed sample: {problem}"}
    seen = classified(impl, problem)
    return {"status": seen.status, "detail": seen.text}
