"""The autograd of an implementation in a process of its own: a graph that is kept there, and its backward."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmsnorm_cli.kernels.foreign_common import ForeignRefused

if TYPE_CHECKING:
    from rmsnorm_cli.kernels.foreign import ForeignWorker


class Graph:
    """The handle of a graph that the child keeps for a backward; it is dropped there once nothing here holds it."""

    def __init__(self, worker: "ForeignWorker", number: int) -> None:
        self.id = number
        self.process: object = None
        self._forgotten = worker._forgotten

    def __del__(self) -> None:
        self._forgotten.append(self.id)


class Remote(torch.autograd.Function):
    """Forward and backward in the other process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor | None, eps: float, worker: "ForeignWorker") -> Tensor:
        """Return y of the other process, and keep there what its backward needs."""
        needs_dx, needs_dgamma = ctx.needs_input_grad[:2]
        y, ctx.graph, is_differentiable = worker.forward(x, gamma, eps, (needs_dx, needs_dgamma))
        if not is_differentiable:
            ctx.mark_non_differentiable(y)
        ctx.worker = worker
        ctx.save_for_backward(x, gamma)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return dx and dgamma of the other process. ForeignRefused where a second derivative would follow."""
        if torch.is_grad_enabled():  # a result without a graph would silently leave the second derivative out
            raise ForeignRefused(
                f"{ctx.worker.name}: no second derivative (create_graph=True) from a process of its own"
            )
        (dy,) = grad_outputs
        x, gamma = ctx.saved_tensors
        dx, dgamma = ctx.worker.backward(ctx.graph, dy, x, gamma)
        return dx, dgamma, None, None
