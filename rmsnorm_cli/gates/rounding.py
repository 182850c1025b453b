"""Gate "rounding budget": whether an error is what rounding alone would give.

The declared tolerance leaves a right kernel hundreds of times the error it makes. This gate asks for what is left when
one rounding at the store and a few inside are taken off: ULPs of y, the share that is mis-rounded, what all elements of
a row have in common, the errors of dx and dgamma in roundings of their terms, and the ratio to the error that plain
eager operations make in the same precision. `judging/budget.py` holds the limits.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rmsnorm_cli.gates import candidates
from rmsnorm_cli.gates.gate import NUMERIC, Answer, Asked, Tolerances, answer, device_type, inside, part
from rmsnorm_cli.gates.identities import TRUNCATED
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.budget import Budget, Measure, against_eager, budget, cut, of_gradient, of_y
from rmsnorm_cli.judging.numerics import compare
from rmsnorm_cli.judging.oracle import Oracle
from rmsnorm_cli.judging.tolerances import Tolerance
from rmsnorm_cli.results import CaseResult, Execution, Scope

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.kernels.api import Implementation

NAME = "rounding budget"
SCOPES: tuple[Scope, ...] = NUMERIC
# Rows of all sizes show eps and 16-bit intermediates, `parallel` the second term of dx alone, many rows the sum over
# them, wide rows the sum along them. The catalogue of mistakes names inputs of the first shapes.
QUESTIONS = (
    ((7, 258), "spread"),
    ((7, 258), "large"),
    ((7, 258), "parallel"),
    ((67, 257), "parallel"),
    ((17, 1000), "aligned"),
    ((5, 4096), "spread"),
)
ON_GPU = (((4099, 1000), "spread"), ((300, 4096), "aligned"), ((67, 16384), "spread"))
EAGER = {"fp32": candidates.eager, "llama": candidates.llama, "gemma": candidates.gemma}
ANY = Tolerance(math.inf, 0.0)  # compares shape, dtype, device, and where numbers are not finite
HINTS = {
    "ULP": "more is lost than at the store: something inside is rounded, kept or summed in too few bits",
    "mis-rounded": "y is rounded twice, or cut instead of rounded",
    "gain of": "all elements of a row are off alike: rstd, the divisor, eps, or a cut instead of a rounding",
    "mean gain": "all rows are off alike: the divisor, eps, or a cut instead of a rounding",
    "error of dx": "rstd is kept, or gamma·dy made, in too few bits; or a term of dx is a little off",
    "error of dgamma": "what the rows contribute is kept or summed in too few bits",
}
FORMULA = "no rounding is that large: the formula or an address is wrong"
BEYOND = 2e4  # times the limit; what float16 or bfloat16 inside a float32 kernel costs stays below it


def plan(settings: "Settings", impl: "Implementation", execution: Execution) -> list[Case]:
    """Return few inputs in every dtype of the contract; wider and more rows on a GPU."""
    verify, eps, seed = settings.verify, settings.operator.eps, settings.run.seed
    shapes = QUESTIONS + (ON_GPU if execution == "cuda" else ())
    asked = [cases.case(shape, dtype, name, eps, seed) for dtype in verify.dtypes for shape, name in shapes]
    return inside(impl, asked, device_type(execution))


def check(
    impl: "Implementation", case: Case, execution: Execution, device: str, tolerances: Tolerances
) -> list[CaseResult]:
    """Return one verdict for each of forward, dx and dgamma; skipped where the interpreter cannot round."""
    asked = Asked(impl, execution, NAME, case)
    found = answered(asked, case, device)
    if found is None:
        return [asked.verdict(scope, "skipped", TRUNCATED) for scope in SCOPES]
    kept, got, want = found
    judge = Judge(asked, budget(kept, want, impl.rounding), want, _eager(impl, kept, case.eps))
    return [judge.verdict(scope, got) for scope in SCOPES]


def answered(asked: Asked, case: Case, device: str) -> tuple[Inputs, Answer, Oracle] | None:
    """Ask one question and return the inputs, the answer and the oracle; None where the interpreter cannot round."""
    if asked.execution == "interpreter" and case.dtype == "bfloat16":
        return None
    inputs = cases.tensors(case, device)
    kept = inputs.pristine()
    got = answer(asked.impl, inputs, case.eps)
    want = cases.oracle(kept, case.eps, asked.impl.rounding)
    return None if _cut_by_the_interpreter(asked, got, want) else (kept, got, want)


def _cut_by_the_interpreter(asked: Asked, got: Answer, want: Oracle) -> bool:
    """Tell whether y in bfloat16 is cut where it should be rounded, and its kernels may have run in the interpreter.

    What a foreign process runs is not known here: its numbers have to tell.
    """
    if not asked.impl.isolated or asked.execution != "cpu" or asked.question.dtype != "bfloat16" or got.y is None:
        return False
    stored = cut(want.y, torch.bfloat16)
    same = got.y.shape == stored.shape and got.y.dtype == stored.dtype
    return same and float((got.y == stored).double().mean()) > 0.95


def _eager(impl: "Implementation", inputs: Inputs, eps: float) -> Answer | None:
    """Return what plain operations give in the same precision; None for float64, where they are the oracle."""
    if inputs.x.dtype == torch.float64:
        return None
    from rmsnorm_cli.kernels.api import Implementation

    return answer(Implementation("eager", EAGER[impl.rounding]), inputs.pristine(), eps)


@dataclass(frozen=True)
class Judge:
    """What one answer is judged by."""

    asked: Asked
    bounds: Budget
    want: Oracle
    eager: Answer | None

    def verdict(self, scope: Scope, got: Answer) -> CaseResult:
        """Return the verdict on y, dx or dgamma, with every measure that is over its limit."""
        problem = got.problem(scope)
        if problem is not None:
            return self.asked.verdict(scope, problem.status, problem.text)
        found, right = part(got, scope), part(self.want, scope)
        assert right is not None
        if found is None:
            return self.asked.verdict(scope, "failed", "autograd returned no gradient")
        seen = compare(found, right, ANY, dtype=getattr(torch, self.asked.question.dtype))
        if not seen.ok:
            return self.asked.verdict(scope, "failed", seen.detail)
        measures = self.measured(scope, found, right)
        over = [each for each in measures if not each.share <= 1]
        facts = {"measured": {each.what: each.value for each in measures}}
        worst = max(each.share for each in measures)
        if not over:
            return self.asked.verdict(scope, "passed", worst=worst, extra=facts)
        hints = dict.fromkeys(hint for each in over for key, hint in HINTS.items() if key in each.what)
        hint = "; or ".join(hints) if worst < BEYOND else FORMULA
        return self.asked.verdict(scope, "failed", "; ".join(map(str, over)), worst=worst, hint=hint, extra=facts)

    def measured(self, scope: Scope, got: Tensor, want: Tensor) -> list[Measure]:
        """Return every measure of one tensor."""
        name, bound = {
            "forward": ("y", self.bounds.y),
            "dx": ("dx", self.bounds.dx),
            "dgamma": ("dgamma", self.bounds.dgamma),
        }[scope]
        assert bound is not None
        rounding = self.asked.impl.rounding
        found = of_y(got, want, rounding) if scope == "forward" else [of_gradient(name, got, want, bound)]
        plain = None if self.eager is None else part(self.eager, scope)
        if plain is None or scope == "dgamma":
            return found
        return found + against_eager(name, got, plain, want, bound)
