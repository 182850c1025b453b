"""Gate "determinism": repeated runs have the same bits, and a row's bits do not depend on its batch.

Both are promises of `rowwise` and `fused` and judged there. Of other implementations they are reported: `passed` where
they hold, `skipped` with the size of the difference where they do not, unless the implementation promises determinism.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rmsnorm_cli.gates.arena import same_bits
from rmsnorm_cli.gates.gate import Answer, Asked, Tolerances, answer, device_type, inside
from rmsnorm_cli.inputs import cases, thinning
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.results import CaseResult, Execution, Scope

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.kernels.api import Implementation

NAME = "determinism"
SCOPES: tuple[Scope, ...] = ("properties",)
SHAPES = ((17, 257), (5, 1000))
MOST_COMPILED = 1  # of a costly implementation: rows alone and in other places are shapes too
ALONE = 16  # rows that a GPU computes alone: another order of the sum shows in the last bit of one in two to ten
ON_GPU = ((1024, 257), (300, 4096), (4099, 1000))  # more rows than processors, so that programs really race


@dataclass(frozen=True)
class Repeated:
    """A case and how often it is run."""

    case: Case
    repeats: int

    @property
    def id(self) -> str:
        """Return the case's name."""
        return self.case.id

    @property
    def dtype(self) -> str:
        """Return x's dtype."""
        return self.case.dtype


def plan(settings: "Settings", impl: "Implementation", execution: Execution) -> list[Repeated]:
    """Return a few shapes in every dtype of the contract; on a GPU, shapes of many programs as well.

    In the interpreter, where programs run one after another, the default number of runs is smaller.
    """
    verify, eps, seed = settings.verify, settings.operator.eps, settings.run.seed
    shapes = SHAPES + (ON_GPU if execution == "cuda" else ())
    asked = [cases.case(shape, dtype, "spread", eps, seed) for dtype in verify.dtypes for shape in shapes]
    runs = thinning.RUNS if execution == "interpreter" and verify.default_repeats else verify.repeats
    return [Repeated(case, runs) for case in inside(impl, asked, device_type(execution), MOST_COMPILED)]


def check(
    impl: "Implementation", question: Repeated, execution: Execution, device: str, tolerances: Tolerances
) -> list[CaseResult]:
    """Return two verdicts: on repeated runs, and on rows taken out of their batch."""
    asked = Asked(impl, execution, NAME, question)
    inputs = cases.tensors(question.case, device)
    first = answer(impl, inputs.pristine(), question.case.eps).copied()
    problem = first.problem("dgamma")
    if problem is not None:
        return [asked.verdict("properties", problem.status, problem.text)]
    return [_repeated(asked, inputs, first, question), _batches(asked, inputs, first, question.case)]


def _repeated(asked: Asked, inputs: Inputs, first: Answer, question: Repeated) -> CaseResult:
    name = f"{question.repeats} runs"
    for run in range(1, question.repeats):
        again = answer(asked.impl, inputs.pristine(), question.case.eps)
        for part in ("y", "dx", "dgamma"):
            left, right = getattr(first, part), getattr(again, part)
            if not same_bits(left, right):
                detail = f"{part} of run {run + 1} is not what run 1 gave{_apart(left, right)}"
                return _broken(asked, detail, name, "a race, an unordered sum, or memory left over from a call before")
    return asked.verdict("properties", "passed", "the same bits each time", case=name)


def _batches(asked: Asked, inputs: Inputs, whole: Answer, case: Case) -> CaseResult:
    """Compare rows computed alone, and in the reversed batch, with the same rows of the whole batch."""
    name = "rows alone and in other places"
    rows = torch.arange(case.M, device=inputs.x.device)
    first = range(min(ALONE, case.M) if asked.execution == "cuda" else 1)
    for picked in (*(rows[at : at + 1] for at in first), rows[-1:], rows[1 : case.M // 2 + 1], rows.flip(0)):
        part = Inputs(inputs.x[picked], inputs.gamma, inputs.dy[picked])
        alone = answer(asked.impl, part.pristine(), case.eps)
        problem = alone.problem("dx")
        if problem is not None:
            return asked.verdict("properties", problem.status, problem.text, case=name)
        for what in ("y", "dx"):
            left, right = getattr(alone, what), getattr(whole, what)
            if left is None or right is None or not same_bits(left, right[picked]):
                expected = None if right is None else right[picked]
                detail = f"{what} of a row depends on the batch it is in{_apart(left, expected)}"
                return _broken(
                    asked, detail, name, "values leak between rows, or the batch chooses the order of the sum"
                )
    return asked.verdict("properties", "passed", "the same bits in every batch", case=name)


def _broken(asked: Asked, detail: str, name: str, hint: str) -> CaseResult:
    if asked.impl.ours or asked.impl.deterministic:
        return asked.verdict("properties", "failed", detail, case=name, hint=hint)
    return asked.verdict("properties", "skipped", f"reported, not judged: {detail}", case=name)


def _apart(left: Tensor | None, right: Tensor | None) -> str:
    if left is None or right is None or left.shape != right.shape:
        return ""
    return f" (largest difference {float((left.double() - right.double()).abs().max()):.3g})"
