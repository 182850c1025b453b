"""`rmsnorm gradcheck`: derivatives in float64, where a finite difference can tell right from wrong.

Each verdict is labelled with the program it tested. The reference's derivatives say nothing about a float32 kernel;
they say that the oracle, which judges the kernel elsewhere, is itself right.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rmsnorm_cli.errors import of_the_machine
from rmsnorm_cli.results import CaseResult, Outcome, Scope, Status, Table, count, overall

if TYPE_CHECKING:
    import torch

    from rmsnorm_cli.config import Gradcheck, Settings
    from rmsnorm_cli.console import Console, Progress
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.judging.derivatives import Probe
    from rmsnorm_cli.kernels import Implementation
    from rmsnorm_cli.rundir.run import Run

EXACT = 1e-12  # relative to the largest term: two float64 formulas of this length differ by rounding only
PATIENCE = 3  # a process that dies at each question costs seconds every time
WIDE = 64  # from this width on the Jacobian is probed in random directions instead of element by element
WIDE_INTERPRETED = 8  # the same for a kernel in Triton's interpreter, which takes milliseconds for each evaluation


@dataclass(frozen=True)
class Judge:
    """Turns one question about one program into a CaseResult."""

    impl: str
    execution: Any
    program: str  # what was tested, in words

    def ask(self, scope: Scope, case: str, question: str, answer: Callable[[], float | None]) -> CaseResult:
        """Run `answer`: a number is an error against EXACT, None means that a torch check passed; raising fails.

        A stranger's exception declines this input, and its process may be lost: `refused` and `error`.
        """
        status: Status = "passed"
        worst: float | None = None
        detail = f"{self.program}: {question}"
        try:
            error = answer()
            if error is not None:
                worst = error / EXACT
                if not error <= EXACT:  # NaN must fail, so the comparison is this way round
                    status, detail = "failed", f"{detail}: relative error {error:.3g}, limit {EXACT:g}"
        except Exception as problem:
            if of_the_machine(problem):
                raise
            first = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
            kinds = {kind.__name__ for kind in type(problem).__mro__}
            status = "error" if "ForeignFailure" in kinds else "refused" if "ForeignRefused" in kinds else "failed"
            detail = f"{detail}: {first}"
        return CaseResult(self.impl, self.execution, scope, "gradcheck", "float64", case, status, worst, detail)


def check_call(
    judge: Judge, call: Callable[..., "torch.Tensor"], p: "Probe", table: "Gradcheck", seed: int
) -> Iterator[CaseResult]:
    """Judge the first and second derivatives of a differentiable call by torch's finite differences.

    x is asked for in units of its rms: then all terms are of the size of 1, and what a finite difference cuts off or
    rounds away lies far below the tolerances, whatever directions are drawn.
    """
    import torch

    fast = p.x.shape[1] >= (WIDE_INTERPRETED if judge.execution == "interpreter" else WIDE)
    how = "in random directions" if fast else "for every element"
    options: dict[str, Any] = {"atol": table.atol, "rtol": table.rtol, "eps": table.step, "fast_mode": fast}
    unit, gamma = (t.detach().clone().requires_grad_() for t in (p.x / p.rms, p.gamma))

    def along_x() -> None:
        torch.autograd.gradcheck(lambda t: call(t * p.rms, p.gamma, p.eps), (unit,), **options)

    def along_gamma() -> None:
        torch.autograd.gradcheck(lambda t: call(p.x, t, p.eps), (gamma,), **options)

    def twice() -> None:
        with torch.random.fork_rng(devices=[p.x.device] if p.x.is_cuda else []):
            torch.manual_seed(seed)  # torch draws the directions
            torch.autograd.gradgradcheck(
                lambda a, b: call(a * p.rms, b, p.eps), (unit, gamma), gen_non_contig_grad_outputs=True, **options
            )

    yield judge.ask("dx", p.name, f"dy/dx against finite differences {how}", along_x)
    yield judge.ask("dgamma", p.name, f"dy/dgamma against finite differences {how}", along_gamma)
    if table.second:
        yield judge.ask("properties", p.name, f"second derivatives against finite differences {how}", twice)


def check_formulas(judge: Judge, p: "Probe", seed: int) -> Iterator[CaseResult]:
    """Judge the reference's explicit backward against autograd and complex steps, and its own derivative."""
    from rmsnorm_cli.judging.derivatives import by_autograd, complex_step, relative, second_derivative
    from rmsnorm_cli.kernels import reference

    traced = by_autograd(reference.forward)
    dx, dgamma = reference.backward(p.dy, p.x, p.gamma, p.eps)
    assert dgamma is not None  # there is a gamma
    explicit = (dx, dgamma)
    automatic = traced(p.dy, p.x, p.gamma, p.eps)
    scopes: tuple[Scope, Scope] = ("dx", "dgamma")
    rstd = float(reference.statistics(p.x, p.eps).max())
    term = rstd * float((p.gamma * p.dy).abs().max())  # of dx: rstd · u
    terms = {"dx": term, "dgamma": 0.0, "dy": 0.0, "x": rstd * term, "gamma": rstd * float(p.dy.abs().max())}
    for i, scope in enumerate(scopes):
        got, auto = explicit[i], automatic[i].detach()
        yield judge.ask(scope, p.name, "explicit backward against autograd", partial(relative, got, auto, terms[scope]))
    if p.x.numel() <= 4 * WIDE:
        stepped = complex_step(p)
        for i, scope in enumerate(scopes):
            got, want = explicit[i], stepped[i]
            yield judge.ask(
                scope, p.name, "explicit backward against complex steps", partial(relative, got, want, terms[scope])
            )
    pair = [second_derivative(b, p, seed) for b in (reference.backward, traced)]
    for got, want, of in zip(*pair, ("dy", "x", "gamma"), strict=True):
        yield judge.ask(
            "properties",
            p.name,
            f"second derivative of the explicit backward with respect to {of} against autograd",
            partial(relative, got, want, terms[of]),
        )


def check_implementation(
    impl: "Implementation", p: "Probe", execution: Any, table: "Gradcheck", seed: int
) -> Iterator[CaseResult]:
    """Yield every verdict about one implementation at one shape."""
    import torch

    from rmsnorm_cli.gates.gate import ELSEWHERE
    from rmsnorm_cli.kernels.contract import CallSpec

    spec = CallSpec(tuple(p.x.shape), p.x.dtype, p.gamma.dtype, True, p.eps, p.x.device.type)
    reason = impl.accepts(spec) if impl.accepts else None
    if reason:
        detail = f"{impl.name} itself was not tested here: {reason}"
        yield CaseResult(impl.name, execution, "properties", "gradcheck", "float64", p.name, "skipped", detail=detail)
        return
    program = {"reference": "the readable reference through autograd"}.get(impl.name, f"{impl.name} itself, in float64")
    asked = table.model_copy(update={"second": table.second and not impl.isolated})
    yield from check_call(Judge(impl.name, execution, program), impl.call, p, asked, seed)
    if asked.second != table.second:
        detail = f"{program}: second derivatives: {ELSEWHERE}"
        yield CaseResult(impl.name, execution, "properties", "gradcheck", "float64", p.name, "skipped", detail=detail)
    if impl.name == "reference":
        yield from check_formulas(Judge(impl.name, execution, "the explicit backward formula"), p, seed)
    if impl.name == "fused" and table.opcheck:
        from rmsnorm_cli.kernels import ops

        def registered() -> None:
            x, gamma = (t.detach().clone().requires_grad_() for t in (p.x, p.gamma))
            with warnings.catch_warnings(action="ignore"):  # Dynamo asks for a .grad, and warns of it itself
                torch.library.opcheck(ops.fused_forward, (x, gamma, p.eps))

        judge = Judge(impl.name, execution, "the registered operator")
        question = "opcheck: schema, autograd, fake tensor and dispatch are registered; it judges no number"
        yield judge.ask("properties", p.name, question, registered)


def run(settings: "Settings", run: "Run", console: "Console", device: "Device") -> Outcome:
    """Check every shape of every implementation in float64, and write the partitions that `train` will use."""
    from rmsnorm_cli.gates.gate import one_thread
    from rmsnorm_cli.judging.derivatives import KILLING
    from rmsnorm_cli.kernels.foreign import opened

    results: list[CaseResult] = []
    names = list(dict.fromkeys(("reference", *settings.run.impl)))  # the reference judges the others, so it comes first
    table, scales = settings.gradcheck, (KILLING, (1.0, settings.operator.eps))
    shapes = [(rows, cols, *scale) for rows in table.rows for cols in table.cols for scale in scales]
    total = len(shapes) * len(names)
    with ExitStack() as stack, console.progress("gradcheck", total) as progress, one_thread(device.execution):
        place, rounding = device.torch_device, settings.run.rounding
        for impl in [stack.enter_context(opened(name, place, rounding, keep=run.write)) for name in names]:
            for result in ask(impl, shapes, settings, device, progress):
                run.record(result.record())
                results.append(result)
    hashes = write_partitions(settings, run)
    counts = count(results)
    return Outcome(
        status=overall(counts),
        execution=device.execution,
        counts=counts,
        summary={"partitions": hashes, "checks": [result.record() for result in results]},
        tables=(summary_table(results), *failures(results)),
        notes=(
            *(f"partition {name}: sha256 {value}" for name, value in hashes.items()),
            "What this proves: the named program's derivatives at these float64 inputs. A kernel that takes no float64 "
            "is judged by verify; the reference's derivatives are evidence about the oracle, not about a kernel.",
        ),
        results=tuple(results),
    )


def ask(
    impl: "Implementation",
    shapes: Sequence[tuple[int, int, float, float]],
    settings: "Settings",
    device: "Device",
    progress: "Progress",
) -> Iterator[CaseResult]:
    """Yield every verdict about one implementation, each shape being rows, cols, rms and eps.

    One that gives no answer three times running is not asked on.
    """
    from rmsnorm_cli.environment import executes_on
    from rmsnorm_cli.judging.derivatives import probe

    execution, silent = executes_on(impl, device), 0
    for shape in shapes:
        p = probe(*shape, settings.run.seed, device.torch_device)
        for result in check_implementation(impl, p, execution, settings.gradcheck, settings.run.seed):
            yield result
            silent = silent + 1 if result.status == "error" else 0 if result.status != "skipped" else silent
            if silent == PATIENCE:
                text = f"{impl.name}: {PATIENCE} questions running had no answer; the rest was not asked"
                yield CaseResult(impl.name, execution, "properties", "asked", "float64", "all", "error", detail=text)
                return
        progress.advance(1, f"{impl.name} {p.name}")


def write_partitions(settings: "Settings", run: "Run") -> dict[str, str]:
    """Write train, validation and test data into the run directory and return their hashes."""
    import io

    import torch

    from rmsnorm_cli import network

    partitions = network.partitions(settings.run.seed, settings.data)
    for name, data in partitions.items():
        buffer = io.BytesIO()
        torch.save({"inputs": data.inputs, "targets": data.targets}, buffer)
        run.write(f"partitions/{name}.pt", buffer.getvalue())
    return {name: data.sha256 for name, data in partitions.items()}


def summary_table(results: list[CaseResult]) -> Table:
    """Return one row per program and question, with the worst case."""
    groups: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        groups.setdefault((result.impl, result.scope, result.detail.split(": relative error")[0]), []).append(result)
    rows = []
    for (impl, scope, question), members in groups.items():
        worst = max((m.worst for m in members if m.worst is not None), default=None)
        verdict = ", ".join(f"{n} {status}" for status, n in count(members).items() if n)
        rows.append((impl, scope, question, verdict, "" if worst is None else f"{worst * EXACT:.1e}"))
    return Table("gradcheck, float64", ("impl", "scope", "program and question", "verdict", "error"), tuple(rows))


def failures(results: list[CaseResult]) -> tuple[Table, ...]:
    """Return a table of what failed or gave no answer, or none."""
    shown = [r for r in results if r.status in ("failed", "error")]
    rows = tuple((r.impl, r.scope, r.status, r.case, r.detail) for r in shown)
    columns = ("impl", "scope", "status", "case", "what was seen")
    return (Table("what did not pass", columns, rows, prose=True),) if rows else ()
