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
from rmsnorm_cli.kernels.geometry import Backward, Forward, divided, ring_bytes, slot, unaligned_bytes, whole_pieces
from rmsnorm_cli.kernels.program import Program
from rmsnorm_cli.kernels.rowlayout import VECTOR_BYTES, Rows, alignment, describe, output_form, walking_order
from rmsnorm_cli.kernels.tables import forward_by_chunks, forward_table, forward_unaligned, stays

try:
    from rmsnorm_cli.kernels import ringbackward as ringbackward
    from rmsnorm_cli.kernels import ringforward as ringforward
    from rmsnorm_cli.kernels import unalignedbackward as unalignedbackward
    from rmsnorm_cli.kernels import unalignedforward as unalignedforward
except ImportError:  # pragma: no cover  # Gluon is experimental: where it has moved, no path needs it
    ringbackward = ringforward = unalignedbackward = unalignedforward = None  # type: ignore[assignment]

GLUON = ("ring", "unaligned")
"""The paths whose kernels are written in Gluon."""

VIEWING = ("3.5.", "3.6.", "3.7.")
"""The Tritons whose Gluon gives a view of shared memory from any number on, which `unaligned` reads by."""

UNCOMPILED = ("error encountered during parsing", "PassManager::run failed")
"""What Triton says, as a RuntimeError, where a kernel's source becomes code that its own checks or passes refuse."""


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


def takes_gluon(x: Tensor, rows: Sequence[Rows]) -> bool:
    """Say whether a kernel written for CUDA can copy rows that lie like these into shared memory.

    Before Ampere no card copies there by itself, and a compiler that is asked for it ends the process.
    """
    if ringforward is None or INTERPRETED or torch.version.hip is not None or x.dtype == torch.float64:
        return False
    return all(lie.unit for lie in rows) and torch.cuda.get_device_capability(x.device) >= (8, 0)


def takes_ring(x: Tensor, align: int, rows: Sequence[Rows]) -> bool:
    """Say whether these rows can be copied into shared memory 16 bytes at a time."""
    return takes_gluon(x, rows) and align * x.element_size() == VECTOR_BYTES


def takes_unaligned(
    config: Forward | Backward | None, align: int, rows: Sequence[Rows], x: Tensor, most: int = VECTOR_BYTES
) -> bool:
    """Say whether rows that do not start on `most` bytes are to be read by the vectors in which they lie.

    All but the first and the last row must start and end a vector away from the ends of the tensor: rows that share
    their memory (an expanded dy) do not.
    """
    if config is None or not takes_gluon(x, rows) or not triton.__version__.startswith(VIEWING):
        return False
    if align * x.element_size() >= most:
        return False
    vector, N = VECTOR_BYTES // x.element_size(), x.shape[-1]
    apart = all(min(lie.inner, lie.outer if lie.two else lie.inner) >= vector for lie in rows)
    return apart and unaligned_bytes(config, N, x.element_size(), len(rows)) <= shared_memory(x.get_device())


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


def unaligned_constants(config: Forward | Backward, N: int, itemsize: int) -> dict[str, Any]:
    """Return what both `unaligned` kernels are compiled for."""
    unit = 32 * config.warps
    return {
        "UNITS": triton.cdiv(N, unit),
        "WHOLE": N // unit,
        "WARPS": config.warps,
        "DEPTH": config.stages,
        "A": config.A,
        "B": config.B,
        "SLOT": slot(config, N, itemsize),
    }


def refused(problem: Exception, path: str) -> bool:
    """Say whether another path is to serve instead of raising the problem of a launch.

    The card cannot hold its programs together, or one program's shared memory; or this Triton does not compile it:
    Gluon, in which some paths are written, is experimental and may change.
    """
    uncompiled = isinstance(problem, CompilationError) or any(words in str(problem) for words in UNCOMPILED)
    outdated = path in GLUON and uncompiled
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
        self.allocation = allocator(x.device)
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
        odd = forward_unaligned(self.N, x.element_size())
        if takes_ring(x, self.align, [rows]) and holds_ring(ringed, self.N, 1, x):
            self._choose(ringed, x)
        elif odd is not None and takes_unaligned(odd, self.align, [rows], x, most=4):
            self._choose(odd, x)
        else:
            self._choose(self._without_gluon(x), x)

    def _without_gluon(self, x: Tensor) -> Forward:
        config = forward_table(self.N, x.element_size(), aligned=self.align * x.element_size())
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
                "Y_ALIGN": math.gcd(VECTOR_BYTES // x.element_size(), N),  # y is memory of our own
                **flags,
                "RELOAD": config.path == "reload",
                "STAY": config.path == "reload" or stays(self.M, N, x.element_size()),
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
        elif config.path == "unaligned":
            self._unaligned(config, x)
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

    def _unaligned(self, config: Forward, x: Tensor) -> None:
        flags = {name: self.flags[name] for name in ("TWO", "GAMMA")}
        constants = {**unaligned_constants(config, self.N, x.element_size()), **flags}
        kernel = unalignedforward.unaligned_forward_kernel
        self.program = Program(kernel, constants, config.warps, per_sm=config.per_sm)
        self.grid = (min(multiprocessors(x.get_device()) * config.per_sm, self.M), 1)

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
        empty = self.allocation()
        y = empty(self.shape, self.stride, self.dtype)
        rstd = empty((self.M,), (1,), self.accumulator) if self.keeps_rstd else None
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
            self._choose(self._without_gluon(x) if self.config.path in GLUON else by_chunks, x)
            return self.run(x, gamma, eps)
        return y, rstd, self.path


assert math.gcd(8, split.SLOTS.value) == 8  # `words` counts on it
