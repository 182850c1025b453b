"""Proof that the norm ran: our kernels count their own launches, and everyone's calls are counted at the layer."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from rmsnorm_cli.kernels import counters

Calls = dict[str, dict[str, int]]  # {implementation: {event: calls}}
LAYER = "layer"  # the name under which the calls of the norm's layer stand beside the kernels' own


class Counted:
    """f(x, gamma, eps) -> y like `call`, which counts its calls and how often a gradient reaches its output."""

    def __init__(self, call: Callable[[Tensor, Tensor | None, float], Tensor]) -> None:
        self.call = call
        self.calls: Counter[str] = Counter()

    def __call__(self, x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
        """Run `call` and count."""
        y = self.call(x, gamma, eps)
        self.calls["forward"] += 1
        if y.grad_fn is not None:  # a hook of the node: one of the tensor is deaf where it came out of torch.load
            y.grad_fn.register_prehook(self._backward)
        return y

    def _backward(self, gradients: tuple[Tensor, ...]) -> None:
        self.calls["backward"] += 1


@contextmanager
def adding(total: Calls, layer: Counted) -> Iterator[None]:
    """Add to `total` what the kernels and the layer count in the block, and nothing of what they count outside it."""
    before = counters() | {LAYER: dict(layer.calls)}
    yield
    for name, events in (counters() | {LAYER: dict(layer.calls)}).items():
        for event, number in events.items():
            grown = number - before.get(name, {}).get(event, 0)
            if grown:
                held = total.setdefault(name, {})
                held[event] = held.get(event, 0) + grown
