"""The plan of a fused forward: which kernel, with which constants and grid, for one kind of call."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from rmsnorm_cli.kernels import forward, split
from rmsnorm_cli.kernels.contract import FP32_LARGEST, FP32_SMALLEST_NORMAL, INTERPRETED
from rmsnorm_cli.kernels.program import Program
from rmsnorm_cli.kernels.rowlayout import alignment, describe, empty_in_order, walking_order
from rmsnorm_cli.kernels.tables import Forward, forward_by_chunks, forward_table


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


def refused(problem: Exception) -> bool:
    """Say whether the card cannot hold the launch: its programs together, or one program's shared memory."""
    return isinstance(problem, OutOfResources) or "cooperative" in str(problem)


class ForwardPlan:
    """Everything of a forward that the same call next time need not find out again."""

    def __init__(self, x: Tensor, gamma: Tensor | None) -> None:
        wide = x.dtype == torch.float64
        self.smallest = sys.float_info.min if wide else FP32_SMALLEST_NORMAL
        self.largest = sys.float_info.max if wide else FP32_LARGEST
        self.N = x.shape[-1]
        self.M = x.numel() // self.N
        if self.M == 0:
            return
        order = walking_order(x)
        assert order is not None
        self.order = order
        self.accumulator, self.device = accumulator(x.dtype), x.device
        self.contiguous = x.is_contiguous()
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
        config = forward_table(self.N, x.element_size())
        if config.path == "shared" and not can_share(triton.cdiv(self.N, config.A), config.per_sm, x):
            config = forward_by_chunks(x.element_size())
        self._choose(config, x)

    def _choose(self, config: Forward, x: Tensor) -> None:
        self.config = config
        self.path = f"forward/{config.path}"
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
            }
            self.program = Program(forward.rows_kernel, constants, config.warps)
            self.grid = (triton.cdiv(self.M, config.rows), 1)
        elif config.path == "loop":
            constants = {"CHUNK": config.A, "STAGES": config.stages, "FULL": config.A * (N // config.A) == N}
            self.program = Program(forward.loop_kernel, {**constants, "ALIGN": align, **flags}, config.warps)
            self.grid = (self.M, 1)
        else:
            self._share(config, x)

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

    def run(self, x: Tensor, gamma: Tensor | None, eps: float) -> tuple[Tensor, Tensor, str]:
        """Allocate y and rstd, launch, and return both with the name of the path."""
        if self.M == 0:
            return torch.empty_like(x), x.new_empty(0, dtype=accumulator(x.dtype)), "forward/empty"
        y = torch.empty_like(x) if self.contiguous else empty_in_order(x, self.order)
        rstd = torch.empty(self.M, dtype=self.accumulator, device=self.device)
        tensors: tuple[Tensor, ...] = (x, x if gamma is None else gamma, y, rstd)
        scalars: tuple[float, ...] = (self.M, self.N, eps, *self.layout)
        if self.config.path == "shared":
            words = torch.zeros(self.words, dtype=torch.int64, device=self.device).view(torch.uint64)
            tensors, scalars = (*tensors, words), (self.M, self.N, eps, *self.shared, *self.layout)
        try:
            self.program.launch(self.grid, tensors, scalars)
        except (RuntimeError, OutOfResources) as problem:
            if not refused(problem) or self.config.path == "loop":
                raise
            self._choose(forward_by_chunks(x.element_size()), x)
            return self.run(x, gamma, eps)
        return y, rstd, self.path


assert math.gcd(8, split.SLOTS.value) == 8  # `words` counts on it
