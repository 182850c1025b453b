"""The verifier's test of itself: implementations known to be right or wrong, judged by the gates that judge others.

A right one that a gate rejects, or a wrong one that its gate lets pass, means that no verdict of this process can be
trusted on this machine: `examine` then raises VerifierUntrusted and names it.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmsnorm_cli.errors import VerifierUntrusted
from rmsnorm_cli.gates import (
    candidates,
    contract,
    declared,
    determinism,
    exact,
    fit,
    identities,
    memory,
    rounding,
    wiring,
)
from rmsnorm_cli.gates.candidates import Norm
from rmsnorm_cli.gates.gate import Gate, Tolerances
from rmsnorm_cli.gates.refusals import questions
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.results import CaseResult, Execution, Status

if TYPE_CHECKING:
    from rmsnorm_cli.kernels.api import Implementation

NAME = "controls"
GOOD = "good"


@dataclass(frozen=True)
class Control:
    """A candidate made afresh by `make`, and the gate that must reject it; GOOD: none may."""

    name: str
    make: Callable[[], Norm]
    rejected_by: str
    rounding: str = "fp32"


def _as(norm: Norm) -> Callable[[], Norm]:
    return lambda: norm


CONTROLS: tuple[Control, ...] = (
    Control("eager formula", _as(candidates.eager), GOOD),
    Control("PyTorch's own", _as(candidates.native), GOOD),
    Control("kernel-like, sums by halves", candidates.TREE.norm, GOOD),
    Control("llama, judged as llama", _as(candidates.llama), GOOD, "llama"),
    Control("gemma, judged as gemma", _as(candidates.gemma), GOOD, "gemma"),
    Control("no normalisation at all", candidates.NO_NORM.norm, declared.NAME),
    Control("zeros", candidates.ZEROS.norm, declared.NAME),
    Control("NaN everywhere", candidates.NANS.norm, declared.NAME),
    Control("one NaN", candidates.ONE_NAN.norm, declared.NAME),
    Control("one infinity in dx", candidates.ONE_INF.norm, declared.NAME),
    Control("one wrong element", candidates.ONE_WRONG.norm, declared.NAME),
    Control("wrong dtype, right values", _as(candidates.wrong_dtype), declared.NAME),
    Control("one number a row, to be broadcast", _as(candidates.broadcast), declared.NAME),
    Control("cut off from autograd", _as(candidates.cut_off), declared.NAME),
    Control("float16 inside float32", candidates.HALF_INSIDE.norm, declared.NAME),
    Control("second term of dx missing", candidates.NO_SECOND_TERM.norm, declared.NAME),
    Control("dgamma a mean over rows", candidates.MEAN_OVER_ROWS.norm, declared.NAME),
    Control("the first answer kept", candidates.stale, declared.NAME),
    Control("right on the first call only", candidates.only_once, declared.NAME),
    Control("the oracle's answer, read from memory", _as(candidates.peeking), declared.NAME),
    Control("divided by the padded block", candidates.PADDED.norm, exact.NAME),
    Control("float16 cut, not rounded", candidates.in_half(candidates.CUT), rounding.NAME),
    Control("dgamma summed from float16", candidates.in_half(candidates.PARTIALS_IN_HALF), rounding.NAME),
    Control("small squares lost in float16", candidates.in_half(candidates.SQUARES_LOST), fit.NAME),
    Control("llama, judged as if it rounded once", _as(candidates.llama), fit.NAME),
    Control("gemma, judged as if by gamma alone", _as(candidates.gemma), fit.NAME),
    Control("last row unwritten", _as(candidates.row_unwritten), memory.NAME),
    Control("written past the end", candidates.PAST_THE_END.norm, memory.NAME),
    Control("input overwritten", _as(candidates.in_place), memory.NAME),
    Control("dy overwritten", candidates.DY_CHANGED.norm, memory.NAME),
    Control("unordered 16-bit sum", candidates.UNORDERED.norm, determinism.NAME),
    Control("second term of dx missing, by an identity", candidates.NO_SECOND_TERM.norm, identities.NAME),
    Control("change in place unnoticed", candidates.UNWATCHED.norm, wiring.NAME),
    Control("second derivative without rstd's", _as(candidates.rstd_as_constant), wiring.NAME),
    Control("length of gamma not looked at", _as(candidates.forgetful), contract.NAME),
)


def examine(execution: Execution, device: str, tolerances: Tolerances, seed: int | None = None) -> list[CaseResult]:
    """Judge every control on `device` and return a passed verdict for each; raise VerifierUntrusted otherwise.

    Without a seed the inputs come from a fresh one at each call: nothing can be right for a published one alone.
    """
    seed = secrets.randbelow(2**31) if seed is None else seed
    results = [_examined(control, execution, device, tolerances, seed) for control in CONTROLS]
    wrong = [result for result in results if result.status != "passed"]
    if wrong:
        listed = "; ".join(f"{result.case}: {result.detail}" for result in wrong)
        raise VerifierUntrusted(f"the verifier is not trustworthy here, {len(wrong)} controls misjudged: {listed}")
    return results


def _examined(control: Control, execution: Execution, device: str, tolerances: Tolerances, seed: int) -> CaseResult:
    where: Execution = "cuda" if execution == "cuda" else "cpu"
    gates = tuple(QUESTIONS) if control.rejected_by == GOOD else (control.rejected_by,)
    rejected = []
    for name in gates:
        gate, asked = QUESTIONS[name]
        impl = _implementation(control)
        for question in asked(seed):
            verdicts = gate.check(impl, question, where, device, tolerances)
            rejected += [verdict for verdict in verdicts if verdict.status not in ("passed", "skipped")]
    expected_rejection = control.rejected_by != GOOD
    as_it_should = bool(rejected) == expected_rejection and all(v.status == "failed" for v in rejected)
    detail = f"rejected by {rejected[0].gate}: {rejected[0].detail}" if rejected else f"passed {', '.join(gates)}"
    status: Status = "passed" if as_it_should else "failed"
    return CaseResult(NAME, where, "properties", NAME, "", control.name, status, detail=detail, extra={"seed": seed})


def _implementation(control: Control) -> "Implementation":
    from rmsnorm_cli.kernels.api import Implementation

    judged_strictly = control.rejected_by in (determinism.NAME, wiring.NAME)
    return Implementation(
        control.name,
        control.make(),
        rounding=control.rounding,  # type: ignore[arg-type]
        deterministic=judged_strictly,
    )


def _numeric(seed: int) -> list[Any]:
    """Return cases that share shapes, so that an answer kept from one is wrong for the next."""
    asked = (("float32", "spread"), ("float32", "aligned"), ("float16", "offset"), ("float16", "tiny"))
    return [cases.case((5, 33), dtype, name, 1e-6, seed) for dtype, name in asked]


def _exact(seed: int) -> list[Any]:
    return [cases.case((5, 33), dtype, "exact", cases.EXACT_EPS, seed) for dtype in ("float32", "float16")]


def _one(seed: int) -> list[Any]:
    return [cases.case((5, 33), dtype, "aligned", 1e-6, seed) for dtype in ("float32", "float16")]


def _rounded(seed: int) -> list[Any]:
    asked = (((5, 257), "float32", "aligned"), ((5, 257), "float16", "aligned"), ((17, 257), "float16", "parallel"))
    return [cases.case(shape, dtype, name, 1e-6, seed) for shape, dtype, name in asked]


def _graded(seed: int) -> list[Any]:
    return [cases.case((8, 257), dtype, "graded", 1e-6, seed) for dtype in ("float32", "float16")]


def _repeated(seed: int) -> list[Any]:
    return [determinism.Repeated(cases.case((65, 33), "float16", "spread", 1e-6, seed), 3)]


def _lengths(seed: int) -> list[Any]:
    return [question for question in questions("any", cuda=False) if question.expect == "refuse"]


QUESTIONS: dict[str, tuple[Gate, Callable[[int], list[Any]]]] = {
    contract.NAME: (contract, _lengths),
    memory.NAME: (memory, _one),
    exact.NAME: (exact, _exact),
    declared.NAME: (declared, _numeric),
    rounding.NAME: (rounding, _rounded),
    fit.NAME: (fit, _graded),
    identities.NAME: (identities, _one),
    wiring.NAME: (wiring, _one),
    determinism.NAME: (determinism, _repeated),
}
