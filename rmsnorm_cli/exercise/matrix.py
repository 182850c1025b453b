"""`--all`: every mistake against every gate, and the score.

A gate is asked until it objects to a mistake, then the next gate is asked: a mistake that one gate catches is still
shown to all others. What is asked is what `verify` asks by default, as far as it is small. The unchanged kernels take
part too, under names of their own (UNCHANGED), and no gate may object to them.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rmsnorm_cli import faults
from rmsnorm_cli.exercise import pool
from rmsnorm_cli.faults import Fault, apply
from rmsnorm_cli.faults.fault import AUTOGRAD, DETERMINISM, IDENTITIES, KERNELS, NAIVE
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.judging.tolerances import DECLARED
from rmsnorm_cli.results import CaseResult, Outcome, Scope, Status, Table, count, overall

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.console import Console
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.gates import Gate
    from rmsnorm_cli.kernels.api import Implementation
    from rmsnorm_cli.rundir.run import Run

UNCHANGED = {f"unchanged {kernel}": kernel for kernel in KERNELS}
SMALL, FEW = 5_000, 8  # elements and rows of x: the interpreter needs a millisecond a row, and more show nothing new
MANY = {"interpreter": 12, "cuda": 6}  # such questions of a gate, spread over its plan; a GPU compiles for each
MOST = {IDENTITIES: 2, AUTOGRAD: 2, DETERMINISM: 2}  # of gates whose questions are a dozen calls each
LOST = "CUDA error"  # what every call says once a kernel has read or written where it must not
RACING = 300_000  # on a GPU the order of programs only changes where there are more rows than processors


@dataclass(frozen=True)
class Row:
    """What became of one mistake: does the usual test notice it, which gates object, and to what."""

    name: str
    naive: Literal["passes", "caught", "not run"]
    caught: dict[str, dict[str, str]] = field(default_factory=dict)  # gate -> its first objection
    asked: dict[str, int] = field(default_factory=dict)  # gate -> how many questions it needed
    seconds: float = 0.0  # of a processor


def run(settings: "Settings", run: "Run", console: "Console", device: "Device") -> Outcome:
    """Run the whole catalogue, write the page of the gates, and return matrix and score."""
    from rmsnorm_cli.exercise import gates_page

    here = [fault for fault in faults.CATALOGUE if not fault.elsewhere(device.execution)]
    for fault in here:
        apply.write(fault, run.dir)  # a mistake that no longer applies ends the run now, not after minutes
    names = [*UNCHANGED, *(fault.name for fault in here)]
    rows: dict[str, Row] = {}
    with console.progress(f"mistakes against gates ({device.execution})", len(names)) as progress:
        for row in pool.examined(names, run.dir, settings, device):
            rows[row.name] = row
            run.record(dataclasses.asdict(row))
            progress.advance(1, row.name)
    results = [*judged(rows, device)]
    summary = summarised(rows, device)
    run.write("gates.md", gates_page.text(summary, settings, device))
    return Outcome(
        status=overall(count(results)),
        execution=device.execution,
        counts=count(results),
        summary=summary,
        tables=(table(rows, device), *missed(rows)),
        notes=(*false_alarms(rows), *notes(summary, run)),
        results=tuple(results),
    )


def examine(
    name: str,
    directory: Path,
    settings: "Settings",
    device: "Device",
    told: Callable[[str], None] = lambda gate: None,
) -> Row:
    """Put one mistake, or an UNCHANGED kernel, to the usual test and every gate; its source is in `directory`.

    `told` is called with the name of each gate that is through.
    """
    from rmsnorm_cli import gates
    from rmsnorm_cli.exercise.judge import judge
    from rmsnorm_cli.kernels import implementation

    start = time.process_time()
    fault = None if name in UNCHANGED else faults.find(name)
    kernel = UNCHANGED[name] if fault is None else fault.kernel

    def fresh() -> "Implementation":
        """Import the kernel anew: some mistakes remember the calls before."""
        if fault is None:
            return implementation(kernel)
        return apply.wired(fault, apply.load(fault, directory), kernel)

    naive: Literal["passes", "caught"] = "passes" if judge(fresh(), NAIVE, device.torch_device).ok else "caught"
    row = Row(name, naive)
    first = fault.expected if fault is not None and fault.crashes else ()  # behind a crash nothing is asked any more
    for gate in sorted(gates.GATES, key=lambda gate: gate.NAME not in first):
        objection, row.asked[gate.NAME] = first_objection(gate, fresh(), fault, settings, device)
        told(gate.NAME)
        if objection is not None:
            row.caught[gate.NAME] = objection
            if LOST in objection["detail"]:
                break  # with the context, this process has lost its GPU: the gates behind are not asked
    return dataclasses.replace(row, seconds=time.process_time() - start)


def first_objection(
    gate: "Gate", impl: "Implementation", fault: Fault | None, settings: "Settings", device: "Device"
) -> tuple[dict[str, str] | None, int]:
    """Ask a gate's questions until it objects; return the objection, or None, and how many it took."""
    asked = 0
    for question in questions(gate, impl, fault, settings, device):
        asked += 1
        try:
            results = gate.check(impl, question, device.execution, device.torch_device, DECLARED)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as problem:
            return {"case": question.id, "status": "error", "detail": f"{type(problem).__name__}: {problem}"}, asked
        for result in results:
            if result.status in ("failed", "error", "inconclusive"):
                found = {"case": result.case, "status": result.status, "scope": result.scope, "detail": result.detail}
                return found | {"hint": result.hint}, asked
    return None, asked


def questions(
    gate: "Gate", impl: "Implementation", fault: Fault | None, settings: "Settings", device: "Device"
) -> list[Any]:
    """Return small questions that `verify` asks by default at this gate; the exposing input comes first."""
    from rmsnorm_cli.config import Verify

    as_verify = dataclasses.replace(settings, command="verify", table=Verify())
    exposing = None if fault is None else fault.on(device.execution).exposing
    if isinstance(exposing, Case):
        exposing = dataclasses.replace(exposing, seed=settings.seed)
    planned = gate.plan(as_verify, impl, device.execution)
    racing = device.execution == "cuda" and gate.NAME == DETERMINISM
    first = [question for question in planned if exposing is not None and case_of(question) == exposing]
    small = [question for question in planned if question not in first and is_small(question, racing)]
    of_calls = [question for question in planned if case_of(question) is None]  # about one small call each
    most = MOST.get(gate.NAME, MANY[device.execution])
    return first + small[:: -(-len(small) // most) or 1] + of_calls


def case_of(question: Any) -> Case | None:
    """Return the Case that a question is or holds."""
    found = getattr(question, "case", question)
    return found if isinstance(found, Case) else None


def is_small(question: Any, racing: bool) -> bool:
    """Tell whether the Case of a question is small; larger, up to RACING, where many programs must run at once."""
    case = case_of(question)
    if case is None:
        return False
    elements = case.M * case.N
    return SMALL < elements <= RACING if racing else elements <= SMALL and case.M <= FEW


def judged(rows: dict[str, Row], device: "Device") -> list[CaseResult]:
    """Return a verdict for each change: mistakes must be caught, equivalent changes and the kernel itself must not."""
    results = [verdict(name, "contract", rows[name], should_be_caught=False, device=device) for name in UNCHANGED]
    for fault in faults.CATALOGUE:
        scope = scope_of(fault)
        if fault.name not in rows:
            why = fault.elsewhere(device.execution)
            results.append(
                CaseResult(fault.name, device.execution, scope, "catalogue", "", fault.name, "skipped", None, why)
            )
        else:
            results.append(verdict(fault.name, scope, rows[fault.name], not fault.equivalent, device))
    return results


def scope_of(fault: Fault) -> Scope:
    """Return the scope that a mistake belongs to."""
    scopes: dict[str, Scope] = {"forward": "forward", "dx": "dx", "dgamma": "dgamma"}
    return scopes.get(fault.stage, "properties")


def verdict(name: str, scope: Scope, row: Row, should_be_caught: bool, device: "Device") -> CaseResult:
    """Return whether what had to be caught was caught, and nothing else."""
    status: Status = "passed" if bool(row.caught) == should_be_caught else "failed"
    by = ", ".join(row.caught) or "no gate"
    detail = f"caught by {by}; the usual test: {row.naive}"
    return CaseResult(name, device.execution, scope, "catalogue", "", name, status, None, detail)


def summarised(rows: dict[str, Row], device: "Device") -> dict[str, Any]:
    """Return matrix and score as the run's summary holds them, for `report` and for whoever reads the JSON."""
    from rmsnorm_cli import gates

    names = [gate.NAME for gate in gates.GATES]
    entries: list[dict[str, Any]] = []
    for fault in faults.CATALOGUE:
        row = rows.get(fault.name, Row(fault.name, "not run"))
        entries.append(
            {
                "name": fault.name,
                "kernel": fault.kernel,
                "pass": fault.stage,
                "naive": row.naive,
                "caught_by": list(row.caught),
                "expected": list(fault.expected),
                "equivalent": fault.equivalent or None,
                "not_run": fault.elsewhere(device.execution) if fault.name not in rows else None,
                "first": row.caught,
                "asked": row.asked,
            }
        )
    mistakes = [entry for entry in entries if not entry["equivalent"] and entry["naive"] != "not run"]
    score = {
        "caught": sum(bool(entry["caught_by"]) for entry in mistakes),
        "of": len(mistakes),
        "naive": sum(entry["naive"] == "caught" for entry in mistakes),
        "survivors": [entry["name"] for entry in mistakes if not entry["caught_by"]],
        "elsewhere": {
            entry["name"]: missing
            for entry in mistakes
            if (missing := [name for name in entry["expected"] if name in names and name not in entry["caught_by"]])
        },
        "unchanged": {
            f"{UNCHANGED[name]}: {gate}": seen for name in UNCHANGED for gate, seen in rows[name].caught.items()
        },
    }
    return {
        "matrix": {"gates": names, "faults": entries, "execution": device.execution},
        "score": score,
    }


def table(rows: dict[str, Row], device: "Device") -> Table:
    """Return the matrix for people: one row for each mistake, one narrow column for each gate."""
    from rmsnorm_cli import gates

    names = [gate.NAME for gate in gates.GATES]
    body = []
    for fault in faults.CATALOGUE:
        row = rows.get(fault.name)
        if row is None:
            body.append((fault.name, *("" for _ in range(1 + len(names)))))
            continue
        marks = [row.naive == "caught", *(name in row.caught for name in names)]
        body.append((fault.name, *("x" if mark else "-" for mark in marks)))
    legend = ", ".join(f"{number} {name}" for number, name in enumerate(names, 1))
    columns = ("mistake", "0", *(str(number) for number in range(1, 1 + len(names))))
    title = f"which check catches which mistake ({device.name})"
    return Table(title, columns, tuple(body), f"x: caught. 0 the usual test, {legend}")


def innocent() -> list[str]:
    """Return the names of what no gate may object to."""
    return [*UNCHANGED, *(fault.name for fault in faults.CATALOGUE if fault.equivalent)]


def missed(rows: dict[str, Row]) -> tuple[Table, ...]:
    """Return what came out other than it should: survivors, and objections to what is right; or no table."""
    body = []
    for name, row in rows.items():
        if name in innocent():
            body += [(name, f"no mistake, but {gate} objects") for gate in row.caught]
        elif not row.caught:
            body.append((name, f"survives: none of {sum(row.asked.values())} questions showed it"))
    return (Table("not as it should be", ("change", "what happened"), tuple(body)),) if body else ()


def false_alarms(rows: dict[str, Row]) -> list[str]:
    """Return what was objected to in kernels that make no mistake."""
    return [
        f"{name}: {gate}: {seen['case']}: {seen['detail']}"
        for name in innocent()
        if name in rows
        for gate, seen in rows[name].caught.items()
    ]


def notes(summary: dict[str, Any], run: "Run") -> list[str]:
    """Return the score in words."""
    score, entries = summary["score"], summary["matrix"]["faults"]
    equivalent = [entry for entry in entries if entry["equivalent"]]
    lines = [
        f"score: {score['caught']} of {score['of']} mistakes caught; the usual test (64 x 4096, unit normal, gamma 1) "
        f"catches {score['naive']}"
    ]
    if score["survivors"]:
        lines.append(f"survivors: {', '.join(score['survivors'])}")
    lines += [
        f"{name}: not caught where it was expected, by {', '.join(by)}" for name, by in score["elsewhere"].items()
    ]
    lines += [f"not run here: {entry['name']}: {entry['not_run']}" for entry in entries if entry["not_run"]]
    lines += [f"no mistake: {entry['name']}: {entry['equivalent']}" for entry in equivalent]
    return [*lines, f"what each gate catches, as a page: {run.path('gates.md')}"]
