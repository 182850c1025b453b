"""`--fault NAME`: one mistake on one page: what it is, who notices, and the wrong value, predicted and measured."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_cli import faults
from rmsnorm_cli.errors import EnvironmentProblem
from rmsnorm_cli.exercise import matrix, pool, summary
from rmsnorm_cli.exercise.judge import TENSORS, Judged, judge
from rmsnorm_cli.faults import Fault, apply
from rmsnorm_cli.faults.examples import Example
from rmsnorm_cli.faults.fault import NAIVE
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.judging.numerics import Comparison
from rmsnorm_cli.results import CaseResult, Outcome, Table, count, overall

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.console import Console, Progress
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.rundir.run import Run


def run(settings: "Settings", run: "Run", console: "Console", device: "Device") -> Outcome:
    """Show one mistake; it fails if no gate catches it, or if it does not do what algebra predicts."""
    from rmsnorm_cli import gates

    fault = faults.find(settings.exercise.fault).on(device.execution)
    texts = story(fault)
    for line in (*texts, "", *apply.diff(fault).splitlines(), ""):
        console.note(line)
    if reason := fault.elsewhere(device.execution):
        on_gpu = device.execution == "cuda"
        where = "the interpreter" if on_gpu else "a GPU"
        remedy = "with --device interpreter" if on_gpu else "on a machine with a GPU, with --device cuda"
        raise EnvironmentProblem(f"{fault.name} needs {where}: {reason}; run it {remedy}")
    with console.progress("gates", len(gates.GATES)) as progress:
        row = examined(fault, run.dir, settings, device, progress)
    asked = {"usual": NAIVE, "hiding": fault.hiding, "exposing": fault.exposing}
    if fault.exposing == fault.hiding:
        asked = {"usual": NAIVE, "one call": fault.hiding}
    elif fault.hiding == NAIVE:
        asked = {"usual, hiding": NAIVE, "exposing": fault.exposing}
    seen = {
        who: (question, judge(faults.implementation(fault.name, run.dir), question, device.torch_device))
        for who, question in asked.items()
        if question is not None
    }
    exposed = list(seen.values())[-1][1]
    results = [
        matrix.verdict(fault.name, matrix.scope_of(fault), row, not fault.equivalent, device),
        *foreseen(fault, exposed, device),
    ]
    for result in results:
        run.record(result.record())
    tables = (notice_table(seen), gate_table(fault, row), *value_table(fault, exposed))
    notes = (*objections(row), *wrong_parts(seen), *matched(fault, exposed))
    found = {"naive": row.naive, "caught_by": row.caught, "asked": row.asked}
    return Outcome(
        status=overall(count(results)),
        execution=device.execution,
        counts=count(results),
        summary={"exercise": {"fault": fault.name, **found, "shown": summary.kept(fault, texts, tables, notes)}},
        tables=tables,
        notes=(*notes, f"changed source and diff: {run.path(apply.FOLDER)}/{fault.name}/"),
        results=tuple(results),
        said=f"caught by {len(row.caught)} of {len(row.asked)} gates",
    )


def examined(fault: Fault, directory: Path, settings: "Settings", device: "Device", progress: "Progress") -> matrix.Row:
    """Put the mistake to every gate, in a process of its own if it can cost this one its GPU."""
    apply.write(fault, directory)
    if fault.crashes and device.execution == "cuda":
        return next(pool.examined([fault.name], directory, settings, device))
    return matrix.examine(fault.name, directory, settings, device, lambda gate: progress.advance(1, gate))


def story(fault: Fault) -> list[str]:
    """Return name, story, letters and sightings."""
    texts = [f"{fault.name} ({fault.kernel}, {fault.stage})", fault.story]
    if re.search(r"x̂|\bu\b", " ".join((fault.story, fault.equivalent))):
        texts.append(summary.LETTERS)
    if fault.seen:
        texts.append(
            f"Seen in: {', '.join(fault.seen)} (on GitHub; the same kind of mistake, not always in an RMSNorm)."
        )
    if fault.equivalent:
        texts.append(f"No mistake: {fault.equivalent}")
    return texts


def foreseen(fault: Fault, exposed: Judged, device: "Device") -> list[CaseResult]:
    """Return a verdict for each tensor: whether it is what algebra predicts; none where it predicts nothing."""
    results = []
    scopes: dict[str, Any] = {"y": "forward", "dx": "dx", "dgamma": "dgamma"}
    if fault.predicted is not None:
        for name, found in exposed.agreement(fault).items():
            results.append(
                CaseResult(
                    fault.name, device.execution, scopes[name], "prediction", fault.exposing.dtype, fault.exposing.id,
                    "passed" if found.ok else "failed", found.worst, found.detail,
                )
            )  # fmt: skip
    return results


def notice_table(seen: dict[str, tuple[Case | Example, Judged]]) -> Table:
    """Return the verdict of the declared tolerance on the usual test, the hiding and the exposing input."""
    body = tuple((who, *(cell(judged.parts[name]) for name in TENSORS)) for who, (_, judged) in seen.items())
    inputs = "; ".join(f"{who}: {question.id}" for who, (question, _) in seen.items())
    caption = (
        "by the declared tolerance; in brackets the worst error as a fraction of it. Inputs, as dtype, shape, values "
        f"and layout: {inputs}"
    )
    return Table("who notices", ("input", *TENSORS), body, caption)


def cell(found: Comparison) -> str:
    """Return how one tensor came out, in two words."""
    if found.worst is None:
        return "right" if found.ok else "wrong"  # `wrong_parts` says how: there is no number for it
    if not found.ok and found.got is not None and not math.isfinite(found.got):
        return f"wrong ({found.got})"
    return f"{'right' if found.ok else 'wrong'} ({found.worst:.2g})"


def gate_table(fault: Fault, row: matrix.Row) -> Table:
    """Return what each gate of `verify` says."""
    body = tuple(
        (gate, "caught" if gate in row.caught else "-", "yes" if gate in fault.expected else "", str(asked))
        for gate, asked in row.asked.items()
    )
    caption = "-: the gate objected to none of its questions; expected: one that must catch this mistake"
    return Table("gates of verify", ("gate", "verdict", "expected", "questions"), body, caption)


def objections(row: matrix.Row) -> list[str]:
    """Return what each gate that caught it saw first."""
    return [f"{gate}: {seen['case']}: {seen['detail']}" for gate, seen in row.caught.items()]


def wrong_parts(seen: dict[str, tuple[Case | Example, Judged]]) -> list[str]:
    """Return what is wrong with results that no error measures: one that is missing, or of another shape or dtype."""
    return [
        f"{who}: {name}: {found.detail}"
        for who, (_, judged) in seen.items()
        for name, found in judged.parts.items()
        if found.worst is None and not found.ok
    ]


def value_table(fault: Fault, exposed: Judged) -> tuple[Table, ...]:
    """Return, for each tensor that algebra predicts wrong, its most wrong element: right, predicted, measured."""
    body = []
    for name, wrong in exposed.predicted(fault).items():
        right, got = getattr(exposed.want, name), getattr(exposed.got, name)
        if got is None:
            continue
        where = int((wrong - right).abs().nan_to_num(nan=float("inf")).argmax())
        values = (float(tensor.flatten()[where]) for tensor in (right, wrong, got))
        index = divmod(where, right.shape[-1]) if right.dim() > 1 else (where,)
        body.append((name, ", ".join(map(str, index)), *(f"{value:.7g}" for value in values)))
    if not body:
        return ()
    columns = ("tensor", "element", "right", "wrong, predicted", "wrong, measured")
    return (Table("the wrong value, where it is most wrong", columns, tuple(body)),)


def matched(fault: Fault, exposed: Judged) -> list[str]:
    """Return in words whether the prediction held for every element."""
    if fault.predicted is None:
        return [] if fault.equivalent else ["Algebra predicts no single wrong value for this one."]
    found = exposed.agreement(fault)
    worst = max((part.worst or 0.0 for part in found.values()), default=0.0)
    if all(part.ok for part in found.values()):
        return [f"Every element is what algebra predicts, within {worst:.2g} of the declared tolerance."]
    return [f"{name}: not what algebra predicts: {part.detail}" for name, part in found.items() if not part.ok]
