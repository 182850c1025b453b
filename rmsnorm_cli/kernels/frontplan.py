"""The plan of a fused forward: which kernel, with which constants and grid, for one kind of call."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from rmsnorm_cli.kernels import forward, split
from rmsnorm_cli.kernels.allocate import allocator
from rmsnorm_cli.kernels.contract import FP32_LARGEST, FP32_SMALLEST_NORMAL, INTERPRETED
from rmsnorm_cli.kernels.program import Program
from rmsnorm_cli.kernels.rowlayout import VECTOR_BYTES, Rows, alignment, describe, output_form, walking_order
from rmsnorm_cli.kernels.tables import (
    Backward,
    Forward,
    divided,
    forward_by_chunks,
    forward_table,
    ring_bytes,
    whole_pieces,
)

try:
    from rmsnorm_cli.kernels import ringbackward as ringbackward
    from rmsnorm_cli.kernels import ringforward as ringforward
except ImportError:  # pragma: no cover  # Gluon is experimental: where it has moved, no path needs it
    ringbackward = ringforward = None  # type: ignore[assignment]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic, of rstd and of the partial sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def multiprocessors(device: int) -> int:
    """Return how many SMs a CUDA device has; 2 in the interpreter, so that a program walks several tiles there too."""
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def can_share(parts: int, per_sm: int, x: Tensor) -> bool:
    """Say whether the K programs of a row can be resident at once, so that they may wait for one another."""
    if INTERPRETED or torch.version.hip is not None:  # pragma: no cover
        return False
    return parts <= multiprocessors(x.get_device()) * per_sm


def shared_memory(device: int) -> int:
    """Return how many bytes of shared memory one program may have on a CUDA device."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def takes_ring(x: Tensor, align: int, rows: Sequence[Rows]) -> bool:
    """Say whether a kernel written for CUDA can copy these rows into shared memory 16 bytes at a time."""
    if ringforward is None or INTERPRETED or torch.version.hip is not None or x.dtype == torch.float64:
        return False
    return align * x.element_size() == VECTOR_BYTES and all(lie.unit for lie in rows)


def holds_ring(config: Forward | Backward, N: int, tensors: int, x: Tensor) -> bool:
    """Say whether a ring is what the table asks for, and whether the card has the shared memory and the programs."""
    if config.path != "ring":
        return False
    parts, _, _ = divided(config, N, x.element_size())
    fits = ring_bytes(config, tensors) <= shared_memory(x.get_device())
    return fits and (parts == 1 or can_share(parts, config.per_sm, x))


def ring_constants(config: Forward | Backward, N: int, itemsize: int, align: int) -> dict[str, Any]:
    """Return what both `ring` kernels are compiled for."""
    K, _, pieces = divided(config, N, itemsize)
    return {
        "PIECES": pieces,
        "DEPTH": config.stages // pieces,
        "EXTRA": config.stages % pieces,
        "WARPS": config.warps,
        "SHARED": K > 1,
        "LAG": config.lag if K > 1 else 0,
        "PARTS": triton.next_power_of_2(K),
        "WHOLE": whole_pieces(config, N, itemsize),
        "ALIGN": align,
    }


def refused(problem: Exception, path: str) -> bool:
    """Say whether another path is to serve instead of raising the problem of a launch.

    The card cannot hold its programs together, or one program's shared memory; or this Triton does not compile a
    `ring`: Gluon, in which that is written, is experimental and may change.
    """
    outdated = path == "ring" and isinstance(problem, CompilationError)
    return outdated or isinstance(problem, OutOfResources) or "cooperative" in str(problem)


class ForwardPlan:
    """Everything of a forward that the same call next time need not find out again."""

    def __init__(self, x: Tensor, gamma: Tensor | None, need_rstd: bool = True) -> None:
        self.need_rstd = need_rstd
        wide = x.dtype == torch.float64
        self.smallest = sys.float_info.min if wide else FP32_SMALLEST_NORMAL
        self.largest = sys.float_info.max if wide else FP32_LARGEST
        self.N = x.shape[-1]
        self.M = x.numel() // self.N
        if self.M == 0:
            return
        order = walking_order(x)
        assert order is not None
        self.dtype, self.accumulator, self.device = x.dtype, accumulator(x.dtype), x.device
        self.empty = allocator(x.device)
        self.shape, self.stride = output_form(x, order)
        rows = describe(x, order)
        assert rows is not None
        self.align = alignment(self.N, [(x, rows)])
        self.gamma_col = 0 if gamma is None else gamma.stride(0)
        self.layout = (*rows.arguments, self.gamma_col)
        self.flags = {
            "TWO": rows.two,
            "UNIT": rows.unit,
            "GAMMA": gamma is not None,
            "GAMMA_UNIT": self.gamma_col == 1 or self.N == 1,
        }
        ringed = forward_table(self.N, x.element_size(), ring=True)
        rings = takes_ring(x, self.align, [rows]) and holds_ring(ringed, self.N, 1, x)
        self._choose(ringed if rings else self._without_ring(x), x)

    def _without_ring(self, x: Tensor) -> Forward:
        config = forward_table(self.N, x.element_size())
        shareable = can_share(triton.cdiv(self.N, config.A), config.per_sm, x)
        return forward_by_chunks(x.element_size()) if config.path == "shared" and not shareable else config

    def _choose(self, config: Forward, x: Tensor) -> None:
        self.config = config
        self.path = f"forward/{config.path}"
        self.keeps_rstd = self.need_rstd or config.path != "rows"  # wide rows do not feel it
        N, align, flags = self.N, self.align, self.flags
        if config.path in ("rows", "reload"):
            constants: dict[str, Any] = {
                "ROWS": config.rows,
                "A": config.A,
                "B": config.B,
                "FULL": config.A + config.B == N,
                "ALIGN": align,
                **flags,
                "RELOAD": config.path == "reload",
                "RSTD": self.keeps_rstd,
            }
            self.program = Program(forward.rows_kernel, constants, config.warps)
            self.grid = (triton.cdiv(self.M, config.rows), 1)
        elif config.path == "loop":
            constants = {"CHUNK": config.A, "STAGES": config.stages, "FULL": config.A * (N // config.A) == N}
            self.program = Program(forward.loop_kernel, {**constants, "ALIGN": align, **flags}, config.warps)
            self.grid = (self.M, 1)
        elif config.path == "ring":
            self._ring(config, x)
        else:
            self._share(config, x)

    def _ring(self, config: Forward, x: Tensor) -> None:
        K, width, _ = divided(config, self.N, x.element_size())
        groups = min(multiprocessors(x.get_device()) * config.per_sm // K, self.M)
        constants = ring_constants(config, self.N, x.element_size(), self.align)
        flags = {name: value for name, value in self.flags.items() if name != "UNIT"}
        self.program = Program(
            ringforward.ring_forward_kernel,
            {**constants, **flags},
            config.warps,
            cooperative=K > 1,
            registers=config.registers,
        )
        self.grid = (groups * K, 1)
        self.shared = (K, width)
        self.words = groups * K * 8

    def _share(self, config: Forward, x: Tensor) -> None:
        K = triton.cdiv(self.N, config.A)
        width = triton.cdiv(triton.cdiv(self.N, K), self.align) * self.align
        groups = min(multiprocessors(x.get_device()) * config.per_sm // K, self.M)
        constants = {
            "ROWS": 1,
            "BLOCK": config.A,
            "PARTS": triton.next_power_of_2(K),
            "STAGES": config.stages,
            "LAG": 1,
            "PTX": not INTERPRETED,
            "FULL": width == config.A and self.N % width == 0,
            "ALIGN": self.align,
        }
        self.program = Program(
            split.shared_forward_kernel,
            {**constants, **self.flags},
            config.warps,
            cooperative=True,
            registers=config.registers,
        )
        self.grid = (groups * K, 1)
        self.shared = (K, width)
        self.words = groups * K * 8

    def run(self, x: Tensor, gamma: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None, str]:
        """Allocate y and what is kept of rstd, launch, and return both with the name of the path."""
        if self.M == 0:
            return torch.empty_like(x), x.new_empty(0, dtype=accumulator(x.dtype)), "forward/empty"
        y = self.empty(self.shape, self.stride, self.dtype)
        rstd = self.empty((self.M,), (1,), self.accumulator) if self.keeps_rstd else None
        tensors: tuple[Tensor, ...] = (x, x if gamma is None else gamma, y, x if rstd is None else rstd)
        scalars: tuple[float, ...] = (self.M, self.N, eps, *self.layout)
        if self.config.path in ("shared", "ring"):
            words = torch.zeros(self.words, dtype=torch.int64, device=self.device).view(torch.uint64)
            tensors, scalars = (*tensors, words), (self.M, self.N, eps, *self.shared, *self.layout)
        try:
            self.program.launch(self.grid, tensors, scalars)
        except (RuntimeError, OutOfResources, CompilationError) as problem:
            if not refused(problem, self.config.path) or self.config.path == "loop":
                raise
            by_chunks = forward_by_chunks(x.element_size())
            self._choose(self._without_ring(x) if self.config.path == "ring" else by_chunks, x)
            return self.run(x, gamma, eps)
        return y, rstd, self.path


assert math.gcd(8, split.SLOTS.value) == 8  # `words` counts on it
