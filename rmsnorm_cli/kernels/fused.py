"""The fused implementation: from a call to the launches of its kernels.

A call is described once by what can decide its launch (shapes, strides, dtypes, alignment, device) and its plan is
kept, so that the same call later costs a look-up, its outputs and the launches. What orders a row's sum is chosen by
N, dtype and layout, never by M.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from rmsnorm_cli.kernels.autograd import count
from rmsnorm_cli.kernels.backplan import BackwardPlan
from rmsnorm_cli.kernels.contract import INTERPRETED, ContractError, check_fused, check_memory, fused_refusal
from rmsnorm_cli.kernels.frontplan import ForwardPlan
from rmsnorm_cli.kernels.program import on_device
from rmsnorm_cli.kernels.rowlayout import copied_in_order, describe, walking_order

__all__ = ["backward", "forward", "fused_refusal", "launched", "reset_launched"]

LAUNCHED: Counter[str] = Counter()
"""How often each path ran: `forward/rows`, `backward/shared`, ..., so that it can be seen which one did."""

MOST_PLANS = 4096
"""Plans kept before all are forgotten: a bound for programs whose row counts never repeat."""

_forward_plans: dict[Any, ForwardPlan] = {}
_backward_plans: dict[Any, BackwardPlan] = {}


def launched() -> dict[str, int]:
    """Return how often each path of the fused kernels ran since the last reset, {"forward/rows": 3, ...}."""
    return dict(LAUNCHED)


def reset_launched() -> None:
    """Forget which paths ran."""
    LAUNCHED.clear()


# By number on a GPU, which costs less; cpu and meta share the number -1, and in the interpreter cpu has plans.
_place: Any = (lambda tensor: tensor.device) if INTERPRETED else Tensor.get_device


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """Return what of a tensor can decide a launch, the contract's answer included."""
    kind, address = type(tensor), tensor.data_ptr()  # a sharded tensor looks like a plain one but for its type
    lies = address & 15 if address else None  # None: freed, where a plan made for an aligned one would read
    return kind, tensor.shape, tensor.stride(), tensor.dtype, lies, _place(tensor), tensor.is_neg()


def forward(x: Tensor, gamma: Tensor | None, eps: float, *, need_rstd: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return y, like x, and rstd of the rows in the order in which they are walked (fp32, or fp64 for fp64 x).

    Without `need_rstd`, which only a backward has, rstd may be None.

    Raises ContractError for what `fused` does not take, before anything is allocated.
    """
    try:
        key = (_key(x), None if gamma is None else _key(gamma), need_rstd)
    except (AttributeError, RuntimeError):  # something is no tensor, or has no memory; the contract says what
        check_fused(x, gamma, eps)
        raise
    plan = _forward_plans.get(key)
    if plan is None:
        check_fused(x, gamma, eps)
        if x.is_neg() or (gamma is not None and gamma.is_neg()) or (x.numel() and walking_order(x) is None):
            count("fused", "copies")
            x = x.resolve_neg()
            order = walking_order(x)
            x = x.contiguous() if order is None else x
            return forward(x, None if gamma is None else gamma.resolve_neg(), eps, need_rstd=need_rstd)
        plan = ForwardPlan(x, gamma, need_rstd)
        _remember(_forward_plans, key, plan)
    elif not plan.smallest <= eps <= plan.largest:
        check_fused(x, gamma, eps)
    elsewhere = on_device(x)
    if elsewhere is None:
        y, rstd, path = plan.run(x, gamma, eps)
    else:
        with elsewhere:
            y, rstd, path = plan.run(x, gamma, eps)
    LAUNCHED[path] += 1
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, gamma: Tensor | None, rstd: Tensor, *, need_dx: bool = True, need_dgamma: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx like x and dgamma like gamma, each None where it is not needed; dy, of any layout, is only read.

    rstd is what `forward` returned for this x.
    """
    need_dgamma = need_dgamma and gamma is not None
    key = (_key(dy), _key(x), None if gamma is None else _key(gamma), need_dx, need_dgamma)
    plan = _backward_plans.get(key)
    if plan is None:
        if dy.shape != x.shape or dy.dtype != x.dtype or dy.device != x.device:
            raise ContractError(
                f"dy is {tuple(dy.shape)}, {dy.dtype}, on {dy.device}: it must be as y, "
                f"{tuple(x.shape)}, {x.dtype}, on {x.device}"
            )
        check_memory("dy", dy)
        if dy.is_neg() or x.is_neg() or (gamma is not None and gamma.is_neg()):
            positive = None if gamma is None else gamma.resolve_neg()
            dy, x = dy.resolve_neg(), x.resolve_neg()
            return backward(dy, x, positive, rstd, need_dx=need_dx, need_dgamma=need_dgamma)
        order = walking_order(x) if x.numel() else tuple(range(x.dim() - 1))
        if order is None:  # as in the forward, which counted this copy
            return backward(dy, x.contiguous(), gamma, rstd, need_dx=need_dx, need_dgamma=need_dgamma)
        if x.numel() and describe(dy, order) is None:
            count("fused", "copies")
            dy = copied_in_order(dy, order)
            return backward(dy, x, gamma, rstd, need_dx=need_dx, need_dgamma=need_dgamma)
        plan = BackwardPlan(dy, x, gamma, order, need_dx, need_dgamma)
        _remember(_backward_plans, key, plan)
    elsewhere = on_device(x)
    if elsewhere is None:
        dx, dgamma, path = plan.run(dy, x, gamma, rstd)
    else:
        with elsewhere:
            dx, dgamma, path = plan.run(dy, x, gamma, rstd)
    LAUNCHED[path] += 1
    return dx, dgamma


def _remember(plans: dict[Any, Any], key: Any, plan: Any) -> None:
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
