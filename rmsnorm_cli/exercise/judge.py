"""One run of an implementation on one input, compared with the right answer and with a predicted wrong one."""

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from rmsnorm_cli.faults.examples import Example, inputs
from rmsnorm_cli.faults.fault import Fault
from rmsnorm_cli.gates.gate import Answer, answer
from rmsnorm_cli.gates.hypotheses import Terms
from rmsnorm_cli.inputs.cases import Case, oracle
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.numerics import Comparison, compare, dx_scale
from rmsnorm_cli.judging.oracle import Oracle
from rmsnorm_cli.judging.tolerances import DECLARED

if TYPE_CHECKING:
    from rmsnorm_cli.kernels.api import Implementation

TENSORS = ("y", "dx", "dgamma")


@dataclass(frozen=True)
class Judged:
    """What came out for one input; `parts` holds y, dx and dgamma against the oracle, by the declared tolerance."""

    given: Inputs
    eps: float
    got: Answer
    want: Oracle
    parts: dict[str, Comparison]

    @property
    def ok(self) -> bool:
        """Tell whether everything is right."""
        return all(part.ok for part in self.parts.values())

    @property
    def wrong(self) -> tuple[str, ...]:
        """Return the names of the tensors that are wrong or missing."""
        return tuple(name for name, part in self.parts.items() if not part.ok)

    def predicted(self, fault: Fault) -> dict[str, Tensor]:
        """Return the wrong values that algebra predicts, in the shapes of the results; none where it predicts none."""
        if fault.predicted is None:
            return {}
        x, gamma, dy = (_flat(tensor) for tensor in (self.given.x, self.given.gamma, self.given.dy))
        wrong = fault.predicted(Terms(x, gamma[0], dy, self.eps))
        return {name: values.reshape(getattr(self.want, name).shape) for name, values in wrong.items()}

    def agreement(self, fault: Fault) -> dict[str, Comparison]:
        """Compare what came out with the prediction, and with the right answer where the mistake touches nothing."""
        foreseen = self.predicted(fault)
        return {name: self.compared(name, foreseen.get(name, getattr(self.want, name))) for name in TENSORS}

    def compared(self, name: str, want: Tensor) -> Comparison:
        """Compare y, dx or dgamma with float64 values by the declared tolerance."""
        got = getattr(self.got, name)
        if got is None:
            problem = self.got.problem("forward" if name == "y" else "dx")
            return Comparison(False, detail=problem.text if problem else "there is no gradient")
        dtype = self.given.x.dtype
        scale = dx_scale(self.want.rstd) if name == "dx" else None
        return compare(got, want, DECLARED[str(dtype).removeprefix("torch.")], dtype=dtype, scale=scale)


def judge(impl: "Implementation", question: Case | Example, device: str) -> Judged:
    """Run forward and backward once on inputs of its own and compare y, dx and dgamma with float64."""
    given, want = _prepared(question, device)
    got = answer(impl, inputs(question, device), question.eps)  # fresh inputs: a mistake may write over them
    seen = Judged(given, question.eps, got, want, {})
    return replace(seen, parts={name: seen.compared(name, getattr(want, name)) for name in TENSORS})


@functools.lru_cache(maxsize=8)
def _prepared(question: Case | Example, device: str) -> tuple[Inputs, Oracle]:
    """Return inputs and oracle, made once: the same question is put to many mistakes."""
    given = inputs(question, device)
    return given, oracle(given, question.eps)


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().double().reshape(-1, tensor.shape[-1])
