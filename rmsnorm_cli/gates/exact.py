"""Gate "exact class": inputs for which y, dx and dgamma are exact in every dtype and order of summation.

x = ±1 and eps = 3 make rstd exactly ½; gamma = ±1 or ±2; columns in pairs whose u·x are 1 + 2s and 1 − 2s make
mean(u·x̂) exactly ½, for any width. Each result must be the oracle rounded once: any slip shows as a multiple of ⅛.
An implementation that is not ours may multiply by a precomputed 1/N, which costs it one ULP of dx in float32 where N is
no power of two.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rmsnorm_cli.gates.gate import NUMERIC, Asked, Tolerances, answer, device_type, inside, part
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.numerics import compare
from rmsnorm_cli.judging.tolerances import Tolerance
from rmsnorm_cli.results import CaseResult, Execution, Scope

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.kernels.api import Implementation

NAME = "exact class"
SCOPES: tuple[Scope, ...] = NUMERIC
SHAPES = ((1, 1), (3, 2), (5, 3), (17, 8), (33, 257), (17, 1000), (5, 1025), (3, 4096))  # ≤ 64 rows: dgamma is exact
EXACTLY = Tolerance(0.0, 0.0)


def plan(settings: "Settings", impl: "Implementation", execution: Execution) -> list[Case]:
    """Return widths on both sides of powers of two in every dtype of the contract."""
    verify, seed = settings.verify, settings.run.seed
    asked = [cases.case(shape, dtype, "exact", cases.EXACT_EPS, seed) for dtype in verify.dtypes for shape in SHAPES]
    return inside(impl, asked, device_type(execution))


def check(
    impl: "Implementation", case: Case, execution: Execution, device: str, tolerances: Tolerances
) -> list[CaseResult]:
    """Return one verdict for each of forward, dx and dgamma."""
    asked = Asked(impl, execution, NAME, case)
    inputs = cases.tensors(case, device)
    if impl.rounding == "gemma" and inputs.gamma is not None:  # it multiplies by 1 + gamma, which must be exact
        inputs = Inputs(inputs.x, inputs.gamma - 1, inputs.dy)
    kept = inputs.pristine()
    got = answer(impl, inputs, case.eps)
    want = cases.oracle(kept, case.eps, impl.rounding)
    results = []
    for scope in SCOPES:
        problem = got.problem(scope)
        if problem is not None:
            results.append(asked.verdict(scope, problem.status, problem.text))
        else:
            results.append(_judged(asked, scope, part(got, scope), part(want, scope), case))
    return results


def _judged(asked: Asked, scope: Scope, got: Tensor | None, want: Tensor | None, case: Case) -> CaseResult:
    if got is None or want is None:
        return asked.verdict(scope, "failed", "autograd returned no gradient")
    dtype = getattr(torch, case.dtype)
    allowed = EXACTLY
    if scope == "dx" and not asked.impl.ours and case.dtype == "float32":
        allowed = Tolerance(0.0, torch.finfo(dtype).eps)
    found = compare(got, want.to(dtype).double(), allowed, dtype=dtype)
    if found.ok:
        return asked.verdict(scope, "passed")
    return asked.verdict(scope, "failed", found.detail, hint="in multiples of 1/8, this is how far off a term is")
