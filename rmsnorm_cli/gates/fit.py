"""Gate "fit": what an implementation really used, read off its results and said in words.

Rows whose rms runs from where eps is most of the mean square to where it is nothing, and u = x̂ + z/2, so that no term
is small. `readings.py` regresses y, dx and dgamma on the terms of the formula, and `findings.py` says what comes out:
"the mean square is divided by 512 instead of 257", "eps is left out", "declared fp32, but rounds where Llama's norm
does". The known mistake that gives the same result (`hypotheses.py`), if there is one, is the hint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from rmsnorm_cli.gates import findings, readings
from rmsnorm_cli.gates.gate import NUMERIC, Answer, Asked, Tolerances, device_type, inside, part
from rmsnorm_cli.gates.hypotheses import Terms, explain
from rmsnorm_cli.gates.identities import TRUNCATED
from rmsnorm_cli.gates.readings import Forward, Number
from rmsnorm_cli.gates.rounding import ANY, answered
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.numerics import compare
from rmsnorm_cli.judging.tolerances import Tolerance
from rmsnorm_cli.results import CaseResult, Execution, Scope

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.kernels.api import Implementation

NAME = "fit"
SCOPES: tuple[Scope, ...] = NUMERIC
SHAPES = ((8, 257), (24, 1000))
ON_GPU = ((64, 4096), (300, 1023))


def plan(settings: "Settings", impl: "Implementation", execution: Execution) -> list[Case]:
    """Return two widths off powers of two in every dtype of the contract; more rows on a GPU."""
    verify, eps, seed = settings.verify, settings.operator.eps, settings.run.seed
    shapes = SHAPES + (ON_GPU if execution == "cuda" else ())
    asked = [cases.case(shape, dtype, "graded", eps, seed) for dtype in verify.dtypes for shape in shapes]
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
    return [_verdict(Fit(asked, case, kept, got), scope, part(want, scope)) for scope in SCOPES]


@dataclass(frozen=True)
class Read:
    """What was read off one result: the numbers, what is wrong in words, and all of it in a few words."""

    numbers: Sequence[Number]
    wrong: Sequence[str]
    short: str


@dataclass(frozen=True)
class Fit:
    """One question and its answer, to be read."""

    asked: Asked
    case: Case
    given: Inputs
    got: Answer

    @cached_property
    def terms(self) -> Terms:
        """Return the terms of the formula, with what the declared convention multiplies by for gamma."""
        assert self.given.gamma is not None
        gamma = self.given.gamma.double() + (1 if self.asked.impl.rounding == findings.GEMMA else 0)
        return Terms(self.given.x.double(), gamma, self.given.dy.double(), self.case.eps)

    @cached_property
    def slack(self) -> readings.Slack:
        """Return how far rounding may move what is read."""
        return readings.slack(self.given.x.dtype, self.asked.impl.rounding, self.case.N)

    @cached_property
    def of_y(self) -> Forward:
        """Return what y tells."""
        assert self.got.y is not None
        return readings.of_y(self.got.y.double(), self.terms, self.slack)

    def forward(self) -> Read:
        """Read divisor, eps, gamma and the order of rounding off y."""
        assert self.got.y is not None
        f, t, impl = self.of_y, self.terms, self.asked.impl
        wrong = list(findings.of_forward(f, t, self.slack))
        order = readings.order(self.got.y, t, f.offset.got) if self.got.y.element_size() == 2 else ""
        found = findings.convention(f.offset.got, order, impl.rounding)
        if found not in ("", impl.rounding):
            wrong.append(findings.contradiction(impl.rounding, found, order, ":" in impl.name, self.case.dtype))
        elif order and not found:
            wrong.append(f"{order} to {self.case.dtype}")
        under = f.root
        short = (
            f"divides by {t.N / under.shrink.got:.8g}, eps {under.eps.got * t.eps:.6g}, {found or 'rounding not read'}"
        )
        return Read(f.numbers, wrong, short)

    def dx(self) -> Read:
        """Read the coefficients of u and x off dx, with the row's rstd; where y has another, with that one too."""
        assert self.got.dx is not None
        dx, t = self.got.dx.double(), self.terms
        b = readings.of_dx(dx, t, t.r, self.slack)
        wrong = list(findings.of_dx(b, t, self.slack))
        if wrong and self._used_another_rstd():
            again = readings.of_dx(dx, t, self.of_y.root.rstd, self.slack)
            wrong = _as_in_y(list(findings.of_dx(again, t, self.slack)), "dx")
        short = f"dx is {b.of_first[1].got:.8g}·rstd·u − {b.of_second[1].got:.8g}·x·rstd³·mean(u·x)"
        return Read(b.numbers, wrong, short)

    def dgamma(self) -> Read:
        """Read off which multiple of the sum over rows dgamma is."""
        assert self.got.dgamma is not None
        dgamma, t = self.got.dgamma.double(), self.terms
        s = readings.of_dgamma(dgamma, t, t.r, self.slack)
        wrong = list(findings.of_dgamma(s, t))
        if wrong and self._used_another_rstd():
            again = readings.of_dgamma(dgamma, t, self.of_y.root.rstd, self.slack)
            wrong = _as_in_y(list(findings.of_dgamma(again, t)), "dgamma")
        return Read(s.numbers, wrong, f"dgamma is {s.scale.got:.8g}·Σ dy·x̂")

    def _used_another_rstd(self) -> bool:
        return self.got.y is not None and self.of_y.left.ok and not all(number.ok for number in self.of_y.numbers)


def _as_in_y(wrong: list[str], name: str) -> list[str]:
    if not wrong:
        return [f"{name} is right for the rstd that y was made with"]
    return [f"with the rstd that y was made with, {each}" for each in wrong]


def _verdict(fit: Fit, scope: Scope, want: Tensor | None) -> CaseResult:
    asked, result, problem = fit.asked, part(fit.got, scope), fit.got.problem(scope)
    assert want is not None
    if problem is not None:
        return asked.verdict(scope, problem.status, problem.text)
    if result is None:
        return asked.verdict(scope, "failed", "autograd returned no gradient")
    seen = compare(result, want, ANY, dtype=fit.given.x.dtype)
    if not seen.ok:
        return asked.verdict(scope, "failed", seen.detail)
    read: Callable[[], Read] = {"forward": fit.forward, "dx": fit.dx, "dgamma": fit.dgamma}[scope]
    found = read()
    worst = max(number.share for number in found.numbers)
    if worst <= 1 and not found.wrong:
        return asked.verdict(scope, "passed", found.short, worst=worst, extra={"read": found.short})
    words = "; ".join(dict.fromkeys(found.wrong)) or f"not what rounding gives: {found.short}"
    hint = _known_mistake(fit, scope, result, want)
    return asked.verdict(scope, "failed", words, worst=worst, hint=hint, extra={"read": words})


def _known_mistake(fit: Fit, scope: Scope, result: Tensor, want: Tensor) -> str:
    """Return the known mistakes that give the same result but for rounding, or ""."""
    near = 4 * fit.slack.store + 64 * fit.slack.inner
    multiplied = Inputs(fit.given.x, fit.terms.gamma, fit.given.dy)
    scale = fit.terms.r if scope == "dx" else None
    if compare(result, want, Tolerance(near, near), dtype=result.dtype, scale=scale).ok:
        return ""  # so near to what is right that any small mistake would fit
    return explain(scope, result, multiplied, fit.case.eps, Tolerance(near, near), scale)
