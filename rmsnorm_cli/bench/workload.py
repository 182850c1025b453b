"""A cell of the benchmark: shape and dtype, the bytes each perimeter must move, and the buffers that are timed.

Buffers come in sets of equal values at different addresses. Cold times walk through sets that together hold at least
three times the L2 cache, and twenty times where few sets do; warm times and whole calls stay on the first set.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rmsnorm_cli.bench.rows import STREAMS
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.timing.cuda import Body


@dataclass(frozen=True)
class Cell:
    """One shape (M rows, N columns) in one dtype, by torch's name; x and dy `start` so many numbers after 16 bytes."""

    M: int
    N: int
    dtype: str
    start: int = 0

    @property
    def name(self) -> str:
        """Return the cell's name in tables and records."""
        return f"{self.M}x{self.N}{f'+{self.start}' if self.start else ''} {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return torch's dtype of x, gamma and dy."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def bytes_moved(self, perimeter: str) -> int:
        """Return the fewest bytes a perimeter moves through memory: each operand read, each result written, once.

        s bytes an element: forward 2·M·N·s + N·s, with rstd saved 4·M more; backward 3·M·N·s + 2·N·s + 4·M.
        """
        s = self.torch_dtype.itemsize
        forward = 2 * self.M * self.N * s + self.N * s
        saving = forward + 4 * self.M
        backward = 3 * self.M * self.N * s + 2 * self.N * s + 4 * self.M
        return {
            "forward": forward,
            "forward_train": saving,
            "backward": backward,
            "forward_backward": saving + backward,
        }[perimeter]

    def stream_bytes(self, perimeter: str) -> int:
        """Return the bytes that the plain stream of a perimeter moves: its matrices, without the vectors."""
        passes = {"forward": 2, "forward_train": 2, "backward": 3, "forward_backward": 5}[perimeter]
        return passes * self.M * self.N * self.torch_dtype.itemsize

    @property
    def set_bytes(self) -> int:
        """Return the bytes of the smallest working set of a call, x and y, by which sets in rotation are counted."""
        return 2 * self.M * self.N * self.torch_dtype.itemsize


class Buffers:
    """x, gamma and dy of a cell on one device, in `sets` copies of x and dy; random values of a seed.

    Rows of x are spread over two decades, gamma lies around ±1, dy is scaled like the gradient of a mean loss.
    """

    def __init__(self, cell: Cell, sets: int, device: str | torch.device, seed: int) -> None:
        self.cell, self.device = cell, torch.device(device)
        self.x = [self._rows().requires_grad_() for _ in range(sets)]
        self.dy = [self._rows() for _ in range(sets)]
        self.gamma = self._empty(cell.N).requires_grad_()
        self.refill(seed)

    def refill(self, seed: int) -> None:
        """Write new values to the same addresses, so that a program that remembers answers by address is wrong."""
        draw = torch.Generator(self.device).manual_seed(seed)
        M, N = self.cell.M, self.cell.N
        rms = 10 ** (torch.rand(M, 1, generator=draw, device=self.device) * 2 - 1)
        signs = torch.randint(0, 2, (N,), generator=draw, device=self.device) * 2 - 1
        with torch.no_grad():
            for target, values in (
                (self.x[0], self._normal(draw, M, N) * rms),
                (self.dy[0], self._normal(draw, M, N) / M**0.5),
                (self.gamma, signs * (1 + 0.2 * self._normal(draw, N))),
            ):
                target.copy_(values)
            for others in (self.x, self.dy):
                for other in others[1:]:
                    other.copy_(others[0])

    def pristine(self) -> Inputs:
        """Return copies of the values in force, out of the reach of what is timed."""
        return Inputs(self.x[0].detach().clone(), self.gamma.detach().clone(), self.dy[0].clone())

    def streams(self, perimeter: str, sets: int) -> list[Body]:
        """Return a plain stream for some sets: a copy for the forward, an add for the backward, into own memory.

        It reads aligned copies where x and dy do not start on 16 bytes: what it takes is what the bytes take.
        """
        return [self._stream(STREAMS[perimeter], j) for j in range(sets)]

    def _stream(self, kind: str, j: int) -> Body:
        if kind == "copy, then add":
            copy, add = self._stream("copy", j), self._stream("add", j)
            return lambda: copy() + add()
        x, dy = self.x[j].detach(), self.dy[j]
        if self.cell.start:
            x = x.clone()
            dy = dy.clone() if kind == "add" else dy
        target = self._empty(*x.shape)
        return lambda: (target.copy_(x) if kind == "copy" else torch.add(x, dy, out=target),)

    def _rows(self) -> Tensor:
        """Return contiguous memory for x or dy that begins where the cell says."""
        M, N, start = self.cell.M, self.cell.N, self.cell.start
        return self._empty(M * N + start)[start:].view(M, N)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.cell.torch_dtype, device=self.device)

    def _normal(self, draw: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=self.device)
