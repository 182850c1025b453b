"""What all gates share: how an implementation is called, how what it raises is classified, how a verdict is written."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from rmsnorm_cli.errors import RmsnormError, flat, of_the_machine
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.inputs.thinning import COMPILED, bounded
from rmsnorm_cli.judging.oracle import Oracle
from rmsnorm_cli.judging.tolerances import Tolerance
from rmsnorm_cli.results import CaseResult, Execution, Scope, Status

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.kernels.api import Implementation

T = TypeVar("T")
ELSEWHERE = "not asked: the implementation ran in a process of its own, and only its wrapper here could answer"
Tolerances = Mapping[str, Tolerance]
CRASHES = {
    "OutOfMemoryError", "MemoryError", "AcceleratorError", "FailOnRecompileLimitHit",
    "ForeignFailure",  # the process of a foreign implementation crashed or hung
}  # fmt: skip
NUMERIC: tuple[Scope, ...] = ("forward", "dx", "dgamma")


class Question(Protocol):
    """What a gate's plan holds: a Case, or a gate's own question; `id` and `dtype` are what tables show."""

    @property
    def id(self) -> str:
        """Return the name of the question."""

    @property
    def dtype(self) -> str:
        """Return torch's name of x's dtype."""


class Gate(Protocol):
    """One module of this package: what it asks of an implementation, and its verdicts."""

    NAME: str
    SCOPES: tuple[Scope, ...]

    def plan(self, settings: "Settings", impl: "Implementation", execution: Execution) -> Sequence[Any]:
        """Return the questions, so that they can be counted before the first is asked."""

    def check(
        self, impl: "Implementation", question: Any, execution: Execution, device: str, tolerances: Tolerances
    ) -> list[CaseResult]:
        """Ask one question on a torch device and return its verdicts, at least one."""


@dataclass(frozen=True)
class Asked:
    """Who was asked what, by which gate: the fields that its verdicts have in common."""

    impl: "Implementation"
    execution: Execution
    gate: str
    question: Question

    def verdict(
        self,
        scope: Scope,
        status: Status,
        detail: str = "",
        *,
        case: str | None = None,
        worst: float | None = None,
        hint: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> CaseResult:
        """Return a verdict on this question; `case` names a part of it where there are several."""
        name = self.question.id if case is None else f"{self.question.id}: {case}"
        return CaseResult(
            self.impl.name, self.execution, scope, self.gate, self.question.dtype, name, status, worst, detail, hint,
            extra or {},
        )  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Why there is no result: `refused` (a foreign implementation raised), `failed` (ours did), `error` (a crash)."""

    status: Status
    text: str


@dataclass(frozen=True)
class Answer:
    """What an implementation returned for one forward and one backward; a problem stands where a result is missing."""

    y: Tensor | None = None
    dx: Tensor | None = None
    dgamma: Tensor | None = None
    forward_problem: Problem | None = None
    backward_problem: Problem | None = None

    def copied(self) -> "Answer":
        """Return the same answer in memory of its own, which no later call can write to."""
        parts = {name: getattr(self, name) for name in ("y", "dx", "dgamma")}
        return replace(self, **{name: None if part is None else part.clone() for name, part in parts.items()})

    def problem(self, scope: Scope) -> Problem | None:
        """Return what keeps a scope from being judged."""
        return self.forward_problem or (None if scope == "forward" else self.backward_problem)


def part(of: Answer | Oracle, scope: Scope) -> Tensor | None:
    """Return what a scope is about: y, dx or dgamma of an answer or of the oracle."""
    return {"forward": of.y, "dx": of.dx, "dgamma": of.dgamma}[scope]


def answer(impl: "Implementation", inputs: Inputs, eps: float, between: Callable[[], object] | None = None) -> Answer:
    """Run forward and backward once on leaves that share memory with `inputs`, and wait for the device.

    `between` is called after the forward, when a backward follows.
    """
    x = inputs.x.detach().requires_grad_()
    gamma = None if inputs.gamma is None else inputs.gamma.detach().requires_grad_()
    leaves = [x] if gamma is None else [x, gamma]
    y, problem = attempt(impl, lambda: impl.call(x, gamma, eps), x)
    if problem is not None:
        return Answer(forward_problem=problem)
    if not isinstance(y, Tensor):
        return Answer(forward_problem=Problem("failed", f"the call returned a {type(y).__name__}, not a tensor"))
    if not y.requires_grad:
        return Answer(y, backward_problem=Problem("failed", "y has no gradient: the call is cut off from autograd"))
    if y.shape != inputs.dy.shape or y.dtype != inputs.dy.dtype or y.device != inputs.dy.device:
        text = f"no backward was asked: y is {tuple(y.shape)} {y.dtype} on {y.device}, which dy does not match"
        return Answer(y.detach(), backward_problem=Problem("failed", text))
    if between is not None:
        between()
    grads, problem = attempt(impl, lambda: torch.autograd.grad(y, leaves, inputs.dy, allow_unused=True), x)
    if problem is not None:
        return Answer(y.detach(), backward_problem=problem)
    assert grads is not None
    return Answer(y.detach(), grads[0], grads[1] if len(grads) > 1 else None)


def attempt(impl: "Implementation", call: Callable[[], T], near: Tensor) -> tuple[T | None, Problem | None]:
    """Call, wait for the device that `near` is on, and return either the result or what went wrong."""
    try:
        with warnings.catch_warnings():
            if not impl.ours:  # another project's warnings are not findings of ours
                warnings.simplefilter("ignore")
            result = call()
        if near.is_cuda:
            torch.cuda.synchronize(near.device)
    except (RmsnormError, KeyboardInterrupt):  # an interrupt is not the implementation's doing
        raise
    except Exception as problem:
        return None, classified(impl, problem)
    return result, None


def classified(impl: "Implementation", problem: Exception) -> Problem:
    """Tell a refusal from a crash: out of memory, a device fault or a compiler's limit is nobody's contract.

    A machine on which nothing can be compiled, or kept, says nothing of the implementation: that ends the command.
    """
    if of_the_machine(problem):  # of an isolated one: its process answers with exceptions of ours
        raise problem
    text = flat(problem) or "no message"
    text = f"{type(problem).__name__}: {text[:300]}"
    kinds = {kind.__name__ for kind in type(problem).__mro__}
    if kinds & CRASHES:
        return Problem("error", text)
    if "CUDA error" in text or "device-side assert" in text:
        return Problem("error", text)
    return Problem("failed" if impl.ours else "refused", text)


def inside(impl: "Implementation", cases: Sequence[Case], device_type: str, most: int | None = COMPILED) -> list[Case]:
    """Return the cases within an implementation's contract: all of them where it has not told us one.

    A costly implementation is asked those of `most` compilations, evenly over all; None: of all.
    """
    accepted = [case for case in cases if refusal(impl, case, device_type) is None]
    return bounded(accepted, most) if impl.costly and most is not None else accepted


def refusal(impl: "Implementation", case: Case, device_type: str) -> str | None:
    """Return why a case lies outside an implementation's contract; None inside, and where no contract is known."""
    return None if impl.accepts is None else impl.accepts(call_spec(case, device_type))


def call_spec(case: Case, device_type: str) -> Any:
    """Describe a case as the contract of an implementation sees it."""
    from rmsnorm_cli.kernels.contract import CallSpec

    own = case.dtype if case.gamma_dtype is None else case.gamma_dtype
    return CallSpec(
        shape=case.shape,
        x_dtype=getattr(torch, case.dtype),
        gamma_dtype=None if own == "none" else getattr(torch, own),
        contiguous=case.layout not in ("sliced_rows", "transposed_heads", "far_rows"),
        eps=case.eps,
        device_type=device_type,
    )


@contextmanager
def one_thread(execution: Execution) -> Iterator[None]:
    """Let PyTorch compute in one thread beside Triton's interpreter, which is NumPy in one thread.

    Its tensors here are too small to share, and a thread that waits for the next one to share spins meanwhile: half of
    the processor time of a run, more on a machine of many cores.
    """
    threads = torch.get_num_threads()
    if execution == "interpreter":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def device_type(execution: Execution) -> str:
    """Return torch's device type of an execution: Triton's interpreter computes on CPU tensors."""
    return "cuda" if execution == "cuda" else "cpu"
