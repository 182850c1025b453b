"""`rmsnorm verify`: each implementation against every gate, and one verdict. The main job.

Order: the tolerances are written down and hashed; the controls say whether this verifier can tell good from bad here;
only then is anything of the user's judged. A foreign implementation answers from a process of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rmsnorm_cli.inputs import thinning
from rmsnorm_cli.judging import tolerances
from rmsnorm_cli.results import CaseResult, Outcome, Table, count, folded, overall, strict_json

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.console import Console
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.kernels import Implementation
    from rmsnorm_cli.rundir.run import Run

PATIENCE = 3  # a process that dies at each question costs seconds every time
SHOWN = 3  # failures of one scope and gate that are printed; all of them are in metrics.jsonl and junit.xml
EVIDENCE = {
    "cuda": "on this GPU, at these shapes and dtypes",
    "interpreter": "about the kernel's arithmetic and addresses, run program by program on the CPU; it says nothing of "
    "races, speed or the GPU's own code",
    "cpu": "about PyTorch's code on the CPU",
}


def run(settings: "Settings", run: "Run", console: "Console", device: "Device") -> Outcome:
    """Judge every implementation of settings.run.impl; raises VerifierUntrusted if a control is misjudged."""
    from rmsnorm_cli import gates
    from rmsnorm_cli.gates import controls
    from rmsnorm_cli.kernels.foreign import opened

    in_force = {dtype: settings.verify.tolerances.of(dtype) for dtype in tolerances.DECLARED}
    run.write("declared/tolerances.json", tolerances.canonical_json(in_force) + "\n")
    digest = tolerances.digest(in_force)
    run.log(f"tolerances sha256 {digest}, written before the first comparison")
    results: list[CaseResult] = []
    with ExitStack() as stack:
        table, rounding = settings.verify, settings.run.rounding
        judged = [
            stack.enter_context(opened(name, device.torch_device, rounding, table.timeout, run.write))
            for name in settings.run.impl
        ]
        examined = controls.examine(device.execution, device.torch_device, in_force)
        run.write("controls.json", strict_json([result.record() for result in examined]) + "\n")
        trust = (
            f"{len(examined)} of {len(examined)} controls, right and wrong on purpose, were judged as they should be"
        )
        run.log(trust)
        for impl in judged:
            for result in ask(impl, settings, console, device, in_force):
                run.record(result.record())
                results.append(result)
    counts = count(results)
    diagnoses = {impl.name: gates.diagnose([r for r in results if r.impl == impl.name]) for impl in judged}
    scopes = gates.scopes(results)
    return Outcome(
        status=overall(counts),
        execution=device.execution,
        counts=counts,
        summary={
            "scopes": scopes,
            "tolerances_sha256": digest,
            "tolerances": "declared" if digest == tolerances.DECLARED_SHA256 else "tightened",
            "controls": [result.case for result in examined],
            "diagnoses": diagnoses,
        },
        tables=(verdicts(scopes), *failures(results)),
        notes=tuple(notes(results, diagnoses, trust, digest)),
        results=tuple(results),
    )


def plan(settings: "Settings") -> list[str]:
    """Say what would be asked of whom, without asking."""
    table = settings.verify
    shapes = f"{len(table.rows)} row counts x {len(table.cols)} widths x {len(table.dtypes)} dtypes"
    lines = [
        f"would verify {', '.join(settings.run.impl)} on device {settings.run.device}",
        f"scopes {', '.join(table.only)}; declared-tolerance grid of {shapes}, "
        f"{len(table.distributions)} distributions, {len(table.layouts)} layouts, as far as each contract takes them",
    ]
    if table.default_dtypes:
        lines.append(f"a Triton kernel without a GPU is asked less: {thinning.IN_THE_INTERPRETER}")
    if "compile" in settings.run.impl and table.default_grid:
        lines.append(f"compile, which compiles anew for each shape, is asked less: {thinning.OF_THE_COSTLY}")
    return lines


def ask(
    impl: "Implementation", settings: "Settings", console: "Console", device: "Device", in_force: Any
) -> Iterator[CaseResult]:
    """Yield the verdicts of every gate about one implementation.

    A scope in which no number was held against the oracle is inconclusive, whatever else passed; an implementation that
    gives no answer three times running is not asked on.
    """
    from rmsnorm_cli import gates
    from rmsnorm_cli.environment import executes_on
    from rmsnorm_cli.gates.gate import one_thread

    execution = executes_on(impl, device)
    only = set(settings.verify.only)
    planned = [(gate, gate.plan(settings, impl, execution)) for gate in gates.selected(only)]
    total = sum(len(questions) for _, questions in planned)
    judged: set[tuple[str, str]] = set()
    refusals: list[str] = []
    silent = 0
    with console.progress(f"{impl.name} ({execution})", total) as progress, one_thread(execution):
        for gate, question in ((gate, question) for gate, questions in planned for question in questions):
            results = [
                result
                for result in gate.check(impl, question, execution, device.torch_device, in_force)
                if result.scope in only
            ]
            yield from results
            refusals += [result.detail for result in results if result.status == "refused"]
            if gate is gates.declared:
                judged |= {(result.scope, result.dtype) for result in results if result.status in ("passed", "failed")}
            silent = silent + 1 if any(result.status == "error" for result in results) else 0
            if silent == PATIENCE:
                text = f"{PATIENCE} questions running had no answer; the rest of the {total} was not asked"
                yield CaseResult(impl.name, execution, "contract", "asked", "", "all cases", "error", detail=text)
                return
            progress.advance(1, f"{gate.NAME}: {question.id}")
    named = ("",) if settings.verify.default_dtypes else settings.verify.dtypes  # "": where none is named, any will do
    for scope in gates.declared.SCOPES:
        for dtype in named if scope in only else ():
            if not any(scope == of and dtype in ("", kind) for of, kind in judged):
                yield CaseResult(
                    impl.name, execution, scope, "asked", dtype, "all cases", "inconclusive", detail=unjudged(refusals)
                )


def unjudged(refusals: Sequence[str]) -> str:
    """Say that no number was judged, and what the implementation said where it refused."""
    said = f"; it said first: {refusals[0]}" if refusals else ""
    return f"nothing that was asked lies within what this implementation takes, so no number was judged{said}"


def verdicts(scopes: Sequence[dict[str, Any]]) -> Table:
    """Return a row for each implementation, scope and gate, and one more for each dtype that did not just pass."""
    rows = []
    for entry in folded(scopes):
        others = [f"{entry[key]} {key}" for key in ("refused", "skipped", "inconclusive", "error") if entry[key]]
        worst = entry["worst"] or {"value": None, "case": ""}
        rows.append(
            (
                f"{entry['impl']} ({entry['execution']})",
                entry["scope"],
                entry["gate"],
                entry["dtype"],
                str(entry["cases"]),
                str(entry["passed"]),
                str(entry["failed"]),
                ", ".join(others),
                " ".join(filter(None, ("" if worst["value"] is None else f"{worst['value']:.2g}", worst["case"]))),
            )
        )
    columns = (
        "implementation",
        "scope",
        "gate",
        "dtype",
        "cases",
        "passed",
        "failed",
        "other",
        "worst error/tolerance",
    )
    return Table("verify", columns, tuple(rows))


def failures(results: Sequence[CaseResult]) -> tuple[Table, ...]:
    """Return the first failures of each scope and gate, with what was seen and what it points to; or no table."""
    rows: list[tuple[str, ...]] = []
    shown: dict[tuple[str, ...], int] = {}
    for result in results:
        if result.status not in ("failed", "error", "inconclusive"):
            continue
        key = (result.impl, result.scope, result.gate)
        shown[key] = shown.get(key, 0) + 1
        if shown[key] <= SHOWN:
            seen = result.detail + (f" -> {result.hint}" if result.hint else "")
            rows.append((result.impl, result.scope, result.gate, result.status, result.case, seen))
    if not rows:
        return ()
    hidden = sum(max(number - SHOWN, 0) for number in shown.values())
    caption = f"{hidden} more in metrics.jsonl and junit.xml" if hidden else ""
    columns = ("impl", "scope", "gate", "status", "case", "seen")
    return (Table("what did not pass", columns, tuple(rows), caption, prose=True),)


def notes(results: Sequence[CaseResult], diagnoses: dict[str, str], trust: str, digest: str) -> Iterator[str]:
    """Yield the diagnosis, what the run rests on, and what its results are evidence of."""
    for impl, text in diagnoses.items():
        yield from (f"{impl}: {line}" for line in text.splitlines())
    yield trust
    yield f"tolerances sha256 {digest[:16]}, written before the first comparison"
    for execution in sorted({result.execution for result in results}):
        yield f"executed on {execution}: evidence {EVIDENCE[execution]}"
