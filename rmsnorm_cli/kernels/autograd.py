"""The wiring between a pair of kernels and PyTorch's autograd: what is saved, what is asked for, what is counted."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rmsnorm_cli.kernels import reference
from rmsnorm_cli.kernels.contract import ContractError, eps_value

# --- counters ---------------------------------------------------------------------------------------------------------

EVENTS = ("forward", "backward", "double_backward", "copies")

_counts: dict[str, dict[str, int]] = {}
_lock = threading.Lock()  # the backward of a CUDA graph is counted from the engine's own thread


def count(name: str, event: str) -> None:
    """Add one to an event of an implementation: a call that ran, or a copy that its wrapper had to make."""
    with _lock:
        if name not in _counts:
            _counts[name] = dict.fromkeys(EVENTS, 0)
        _counts[name][event] += 1


def counters() -> dict[str, dict[str, int]]:
    """Return the counts since the last reset, {implementation: {event: calls}}; one never called is absent."""
    with _lock:
        return {name: dict(events) for name, events in _counts.items()}


def reset_counters() -> None:
    """Forget all counts."""
    with _lock:
        _counts.clear()


# --- a pair of kernels ------------------------------------------------------------------------------------------------


class Forward(Protocol):
    """The launcher of a forward; gamma is a Tensor, or None where the pair can do without."""

    def __call__(self, x: Tensor, gamma: Any, eps: float, /) -> tuple[Tensor, Tensor | None]:
        """Raise ContractError before anything is allocated, or return y and rstd."""


class Backward(Protocol):
    """The launcher of a backward."""

    def __call__(
        self, dy: Tensor, x: Tensor, gamma: Any, rstd: Tensor, /, *, need_dx: bool, need_dgamma: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dx like x and dgamma like gamma, each None where it is not needed."""


@dataclass(frozen=True)
class KernelPair:
    """Two launchers that belong together, and what their wrapper must do for them.

    `contiguous_dy`: the backward reads dy contiguous, so the wrapper copies any other (counted as `copies`).
    `second_derivative`: differentiate the reference formula when a second derivative is asked for (counted as
    `double_backward`); otherwise it is refused. `optional_rstd`: the forward can do without rstd, and is told so by
    `need_rstd=False` where no derivative can follow. `op`: the same as a registered operator, for torch.compile.
    """

    name: str
    forward: Forward
    backward: Backward
    contiguous_dy: bool = True
    second_derivative: bool = False
    optional_rstd: bool = False
    op: Callable[[Tensor, Tensor | None, float], Tensor] | None = None


def differentiable(pair: KernelPair) -> Callable[[Tensor, Tensor | None, float], Tensor]:
    """Return f(x, gamma, eps) -> y that runs the pair's kernels forward and backward.

    Autocast casts nothing here: x and gamma reach the launcher in the dtypes they have. Inside a torch.func transform
    and for a forward-mode derivative it raises ContractError; torch.compile takes the pair's `op`, or breaks its graph
    at the call.
    """
    transformed = torch._C._are_functorch_transforms_active
    name = pair.name
    alone: Callable[..., tuple[Tensor, Tensor | None]] = pair.forward
    if pair.optional_rstd:
        alone = functools.partial(alone, need_rstd=False)

    def call(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
        if torch.compiler.is_compiling():
            if pair.op is not None:
                return pair.op(x, gamma, eps)
            if torch.compiler.is_exporting():  # which cannot leave its graph and come back
                raise ContractError(f"{name} is no registered operator and cannot be exported: use impl='fused'")
            # Dynamo would trace into the launch: break its graph here, and run as without it.
            untraced: Tensor = torch.compiler.disable(call)(x, gamma, eps)  # type: ignore[no-untyped-call]
            return untraced
        if transformed():
            raise ContractError(
                f"{pair.name} was called inside a torch.func transform (vmap, grad, jvp, ...): "
                "it takes plain tensors alone; use impl='reference' there"
            )
        if forward_ad._current_level >= 0 and any(_has_tangent(operand) for operand in (x, gamma)):
            raise ContractError(f"{name} has no forward-mode derivative: use impl='reference' for that")
        eps = eps_value(eps)
        # getattr, since what is not a tensor is refused by the launcher, which knows the words for it.
        differentiated = getattr(x, "requires_grad", False) or getattr(gamma, "requires_grad", False)
        if not (differentiated and torch.is_grad_enabled()):
            y, _ = alone(x, gamma, eps)
            count(name, "forward")
            return y
        result: Tensor = _normalise(x, gamma, eps, pair)
        return result

    return call


def _has_tangent(operand: object) -> bool:
    """Say whether a forward-mode derivative rides on an operand; a launcher would drop it without a word."""
    return isinstance(operand, Tensor) and forward_ad.unpack_dual(operand).tangent is not None  # type: ignore[no-untyped-call]


class _Normalise(torch.autograd.Function):
    """First derivative: the forward kernel, then the backward kernel on what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor | None, eps: float, pair: KernelPair) -> Tensor:
        y, rstd = pair.forward(x, gamma, eps)
        # Not as attributes: only saved tensors notice that x or gamma was changed in place before the backward.
        ctx.save_for_backward(x, gamma, rstd)
        ctx.eps = eps
        ctx.pair = pair
        count(pair.name, "forward")
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dy,) = grad_outputs
        x, gamma, rstd = ctx.saved_tensors
        need_dx, need_dgamma = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # create_graph=True: this backward is to be differentiated in its turn
            dx, dgamma = _Gradient.apply(dy, x, gamma, rstd, ctx.eps, ctx.pair, need_dx, need_dgamma)
        else:
            dx, dgamma = _gradient(ctx.pair, dy, x, gamma, rstd, need_dx, need_dgamma)
        return dx, dgamma, None, None


# What Function.apply comes down to outside a torch.func transform, which `run` has excluded; 3 µs of host time less.
_normalise = super(torch.autograd.Function, _Normalise).apply


def _gradient(
    pair: KernelPair, dy: Tensor, x: Tensor, gamma: Tensor | None, rstd: Tensor, need_dx: bool, need_dgamma: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Run the backward kernel, on a contiguous copy of dy where it needs one; dy itself is never written."""
    if pair.contiguous_dy and (dy.is_neg() or not dy.is_contiguous()):
        dy = dy.resolve_neg().contiguous()  # a negative view is contiguous without its sign
        count(pair.name, "copies")
    dx, dgamma = pair.backward(dy, x, gamma, rstd, need_dx=need_dx, need_dgamma=need_dgamma)
    count(pair.name, "backward")
    return dx, dgamma


class _Gradient(torch.autograd.Function):
    """Second derivative: the backward kernel again, whose own derivative is refused or taken from the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        dy: Tensor,
        x: Tensor,
        gamma: Tensor | None,
        rstd: Tensor,
        eps: float,
        pair: KernelPair,
        need_dx: bool,
        need_dgamma: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.save_for_backward(dy, x, gamma)
        ctx.eps = eps
        ctx.pair = pair
        ctx.set_materialize_grads(False)
        return _gradient(pair, dy, x, gamma, rstd, need_dx, need_dgamma)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        pair = ctx.pair
        if not pair.second_derivative:
            # The kernel takes rstd as given, so differentiating it again would leave rstd's own derivative out.
            raise ContractError(
                f"{pair.name} has no second derivative: its backward was differentiated (create_graph=True); "
                "use impl='reference' for that"
            )
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views stand for the operands: dy may itself depend on x, and that path is not this function's.
            operands = [None if tensor is None else tensor.view_as(tensor) for tensor in ctx.saved_tensors]
            results = reference.backward(*operands, ctx.eps)  # type: ignore[call-arg,arg-type]  # only gamma may be None
        asked = [(out, grad) for out, grad in zip(results, grad_outputs, strict=True) if grad is not None]
        wanted = {i: tensor for i, tensor in enumerate(operands) if tensor is not None and ctx.needs_input_grad[i]}
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if asked and wanted:
            outputs, grads = zip(*asked, strict=True)
            second = torch.autograd.grad(
                outputs, list(wanted.values()), grads, create_graph=create_graph, allow_unused=True
            )
            for i, gradient in zip(wanted, second, strict=True):
                found[i] = gradient
        count(pair.name, "double_backward")
        return tuple(found)
