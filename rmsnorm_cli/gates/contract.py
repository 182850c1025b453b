"""Gate "contract": what must be refused is refused before anything is written, and what looks odd but is fine works.

Of our own kernels a refusal must be a ContractError that names the argument; no launch may be counted, no allocation
filled, no input changed. Of anyone else's, an answer to a senseless call is a failure and an exception is honest.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmsnorm_cli.errors import flat
from rmsnorm_cli.gates.arena import Arena
from rmsnorm_cli.gates.gate import Asked, Tolerances, answer, classified
from rmsnorm_cli.gates.refusals import Call, ContractQuestion, questions, values
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.numerics import bits, compare, dx_scale
from rmsnorm_cli.results import CaseResult, Execution, Scope

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.kernels.api import Implementation

NAME = "contract"
SCOPES: tuple[Scope, ...] = ("contract",)


def plan(settings: "Settings", impl: "Implementation", execution: Execution) -> list[ContractQuestion]:
    """Return the refusals and the odd but right calls of this implementation."""
    return questions(impl.name, cuda=execution == "cuda")


def check(
    impl: "Implementation", question: ContractQuestion, execution: Execution, device: str, tolerances: Tolerances
) -> list[CaseResult]:
    """Return the one verdict on a call."""
    asked = Asked(impl, execution, NAME, question)
    call = question.make(device)
    if question.expect == "work":
        return [_must_work(asked, call, tolerances)]
    return [_must_refuse(asked, question, call)]


def _must_refuse(asked: Asked, question: ContractQuestion, call: Call) -> CaseResult:
    before, counted = _bytes(call), _counted()
    arena = Arena("nan")
    try:
        with arena, torch.set_grad_enabled(call.grad):
            result = _called(asked.impl, call)
    except Exception as problem:
        return _refused(asked, question, problem, _traces(call, before, counted, arena))
    if question.expect == "either" and isinstance(result, Tensor) and not result.numel():
        return asked.verdict("contract", "passed", "an empty result, which is right too")
    got = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
    return asked.verdict("contract", "failed", f"a call that has no right answer was answered, with {got}")


def _called(impl: "Implementation", call: Call) -> Any:
    if call.dy is None:
        return impl.call(_leaf(call.x, call.grad), _leaf(call.gamma, call.grad), call.eps)
    from rmsnorm_cli.kernels import rowwise

    rstd = torch.ones(len(call.x), device=call.x.device)
    return rowwise.backward(call.dy, call.x, call.gamma, rstd)


def _refused(asked: Asked, question: ContractQuestion, problem: Exception, traces: list[str]) -> CaseResult:
    said = flat(problem)
    kinds = {kind.__name__ for kind in type(problem).__mro__}
    if not asked.impl.ours:
        crashed = classified(asked.impl, problem)
        if crashed.status == "error":
            return asked.verdict("contract", "error", crashed.text)
        return asked.verdict("contract", "passed", f"refused: {crashed.text}")
    if "ContractError" not in kinds:
        return asked.verdict("contract", "failed", f"raised {type(problem).__name__}, not a ContractError: {said}")
    if question.about not in said.replace("(", " ").replace(",", " ").split():
        return asked.verdict("contract", "failed", f"the refusal does not name {question.about}: {said}")
    if traces:
        return asked.verdict("contract", "failed", f"refused, but only after {' and '.join(traces)}: {said}")
    return asked.verdict("contract", "passed", said)


def _traces(call: Call, before: dict[str, Tensor], counted: Any, arena: Arena) -> list[str]:
    """Return what a refused call left behind."""
    traces = [f"{name} was changed" for name, kept in before.items() if not torch.equal(_memory(call, name), kept)]
    if _counted() != counted:
        traces.append("a kernel was launched")
    if any(not block.intact() for block in arena.blocks):
        traces.append("new memory was written")
    return traces


def _must_work(asked: Asked, call: Call, tolerances: Tolerances) -> CaseResult:
    inputs = Inputs(call.x, call.gamma, values(*call.x.shape, dtype=asked.question.dtype, device=str(call.x.device)))
    kept = inputs.pristine()
    eps = float(call.eps)
    want = cases.oracle(kept, eps, asked.impl.rounding)
    if not call.grad:
        return _forward_only(asked, call, want.y, tolerances)
    got = answer(asked.impl, inputs, call.eps)
    problem = got.problem("dgamma")
    if problem is not None:
        return asked.verdict("contract", problem.status, problem.text)
    parts: list[tuple[str, Tensor | None, Tensor | None, Tensor, Tensor | None]]
    parts = [("y", got.y, want.y, call.x, None), ("dx", got.dx, want.dx, call.x, dx_scale(want.rstd))]
    if call.gamma is not None:
        parts.append(("dgamma", got.dgamma, want.dgamma, call.gamma, None))
    worst = 0.0
    for name, has, right, like, scale in parts:
        if has is None or right is None:
            return asked.verdict("contract", "failed", f"{name} is missing")
        found = compare(has, right, tolerances[_name(like)], dtype=like.dtype, scale=scale)
        if not found.ok:
            return asked.verdict("contract", "failed", f"{name}: {found.detail}", worst=found.worst)
        worst = max(worst, found.worst or 0.0)
    return asked.verdict("contract", "passed", worst=worst)


def _forward_only(asked: Asked, call: Call, want: Tensor, tolerances: Tolerances) -> CaseResult:
    try:
        with torch.no_grad():
            y = asked.impl.call(call.x, call.gamma, call.eps)
    except Exception as problem:
        seen = classified(asked.impl, problem)
        return asked.verdict("contract", seen.status, seen.text)
    found = compare(y, want, tolerances[_name(call.x)], dtype=call.x.dtype)
    return asked.verdict("contract", "passed" if found.ok else "failed", found.detail, worst=found.worst)


def _leaf(argument: Any, grad: bool) -> Any:
    """Return a leaf that shares the argument's memory and asks for a gradient where its dtype can have one."""
    if not isinstance(argument, Tensor):
        return argument
    can = argument.is_floating_point() or argument.is_complex()
    return argument.detach().requires_grad_(grad and can)


def _bytes(call: Call) -> dict[str, Tensor]:
    """Return copies of the memory of x and gamma, of those that have memory."""
    tensors = {name: getattr(call, name) for name in ("x", "gamma")}
    here = {name: t for name, t in tensors.items() if isinstance(t, Tensor) and t.device.type != "meta"}
    return {name: _memory(call, name).clone() for name in here}


def _memory(call: Call, name: str) -> Tensor:
    tensor: Tensor = getattr(call, name)
    if tensor.is_floating_point() and tensor.numel():
        return bits(tensor)
    return tensor.detach()


def _counted() -> Any:
    from rmsnorm_cli.kernels import counters

    return counters()


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
