"""Gate "declared tolerance": y, dx and dgamma against float64 on at least 72 cases each, within bounds declared before.

One forward and one backward serve all three scopes. The oracle is computed after the implementation has answered, from
copies made before: an implementation can neither read the oracle's memory nor change what it is judged by.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmsnorm_cli.gates.gate import NUMERIC, Asked, Tolerances, answer, device_type, inside, part, refusal
from rmsnorm_cli.gates.hypotheses import explain
from rmsnorm_cli.inputs import cases, thinning
from rmsnorm_cli.inputs.cases import Case
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.numerics import Comparison, compare, dx_scale
from rmsnorm_cli.judging.oracle import Oracle
from rmsnorm_cli.results import CaseResult, Execution, Scope

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.kernels.api import Implementation

NAME = "declared tolerance"
SCOPES: tuple[Scope, ...] = NUMERIC
WIDE_ROWS = 5  # rows of the widths that only GPUs are fast at: the interpreter's programs then walk two or three
MORE_ROWS = (129, 1025)  # one more than a tile or a grid of programs is likely to hold
CHUNKED = (9, 16385)  # rows in chunks, and more of them than one step takes
MORE_ROWS_COLS = (2, 3, 9)  # 9: one column more than a tile
WALKED = ((1057, 1536), (265, 6144))  # rows in two tiles of columns, and so many that a program walks two steps or more
SHARED = ((265, 16384), (97, 131072), (97, 131073))  # wide rows, more than programs, or groups of them, are resident
MANY_ROWS = 65537  # past the largest y-size of a launch grid
FAR_BYTES = 10 * 2**30  # free memory for rows 2^31 elements apart: they take 8 GiB
MANY_ROWS_COLS = (33, 255)  # at 256 columns the teaching kernel's partials would pass 64 MiB


def plan(settings: "Settings", impl: "Implementation", execution: Execution) -> list[Case]:
    """Return the grid, then each distribution, layout and gamma: of the defaults, what the contract takes.

    Who names rows, columns or dtypes is asked about those: cases outside the contract stay in the plan and are refused,
    and no shapes are added that nobody named. What of the defaults is dear and asked already is left out (`thinning`).
    """
    verify, eps, seed = settings.verify, settings.operator.eps, settings.run.seed
    kind = device_type(execution)
    if impl.costly and verify.default_grid:
        return inside(impl, _of_few_shapes(settings), kind, most=None)
    distributions = [name for name in cases.DISTRIBUTIONS if name in verify.distributions]
    named = cases.grid(verify.rows, verify.cols, verify.dtypes, distributions, eps, seed)
    added: list[Case] = []
    if verify.default_grid:
        added += cases.grid((WIDE_ROWS,), cases.WIDE_COLS, verify.dtypes, distributions, eps, seed)
        added += cases.grid(MORE_ROWS, MORE_ROWS_COLS, verify.dtypes, distributions, eps, seed)
        added += [cases.case(CHUNKED, dtype, distributions[0], eps, seed) for dtype in verify.dtypes]
        added += cases.by_eps(verify.dtypes, distributions, seed)
        added += cases.by_distribution(verify.dtypes, distributions, eps, seed)
        if execution == "cuda":
            added += cases.grid(_rows_by_processors(), (257, 1024), verify.dtypes, distributions, eps, seed)
            added += cases.grid((MANY_ROWS,), MANY_ROWS_COLS, verify.dtypes, distributions, eps, seed)
            added += [
                cases.case(shape, dtype, "spread", eps, seed) for dtype in verify.dtypes for shape in WALKED + SHARED
            ]
            if impl.ours:  # a wrapped address can end the GPU's context, and with it the verdicts on all others
                added += _past_32_bits(eps, seed)
    if "spread" in verify.distributions and (verify.default_grid or not verify.default_layouts):
        added += cases.by_layout(verify.dtypes, verify.layouts, eps, seed)
        if "contiguous" in verify.layouts:
            added += cases.by_gamma(verify.dtypes, eps, seed)
    if verify.default_grid and verify.default_dtypes:
        named = inside(impl, named, kind, most=None)
    asked = cases.unique(named + inside(impl, added, kind, most=None))
    thinned = execution == "interpreter" and verify.default_grid and verify.default_dtypes
    return [case for case in asked if not (thinned and thinning.spared(case))]


def _of_few_shapes(settings: "Settings") -> list[Case]:
    verify, eps, seed = settings.verify, settings.operator.eps, settings.run.seed
    distributions = [name for name in cases.DISTRIBUTIONS if name in verify.distributions]
    first = verify.dtypes[:1]
    asked = thinning.few_shapes(verify.rows, verify.cols, verify.dtypes, distributions, eps, seed)
    asked += thinning.bounded(cases.by_layout(first, verify.layouts, eps, seed), 2 * thinning.COMPILED)
    return cases.unique(asked + cases.by_gamma(first, eps, seed))


def check(
    impl: "Implementation", case: Case, execution: Execution, device: str, tolerances: Tolerances
) -> list[CaseResult]:
    """Return one verdict for each of forward, dx and dgamma (dgamma only where there is a gamma)."""
    asked = Asked(impl, execution, NAME, case)
    reason = refusal(impl, case, device_type(execution))
    if reason is not None:
        return [asked.verdict(scope, "refused", reason, extra=_facts(case)) for scope in SCOPES]
    inputs = cases.tensors(case, device)
    kept = inputs.pristine()
    got = answer(impl, inputs, case.eps)
    want = cases.oracle(kept, case.eps, impl.rounding)
    results = []
    for scope in SCOPES if inputs.gamma is not None else SCOPES[:2]:
        problem = got.problem(scope)
        if problem is not None:
            results.append(asked.verdict(scope, problem.status, problem.text, extra=_facts(case)))
            continue
        results.append(_judged(asked, scope, part(got, scope), kept, want, case, tolerances))
    return results


def _past_32_bits(eps: float, seed: int) -> list[Case]:
    """Return two rows 2^31 elements apart, if there is memory for what lies between them."""
    free, _ = torch.cuda.mem_get_info()
    case = cases.case((2, 257), "float16", "spread", eps, seed, layout="far_rows")
    return [case] if free > FAR_BYTES else []


def _rows_by_processors() -> tuple[int, ...]:
    count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return count - 1, count, count + 1


def _judged(
    asked: Asked, scope: Scope, got: Tensor | None, inputs: Inputs, want: Oracle, case: Case, tolerances: Tolerances
) -> CaseResult:
    if got is None:
        return asked.verdict(scope, "failed", "autograd returned no gradient", extra=_facts(case))
    right = part(want, scope)
    assert right is not None
    like = inputs.gamma if scope == "dgamma" and inputs.gamma is not None else inputs.x
    scale = dx_scale(want.rstd) if scope == "dx" else None
    # A gradient of fp32 gamma beside a 16-bit x is as exact as fp32 allows: its tolerance is that of its own dtype.
    tolerance = tolerances[str(like.dtype).removeprefix("torch.")]
    found = compare(got, right, tolerance, dtype=like.dtype, scale=scale)
    facts = _facts(case)
    if found.ok:
        return asked.verdict(scope, "passed", worst=found.worst, extra=facts)
    named = explain(scope, got, inputs, case.eps, tolerance, scale) if found.regions else ""
    facts |= _seen(found) | ({"hypothesis": named} if named else {})
    return asked.verdict(scope, "failed", found.detail, worst=found.worst, hint=named, extra=facts)


def _facts(case: Case) -> dict[str, Any]:
    return {"M": case.M, "N": case.N, "distribution": case.distribution, "layout": case.layout}


def _seen(found: Comparison) -> dict[str, Any]:
    return {
        "index": None if found.index is None else list(found.index),
        "got": found.got,
        "want": found.want,
        "ulps": found.ulps,
        "regions": dict(found.regions),
    }
