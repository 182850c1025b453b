"""Gate "identities": relations that hold for RMSNorm whatever the numbers are, with no oracle behind them.

`relations.py` holds them. Scaling by powers of two, signs, zeros and gamma's separation are exact in floating point, so
our implementations must keep them bit for bit; others within twice the declared tolerance. Relations between sums
(⟨dx, x⟩ = eps·rstd²·⟨dy, y⟩ is the sharpest test of dx's second term) must hold within what rounding explains.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rmsnorm_cli.gates.gate import Asked, Tolerances, answer, device_type, inside
from rmsnorm_cli.gates.relations import RELATIONS, Base, Claim, Unanswered, complete
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.judging.budget import budget
from rmsnorm_cli.judging.tolerances import Tolerance
from rmsnorm_cli.results import CaseResult, Execution, Scope

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.kernels.api import Implementation

NAME = "identities"
SCOPES: tuple[Scope, ...] = ("properties",)
SHAPES = ((4, 257), (3, 64))
ON_GPU = ((33, 1000), (300, 4096))
MOST_COMPILED = 1  # of a costly implementation: relations with another eps or width compile too
# With 1 + gamma for gamma, a multiple of gamma is no multiple of the weight.
NOT_OF_GEMMA = frozenset({"linear in gamma", "gamma zero", "gamma and dy only as a product", "⟨gamma, dgamma⟩"})
TRUNCATED = "Triton's interpreter truncates bfloat16 stores instead of rounding them"


def plan(settings: "Settings", impl: "Implementation", execution: Execution) -> list[Case]:
    """Return a few widths in every dtype of the contract, u = x̂ + z/2 so that no term is small."""
    verify, eps, seed = settings.verify, settings.operator.eps, settings.run.seed
    shapes = SHAPES + (ON_GPU if execution == "cuda" else ())
    asked = [cases.case(shape, dtype, "aligned", eps, seed) for dtype in verify.dtypes for shape in shapes]
    return inside(impl, asked, device_type(execution), MOST_COMPILED)


def check(
    impl: "Implementation", case: Case, execution: Execution, device: str, tolerances: Tolerances
) -> list[CaseResult]:
    """Return one verdict for each relation."""
    asked = Asked(impl, execution, NAME, case)
    inputs = cases.tensors(case, device)
    try:
        got = complete(answer(impl, inputs.pristine(), case.eps))
    except Unanswered as stop:
        return [asked.verdict("properties", stop.problem.status, stop.problem.text)]
    want = cases.oracle(inputs, case.eps, impl.rounding)
    base = Base(impl, inputs, case.eps, got, want, budget(inputs, want, impl.rounding))
    tolerance = tolerances[case.dtype]
    left_out = NOT_OF_GEMMA if impl.rounding == "gemma" else frozenset()
    named = {name: relation for name, relation in RELATIONS.items() if name not in left_out}
    return [_judged(asked, name, relation, base, tolerance) for name, relation in named.items()]


def _judged(
    asked: Asked, name: str, relation: Callable[[Base], list[Claim]], base: Base, tolerance: Tolerance
) -> CaseResult:
    try:
        claims = relation(base)
    except Unanswered as stop:
        return asked.verdict("properties", stop.problem.status, stop.problem.text, case=name)
    truncated = asked.execution == "interpreter" and asked.question.dtype == "bfloat16"
    worst = 0.0
    for claim in claims:
        if claim.bound is not None and truncated:
            return asked.verdict("properties", "skipped", TRUNCATED, case=name)
        share = _share(claim, base, tolerance)
        if share > 1:
            detail = f"{claim.what} does not hold: {_example(claim)}"
            return asked.verdict("properties", "failed", detail, case=name, worst=None if share > 1e30 else share)
        worst = max(worst, share)
    return asked.verdict("properties", "passed", case=name, worst=worst)


def _share(claim: Claim, base: Base, tolerance: Tolerance) -> float:
    """Return the largest difference as a fraction of what is allowed; infinite where nothing is and one is there."""
    if claim.left.shape != claim.right.shape or claim.left.dtype != claim.right.dtype:
        return float("inf")
    left, right = claim.left.double(), claim.right.double()
    difference = (left - right).abs()
    if claim.bound is not None:
        return _largest(difference / claim.bound)
    if base.impl.ours:
        return float("inf") if bool((difference != 0).any()) else 0.0  # a NaN differs from everything
    by = torch.ones_like(right) if claim.scale is None else claim.scale
    return _largest(difference / by / (2 * (tolerance.atol + tolerance.rtol * (right / by).abs())))


def _largest(share: Tensor) -> float:
    return float(torch.nan_to_num(share, nan=float("inf")).max()) if share.numel() else 0.0


def _example(claim: Claim) -> str:
    if claim.left.shape != claim.right.shape:
        return f"shapes {tuple(claim.left.shape)} and {tuple(claim.right.shape)}"
    off = (claim.left.double() - claim.right.double()).abs().nan_to_num(nan=float("inf"))
    where = int(off.argmax())
    return f"{float(claim.left.flatten()[where])!r} against {float(claim.right.flatten()[where])!r} at element {where}"
