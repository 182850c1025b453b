"""An implementation on a cell's buffers: the calls of each perimeter, and the check of what those very calls return.

Every timed output is checked. The first time against the float64 oracle by the declared tolerances; afterwards bit for
bit against the outputs that passed, and only where bits differ against the oracle again. Before each sample the memory
that outputs will be written to is filled with NaN, so that work which is skipped leaves wrong numbers behind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from rmsnorm_cli.bench.answers import Answers
from rmsnorm_cli.bench.workload import Buffers
from rmsnorm_cli.kernels.api import Implementation

Outputs = tuple[Tensor, ...]
Body = Callable[[], Outputs]

RESULTS = {
    "forward": ("y",),
    "forward_train": ("y",),
    "backward": ("dx", "dgamma"),
    "forward_backward": ("y", "dx", "dgamma"),
}


@dataclass
class Check:
    """Holds the outputs of one perimeter of one program against the oracle, and remembers the bits that passed."""

    answers: Answers
    perimeter: str
    worst: dict[str, float] = field(default_factory=dict)  # largest error as a share of its tolerance, by output
    exact: int = 0  # samples whose bits were those that had passed
    judged: int = 0  # samples held against the oracle itself
    _passed: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, outputs: Sequence[Any]) -> str | None:
        """Return what is wrong with a call's outputs, or None."""
        names = RESULTS[self.perimeter]
        for name, got in zip(names, outputs, strict=True):
            problem = self._one(name, got)
            if problem is not None:
                return f"{name}: {problem}"
        return None

    def _one(self, name: str, got: Any) -> str | None:
        known = self._passed.get(name)
        if known is not None and isinstance(got, Tensor) and got.dtype == known.dtype and torch.equal(got, known):
            self.exact += 1
            return None
        found = self.answers.judge(name, got)
        self.judged += 1
        if not found.ok:
            return found.detail
        self.worst[name] = max(self.worst.get(name, 0.0), found.worst or 0.0)
        self._passed.setdefault(name, got.detach().clone())
        return None

    @property
    def like(self) -> list[Tensor]:
        """Return tensors of the outputs' shapes and dtypes: those that passed."""
        return list(self._passed.values())


class Program:
    """One implementation on a cell's buffers. `consumes_dy`: its backward writes into dy, so each call gets its own."""

    def __init__(self, impl: Implementation, buffers: Buffers, eps: float) -> None:
        self.impl, self.buffers, self.eps = impl, buffers, eps
        self.consumes_dy = False
        self._retained: dict[int, Tensor] = {}
        self._own_dy: list[Tensor] = []

    def body(self, perimeter: str, j: int = 0, turn: int = 0) -> Body:
        """Return one call of a perimeter on set j; its outputs are named by RESULTS. `turn` picks a consumer's dy."""
        call, eps = self.impl.call, self.eps
        x, gamma, dy = self.buffers.x[j], self.buffers.gamma, self._dy(j, turn)

        def forward() -> Outputs:
            return (call(x, gamma, eps),)

        def forward_backward() -> Outputs:
            y = call(x, gamma, eps)
            return (y, *torch.autograd.grad(y, (x, gamma), dy))

        if perimeter in ("forward", "forward_train"):
            return forward
        if perimeter == "forward_backward":
            return forward_backward
        if j not in self._retained:
            self._retained[j] = call(x, gamma, eps)
        y = self._retained[j]
        return lambda: torch.autograd.grad(y, (x, gamma), dy, retain_graph=True)

    def bodies(self, perimeter: str, sets: int, turns: int) -> list[Body]:
        """Return `turns` calls that walk through `sets` sets of buffers; a consumer of dy never meets one twice."""
        return [self.body(perimeter, i % sets, i) for i in range(turns)]

    def look_for_consumed_dy(self) -> None:
        """Run one backward and see whether dy is still what it was; give the buffers their values back."""
        dy = self.buffers.dy[0]
        before = dy.clone()
        self.body("forward_backward")()
        if not torch.equal(dy, before):
            self.consumes_dy = True
            dy.copy_(before)

    def restore(self) -> None:
        """Give every dy that a consumer wrote to its values back."""
        for own in self._own_dy:
            own.copy_(self.buffers.dy[0])

    def release(self) -> None:
        """Forget retained graphs and own copies: the buffers hold other values now, or another perimeter comes."""
        self._retained.clear()
        self._own_dy.clear()

    def _dy(self, j: int, turn: int) -> Tensor:
        if not self.consumes_dy:
            return self.buffers.dy[j]
        while len(self._own_dy) <= turn:
            self._own_dy.append(self.buffers.dy[0].clone())
        return self._own_dy[turn]


class Loop:
    """A perimeter as a user's loop calls it: one body after another, the last call's outputs kept for the check."""

    def __init__(self, program: Program, perimeter: str, calls: int, check: Check) -> None:
        turns = calls if program.consumes_dy else 1
        self.program, self.check = program, check
        self.outputs: Outputs | None = None
        self._bodies = program.bodies(perimeter, 1, turns)
        self._next = cycle(self._bodies)

    def call(self) -> None:
        """Make one call; the previous outputs are let go when the new ones are there, as `y = f(x)` does."""
        self.outputs = next(self._next)()

    def prepare(self) -> None:
        """Poison the last outputs and the memory that new ones will lie in, and give a consumer fresh values of dy."""
        for output in self.outputs or ():
            output.detach().fill_(float("nan"))
        self.outputs = None
        poison_free_memory(self.check.like)
        if self.program.consumes_dy:
            self.program.restore()
            self._next = cycle(self._bodies)

    def verdict(self) -> str | None:
        """Return what is wrong with the outputs of the last call, or with the inputs after it; None if nothing is."""
        wrong = "no call was made" if self.outputs is None else self.check(self.outputs)
        written = self.check.answers.written_input(self.program.buffers)
        return wrong or written


def poison_free_memory(like: Sequence[Tensor], copies: int = 2) -> None:
    """Fill with NaN, and free again, memory that the allocator will hand out for outputs like these.

    A program that allocates its outputs and leaves them unwritten would otherwise return its last right answer.
    """
    held = [torch.full_like(tensor, float("nan")) for tensor in like for _ in range(copies)]
    del held


def saved_bytes(call: Callable[[], Any], inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Return (all, beyond the inputs) bytes of distinct storage that a call saves through autograd's own hooks.

    What a program keeps for its backward in other ways is not seen.
    """
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would hold on to the graph that holds on to it

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = call()
    del held
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return sum(found.values()), sum(size for address, size in found.items() if address not in own)
