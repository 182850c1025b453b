"""The yardstick: the reference with every element of its output moved by one rounding, in a direction drawn at random.

How far a network drifts that is wrong by nothing but rounding is what a right kernel may drift; seed-to-seed noise is
ten thousand times larger and accepts almost every mistake.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Call = Callable[[Tensor, Tensor | None, float], Tensor]


class Twin:
    """f(x, gamma, eps) -> y like `call`, with each element of y replaced by its neighbour above or below.

    x is the rows `share` of a batch of `rows`. Directions are drawn for the whole batch, so that any number of
    processes over one batch perturbs it alike. The gradient passes the perturbation unchanged.
    """

    def __init__(self, call: Call, draws: torch.Generator) -> None:
        self.call, self.draws = call, draws
        self.rows = 0
        self.share = slice(0, 0)

    def __call__(self, x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
        """Return y moved by one unit in the last place."""
        y = self.call(x, gamma, eps)
        up = torch.randint(2, (self.rows, x.shape[-1]), generator=self.draws)[self.share].to(x.device)
        exact = y.detach()
        neighbour = torch.nextafter(exact, torch.where(up == 1, torch.inf, -torch.inf).to(y.dtype))
        return y + (neighbour - exact)  # the difference of neighbours is exact, and so is the sum
