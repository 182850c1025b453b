"""Gate "memory": every output written whole and nothing else, inputs untouched, no reading past them, no aliases.

Each case runs twice. Inputs and all memory that the implementation allocates lie between guards; everything that holds
no input value is poison, NaN in the first run and finite numbers in the second (a mask or a zero can hide a NaN, and a
finite number can be right by chance). The results of both runs must have the same bits.

Memory that compiled code allocates by itself cannot be fenced. For such an implementation the device's allocator is
filled with poison beforehand, which shows what is left unwritten, and the guards are `skipped`; of our own Triton
kernels, whose allocations are all visible, an unfenced run is `inconclusive`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rmsnorm_cli.gates.arena import Arena, Block, Poison, fence, same_bits
from rmsnorm_cli.gates.gate import ELSEWHERE, Answer, Asked, Tolerances, answer, device_type, inside
from rmsnorm_cli.inputs import cases, thinning
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.tolerances import Tolerance
from rmsnorm_cli.results import CaseResult, Execution, Scope

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.kernels.api import Implementation

OF_THE_PROCESS = ("guards", "everything written", "no aliases")  # what another process's memory keeps to itself
NAME = "memory"
SCOPES: tuple[Scope, ...] = ("properties",)
SHAPES = ((4, 1), (5, 3), (2, 33), (17, 257), (3, 1000), (2, 1024), (300, 9))
WIDE = ((3, 9001), (3, 65537))  # beyond the teaching kernel: rows that are read twice, in chunks or by several programs
LAYOUTS = ("sliced_rows", "transposed_heads", "misaligned", "expanded_dy", "sliced_dy", "transposed_dy", "1d", "4d")
RETRIES = 6  # runs under one poison, of a result that differed between two


def plan(settings: "Settings", impl: "Implementation", execution: Execution) -> list[Case]:
    """Return widths on both sides of powers of two, and every layout, in the dtypes of the contract."""
    verify, eps, seed = settings.verify, settings.operator.eps, settings.run.seed
    asked = [cases.case(shape, dtype, "spread", eps, seed) for dtype in verify.dtypes for shape in SHAPES + WIDE]
    layouts = [layout for layout in verify.layouts if layout in LAYOUTS]
    asked += [case for case in cases.by_layout(verify.dtypes, layouts, eps, seed) if len(case.shape) != 3]
    if execution == "interpreter" and verify.default_dtypes:
        asked = [case for case in asked if not thinning.spared(case)]
    return inside(impl, cases.unique(asked), device_type(execution))


def check(
    impl: "Implementation", case: Case, execution: Execution, device: str, tolerances: Tolerances
) -> list[CaseResult]:
    """Return four verdicts: inputs untouched, guards intact, everything written, no aliases."""
    asked = Asked(impl, execution, NAME, case)
    original = cases.tensors(case, device)
    tolerance = tolerances[case.dtype]
    fenced = impl.name != "compile"  # Dynamo leaves a function alone while a dispatch mode is active
    runs = [_run(impl, case, original, poison, fenced) for poison in _poisons()]
    if fenced and not runs[0].fenced and not (impl.ours and impl.triton):
        runs = [_run(impl, case, original, poison, False) for poison in _poisons()]
    problem = runs[0].answer.problem("dgamma") or runs[1].answer.problem("dgamma")
    if problem is not None:
        return [asked.verdict("properties", problem.status, problem.text)]
    if impl.isolated:
        elsewhere = [asked.verdict("properties", "skipped", ELSEWHERE, case=name) for name in OF_THE_PROCESS]
        return [_untouched(asked, runs), *elsewhere]
    again = (_run(impl, case, original, "nan", bool(runs[0].blocks)) for _ in range(RETRIES))
    written = _written(asked, runs, again, tolerance)
    return [_untouched(asked, runs), _guards(asked, runs), written, _aliases(asked, runs)]


@dataclass(frozen=True)
class Run:
    """One run under one poison: fenced inputs, what came out, and the fenced memory of forward and backward."""

    inputs: dict[str, Block]
    answer: Answer
    blocks: tuple[Block, ...]
    in_forward: int

    @property
    def fenced(self) -> bool:
        """Tell whether allocations of both passes were intercepted."""
        return self.in_forward > 0 and len(self.blocks) > self.in_forward

    def results(self) -> dict[str, Tensor]:
        """Return the tensors that came out, by name."""
        found = {"y": self.answer.y, "dx": self.answer.dx, "dgamma": self.answer.dgamma}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def _poisons() -> tuple[Poison, Poison]:
    return "nan", "finite"


def _run(impl: "Implementation", case: Case, original: Inputs, poison: Poison, fenced: bool) -> Run:
    named = {"x": original.x, "gamma": original.gamma, "dy": original.dy}
    inputs = {name: fence(tensor, poison, tensor) for name, tensor in named.items() if tensor is not None}
    gamma = inputs["gamma"].tensor if "gamma" in inputs else None
    given = Inputs(inputs["x"].tensor, gamma, inputs["dy"].tensor)
    if not fenced:
        _dirty(original, poison)
        return Run(inputs, answer(impl, given, case.eps), (), 0)
    arena, in_forward = Arena(poison), [0]
    with arena:
        got = answer(impl, given, case.eps, between=lambda: in_forward.__setitem__(0, arena.served))
    return Run(inputs, got, tuple(arena.blocks), in_forward[0])


def _dirty(original: Inputs, poison: Poison) -> None:
    """Leave poison in the memory that the allocator is likely to hand out next for tensors of these sizes."""
    likes = [tensor for tensor in (original.x, original.dy, original.gamma) if tensor is not None]
    held = [fence(like, poison).whole for like in likes for _ in range(4)]
    held += [torch.empty_like(like).copy_(fence(like, poison).tensor) for like in likes for _ in range(4)]
    del held


def _untouched(asked: Asked, runs: list[Run]) -> CaseResult:
    for run in runs:
        for name, block in run.inputs.items():
            if not block.intact():
                where = f"{name} itself was changed" if block.guards_intact() else f"memory around {name} was written"
                return asked.verdict("properties", "failed", where, case="inputs untouched")
    return asked.verdict("properties", "passed", case="inputs untouched")


def _guards(asked: Asked, runs: list[Run]) -> CaseResult:
    for run in runs:
        for block in run.blocks:
            if not block.guards_intact():
                what = f"{tuple(block.tensor.shape)} {block.tensor.dtype}"
                detail = f"memory outside an allocated tensor ({what}) was written"
                return asked.verdict("properties", "failed", detail, case="guards", hint=_BEYOND)
    if all(run.fenced for run in runs):
        served = len(runs[0].blocks)
        return asked.verdict("properties", "passed", f"{served} allocations fenced", case="guards")
    if asked.impl.ours and asked.impl.triton:
        detail = "no allocation was intercepted in one of the passes, so that nothing is known about its bounds"
        return asked.verdict("properties", "inconclusive", detail, case="guards")
    detail = "it allocates in compiled code, which cannot be fenced: only its inputs had guards"
    return asked.verdict("properties", "skipped", detail, case="guards")


_BEYOND = "a store without its mask, or a row address that runs past the end"


def _written(asked: Asked, runs: list[Run], again: Iterator[Run], tolerance: Tolerance) -> CaseResult:
    """Judge that two poisons give the same bits; of what is not even the same under one poison, that it stays close.

    `again` repeats the first run, and only does so when bits differ: an unordered sum is another gate's business.
    """
    first, second = runs[0].results(), runs[1].results()
    apart = [name for name, tensor in first.items() if not same_bits(tensor, second.get(name))]
    if not apart:
        return asked.verdict("properties", "passed", case="everything written")
    repeated = [run.results() for run in again]
    for name in apart:
        unordered = not all(same_bits(first[name], results.get(name)) for results in repeated)
        if not (unordered and _close(first[name], second.get(name), tolerance)):
            detail = f"{name} depends on memory that holds no value: it differs between two poisons"
            hint = "an element that is never written, or a load without its mask"
            return asked.verdict("properties", "failed", detail, case="everything written", hint=hint)
    detail = f"{' and '.join(apart)} differ from run to run, within the tolerance"
    return asked.verdict("properties", "passed", detail, case="everything written")


def _close(left: Tensor, right: Tensor | None, tolerance: Tolerance) -> bool:
    if right is None or left.shape != right.shape:
        return False
    off = (left.double() - right.double()).abs()
    return bool((off <= 2 * (tolerance.atol + tolerance.rtol * right.double().abs())).all())


def _aliases(asked: Asked, runs: list[Run]) -> CaseResult:
    """Judge that results share memory neither with inputs, nor with one another, nor with an earlier call's results."""
    for name, other in _sharing(runs):
        return asked.verdict("properties", "failed", f"{name} shares memory with {other}", case="no aliases")
    return asked.verdict("properties", "passed", case="no aliases")


def _sharing(runs: list[Run]) -> Iterator[tuple[str, str]]:
    first, second = runs[0].results(), runs[1].results()
    for run in runs:
        named = [*run.results().items(), *((name, block.tensor) for name, block in run.inputs.items())]
        for (name, tensor), (other, against) in combinations(named, 2):
            if name in run.results() and _overlap(tensor, against):
                yield name, other
    for name, tensor in second.items():
        for other, against in first.items():
            if _overlap(tensor, against):
                yield name, f"{other} of the call before, which is still in use"


def _overlap(left: Tensor, right: Tensor) -> bool:
    """Tell whether the memory between first and last element of two tensors has bytes in common."""
    if not left.numel() or not right.numel():
        return False
    (start, end), (first, last) = _extent(left), _extent(right)
    return start < last and first < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
