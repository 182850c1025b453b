"""The graphs that the "autograd" gate builds around one call; each returns what is wrong with it, "" if nothing.

Results are compared with those of the plain call: bit for bit for our kernels (within rounding where dy lies otherwise
in memory), within twice the declared tolerance for other implementations.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rmsnorm_cli.gates.gate import classified
from rmsnorm_cli.gates.wire import Wire, first
from rmsnorm_cli.inputs.layouts import place

if TYPE_CHECKING:
    pass


def _frozen_gamma(wire: Wire) -> str:
    x, gamma = wire.leaves(gamma=False)
    torch.autograd.backward(wire.call(x, gamma), wire.dy())
    return first(wire.differs("dx", x.grad, wire.dx), "a frozen gamma got a gradient" if gamma.grad is not None else "")


def _frozen_x(wire: Wire) -> str:
    x, gamma = wire.leaves(x=False)
    torch.autograd.backward(wire.call(x, gamma), wire.dy())
    return first(
        wire.differs("dgamma", gamma.grad, wire.dgamma), "a frozen x got a gradient" if x.grad is not None else ""
    )


def _nothing_asked(wire: Wire) -> str:
    x, gamma = wire.leaves(x=False, gamma=False)
    y = wire.call(x, gamma)
    return first("y asks for a gradient that nobody needs" if y.requires_grad else "", wire.differs("y", y, wire.y))


def _without_grad(wire: Wire) -> str:
    x, gamma = wire.leaves()
    with torch.no_grad():
        y = wire.call(x, gamma)
    with torch.inference_mode():
        inferred = wire.call(x, gamma)
    findings = (wire.differs("y under no_grad", y, wire.y), wire.differs("y under inference_mode", inferred, wire.y))
    return first(*findings, "y has a graph under no_grad" if y.requires_grad or inferred.requires_grad else "")


def _twice_in_graph(wire: Wire) -> str:
    x, gamma = wire.leaves()
    torch.autograd.backward(wire.call(x, gamma) + wire.call(x, gamma), wire.dy())
    return first(
        wire.differs("dx of x used twice", x.grad, 2 * wire.dx),
        wire.differs("dgamma of gamma used twice", gamma.grad, 2 * wire.dgamma),
    )


def _two_steps(wire: Wire) -> str:
    x, gamma = wire.leaves()
    for _ in range(2):
        torch.autograd.backward(wire.call(x, gamma), wire.dy())
    return first(
        wire.differs("x.grad after two steps", x.grad, 2 * wire.dx),
        wire.differs("gamma.grad after two steps", gamma.grad, 2 * wire.dgamma),
    )


def _two_backwards(wire: Wire) -> str:
    x, gamma = wire.leaves()
    y, dy = wire.call(x, gamma), wire.dy()
    earlier = torch.autograd.grad(y, (x, gamma), dy, retain_graph=True)
    kept = [gradient.clone() for gradient in earlier]
    second = torch.autograd.grad(y, (x, gamma), dy)
    if not torch.equal(dy, wire.inputs.dy):
        return "dy was changed by the backward"
    return first(
        *(wire.differs("a gradient of the first backward, later,", a, b) for a, b in zip(earlier, kept, strict=True)),
        wire.differs("dx of the second backward", second[0], wire.dx),
        wire.differs("dgamma of the second backward", second[1], wire.dgamma),
    )


def _changed_after(which: str) -> Callable[[Wire], str]:
    """Change a saved tensor in place: the backward must raise, or still give the gradient at the old values."""

    def ask(wire: Wire) -> str:
        x, gamma = wire.leaves()
        own = {"x": x * 1, "gamma": gamma * 1}
        y = wire.call(own["x"], own["gamma"])
        with torch.no_grad():
            own[which].add_(1)
        try:
            dx, dgamma = torch.autograd.grad(y, (x, gamma), wire.dy())
        except RuntimeError:
            return ""
        found = first(wire.differs("dx", dx, wire.dx), wire.differs("dgamma", dgamma, wire.dgamma))
        return f"{which} was changed in place after it was saved, nothing was raised, and {found}" if found else ""

    return ask


def _y_changed_after(wire: Wire) -> str:
    """Change y in place, as an activation does: the backward must raise or be right."""
    x, gamma = wire.leaves()
    y = wire.call(x, gamma)
    try:
        y.mul_(2)
        dx, dgamma = torch.autograd.grad(y, (x, gamma), wire.inputs.dy / 2)
    except RuntimeError:
        return ""
    return first(wire.differs("dx", dx, wire.dx), wire.differs("dgamma", dgamma, wire.dgamma))


def _hook_keeps_dy(wire: Wire) -> str:
    """Add the norm to its own input; a hook keeps dy, which both branches share."""
    x, gamma = wire.leaves()
    h = x * 1
    out = h + wire.call(h, gamma)
    held: list[Tensor] = []
    out.register_hook(held.append)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.autograd.backward(out, wire.dy())
    if not torch.equal(held[0], wire.inputs.dy):
        return "the dy that a hook kept was changed by the backward"
    assert x.grad is not None
    return wire.differs("x.grad of x + norm(x)", x.grad, wire.inputs.dy + wire.dx)


def _expanded_dy(wire: Wire) -> str:
    x, gamma = wire.leaves()
    torch.autograd.backward(wire.call(x, gamma).sum())
    x2, gamma2 = wire.leaves()
    torch.autograd.backward(wire.call(x2, gamma2), torch.ones_like(wire.y))
    assert x2.grad is not None
    assert gamma2.grad is not None
    rounding = wire.rounding(torch.ones_like(wire.y))
    assert rounding.dgamma is not None
    return first(
        wire.differs("dx of y.sum()", x.grad, x2.grad, rounding.dx.total),
        wire.differs("dgamma of y.sum()", gamma.grad, gamma2.grad, rounding.dgamma.total),
    )


def _strided_dy(wire: Wire) -> str:
    rounding = wire.rounding(wire.inputs.dy)
    assert rounding.dgamma is not None
    for layout in ("sliced_rows", "every_second", "transposed_heads", "misaligned"):
        x, gamma = wire.leaves()
        torch.autograd.backward(wire.call(x, gamma), place(wire.inputs.dy, layout))
        wrong = first(
            wire.differs("dx", x.grad, wire.dx, rounding.dx.total),
            wire.differs("dgamma", gamma.grad, wire.dgamma, rounding.dgamma.total),
        )
        if wrong:
            return f"with dy {layout}: {wrong}"
    return ""


def _sliced_by_cat(wire: Wire) -> str:
    x, gamma = wire.leaves()
    joined = torch.cat([wire.call(x, gamma), wire.call(x, gamma)], -1)
    torch.autograd.backward(joined, torch.cat([wire.inputs.dy, wire.inputs.dy], -1))
    return first(
        wire.differs("dx through cat", x.grad, 2 * wire.dx),
        wire.differs("dgamma through cat", gamma.grad, 2 * wire.dgamma),
    )


def _checkpointed(wire: Wire) -> str:
    x, gamma = wire.leaves()
    y: Tensor = checkpoint(wire.call, x, gamma, use_reentrant=False)
    torch.autograd.backward(y, wire.dy())
    return first(wire.differs("dx", x.grad, wire.dx), wire.differs("dgamma", gamma.grad, wire.dgamma))


def _new_content(wire: Wire) -> str:
    """Put other numbers at the same addresses: a result kept from the call before must not come back."""
    x, gamma = wire.leaves()
    torch.autograd.backward(wire.call(x, gamma), wire.dy())
    sign = 1 if wire.impl.rounding == "gemma" else -1  # -gamma is exact in every order of roundings, -(1 + gamma) not
    with torch.no_grad():
        x.copy_(x.flip(0))
        gamma.mul_(sign)
    x.grad = gamma.grad = None
    y = wire.call(x, gamma)
    torch.autograd.backward(y, wire.inputs.dy.flip(0))
    return first(
        wire.differs("y of new numbers at the old address", y, sign * wire.y.flip(0)),
        wire.differs("dx of new numbers at the old address", x.grad, sign * wire.dx.flip(0)),
    )


def _counted(wire: Wire) -> str:
    """Count calls: what was asked for must have run, once forward and once backward."""
    from rmsnorm_cli.kernels import counters

    def now() -> tuple[int, int]:
        events = counters().get(wire.impl.name, {})
        return events.get("forward", 0), events.get("backward", 0)

    before = now()
    x, gamma = wire.leaves()
    torch.autograd.backward(wire.call(x, gamma), wire.dy())
    ran = tuple(after - earlier for after, earlier in zip(now(), before, strict=True))
    return (
        "" if ran == (1, 1) else f"{wire.impl.name} ran {ran[0]} times forward and {ran[1]} times backward for one call"
    )


def _second_derivative(wire: Wire) -> str:
    """Differentiate dx again: right, or refused. Treating rstd as a constant there is wrong by about 100 %."""
    x, gamma = wire.leaves()
    direction = wire.inputs.dy.flip(0)
    try:
        (dx,) = torch.autograd.grad(wire.call(x, gamma), x, wire.dy(), create_graph=True)
        second = torch.autograd.grad(dx, (x, gamma), direction)
    except Exception as raised:
        seen = classified(wire.impl, raised)
        if seen.status == "error":
            raise
        return ""  # refused aloud
    from rmsnorm_cli.kernels import reference

    wide_x, wide_gamma = (tensor.detach().double().requires_grad_() for tensor in (x, gamma))
    if wire.impl.rounding == "gemma":
        wide_gamma = (wide_gamma.detach() + 1).requires_grad_()
    (wide_dx,) = torch.autograd.grad(
        reference.forward(wide_x, wide_gamma, wire.eps), wide_x, wire.inputs.dy.double(), create_graph=True
    )
    right = torch.autograd.grad(wide_dx, (wide_x, wide_gamma), direction.double())
    for name, has, want in zip(("x", "gamma"), second, right, strict=True):
        off = float((has.double() - want).norm() / want.norm())
        if not off <= 32 * torch.finfo(x.dtype).eps:
            return f"the second derivative with respect to {name} is off by {off:.3g} of its size"
    return ""


def _side_stream(wire: Wire) -> str:
    """Run on a stream that is not the default one, and read the result on it."""
    x, gamma = wire.leaves()
    stream = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        y = wire.call(x, gamma)
        dx, dgamma = torch.autograd.grad(y, (x, gamma), wire.dy())
        copies = y.clone(), dx.clone(), dgamma.clone()
    stream.synchronize()
    wants = (wire.y, wire.dx, wire.dgamma)
    return first(*(wire.differs("a result on a side stream", a, b) for a, b in zip(copies, wants, strict=True)))


CHECKS: dict[str, Callable[[Wire], str]] = {
    "gamma frozen": _frozen_gamma,
    "x frozen": _frozen_x,
    "no gradient asked": _nothing_asked,
    "no_grad and inference_mode": _without_grad,
    "x used twice": _twice_in_graph,
    "two steps add up": _two_steps,
    "two backwards through one graph": _two_backwards,
    "x changed in place after the forward": _changed_after("x"),
    "gamma changed in place after the forward": _changed_after("gamma"),
    "y changed in place after the forward": _y_changed_after,
    "a hook keeps dy": _hook_keeps_dy,
    "dy expanded": _expanded_dy,
    "dy strided": _strided_dy,
    "dy sliced by cat": _sliced_by_cat,
    "checkpointed": _checkpointed,
    "new numbers at the same address": _new_content,
    "second derivative": _second_derivative,
}
OF_OURS: dict[str, Callable[[Wire], str]] = {"what was asked for ran": _counted}
ON_GPU: dict[str, Callable[[Wire], str]] = {"side stream": _side_stream}
