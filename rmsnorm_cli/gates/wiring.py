"""Gate "autograd": the wiring between the kernels and PyTorch, whatever the kernels compute.

Which gradients are asked for, gradients that add up, a graph that is walked twice, tensors changed after they were
saved, dy in any layout, modes without gradients, checkpoints, second derivatives: `graphs.py` holds one function each.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rmsnorm_cli.gates.gate import ELSEWHERE, Asked, Tolerances, answer, classified, device_type, inside
from rmsnorm_cli.gates.graphs import CHECKS, OF_OURS, ON_GPU
from rmsnorm_cli.gates.wire import Wire
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.results import CaseResult, Execution, Scope

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.kernels.api import Implementation

NAME = "autograd"
SCOPES: tuple[Scope, ...] = ("properties",)
SHAPE = (3, 65)
MOST_COMPILED = 1  # of a costly implementation: most ways of wiring compile by themselves
# What another process keeps to itself: saved tensors, addresses, the graph behind a second derivative.
OF_THE_PROCESS = frozenset(
    {
        "no_grad and inference_mode",
        "x changed in place after the forward",
        "gamma changed in place after the forward",
        "y changed in place after the forward",
        "new numbers at the same address",
        "second derivative",
        "side stream",
    }
)


def plan(settings: "Settings", impl: "Implementation", execution: Execution) -> list[Case]:
    """Return one small case in every dtype of the contract."""
    verify, eps, seed = settings.verify, settings.operator.eps, settings.run.seed
    asked = [cases.case(SHAPE, dtype, "aligned", eps, seed) for dtype in verify.dtypes]
    return inside(impl, asked, device_type(execution), MOST_COMPILED)


def check(
    impl: "Implementation", case: Case, execution: Execution, device: str, tolerances: Tolerances
) -> list[CaseResult]:
    """Return one verdict for each way of wiring."""
    asked = Asked(impl, execution, NAME, case)
    inputs = cases.tensors(case, device)
    got = answer(impl, inputs.pristine(), case.eps)
    problem = got.problem("dgamma")
    if problem is not None:
        return [asked.verdict("properties", problem.status, problem.text)]
    if got.y is None or got.dx is None or got.dgamma is None:
        return [asked.verdict("properties", "failed", "autograd returned no gradient")]
    rstd = cases.oracle(inputs, case.eps, impl.rounding).rstd
    wire = Wire(impl, inputs, case.eps, got.y, got.dx, got.dgamma, rstd, tolerances[case.dtype])
    graphs = CHECKS | (OF_OURS if impl.ours else {}) | (ON_GPU if inputs.x.is_cuda else {})
    return [_judged(asked, name, ask, wire) for name, ask in graphs.items()]


def _judged(asked: Asked, name: str, ask: Callable[[Wire], str], wire: Wire) -> CaseResult:
    if asked.impl.isolated and name in OF_THE_PROCESS:
        return asked.verdict("properties", "skipped", ELSEWHERE, case=name)
    try:
        wrong = ask(wire)
        if wire.inputs.x.is_cuda:
            torch.cuda.synchronize(wire.inputs.x.device)
    except Exception as raised:
        seen = classified(asked.impl, raised)
        return asked.verdict("properties", seen.status, seen.text, case=name)
    return asked.verdict("properties", "failed" if wrong else "passed", wrong, case=name)
