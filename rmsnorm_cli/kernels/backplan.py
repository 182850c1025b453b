"""The plan of a fused backward: which kernels, with which constants and grids, for one kind of call."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from rmsnorm_cli.kernels import backward, chunks, reread, split, tables
from rmsnorm_cli.kernels.allocate import allocator
from rmsnorm_cli.kernels.contract import INTERPRETED
from rmsnorm_cli.kernels.frontplan import (
    GLUON,
    accumulator,
    can_share,
    holds_ring,
    multiprocessors,
    refused,
    ring_constants,
    ringbackward,
    takes_ring,
    takes_unaligned,
    unaligned_constants,
    unalignedbackward,
)
from rmsnorm_cli.kernels.geometry import Backward, divided
from rmsnorm_cli.kernels.program import Program
from rmsnorm_cli.kernels.rowlayout import VECTOR_BYTES, alignment, describe, output_form
from rmsnorm_cli.kernels.tables import backward_by_chunks, backward_table, backward_unaligned, column_sum_table

PADDING = VECTOR_BYTES // 4
"""Numbers of fp32 in 16 bytes: the rows of partial sums of unaligned rows are padded to a multiple of it."""


def geometry(columns: int) -> int:
    """Return the columns of a tile: as asked for, or 64 times as many in the interpreter, which pays by the program."""
    return 64 * columns if INTERPRETED else columns


class BackwardPlan:
    """Everything of a backward that the same call next time need not find out again."""

    def __init__(
        self, dy: Tensor, x: Tensor, gamma: Tensor | None, order: tuple[int, ...], need_dx: bool, need_dgamma: bool
    ) -> None:
        self.N = x.shape[-1]
        self.M = x.numel() // self.N
        self.dtype = x.dtype
        self.allocation = allocator(x.device)
        self.shape, self.stride = output_form(x, order)
        self.need_dx, self.need_dgamma = need_dx, need_dgamma
        self.path = "backward/empty"
        if self.M == 0 or not (need_dx or need_dgamma):
            return
        x_rows, dy_rows = describe(x, order), describe(dy, order)
        assert x_rows is not None
        assert dy_rows is not None
        self.align = alignment(self.N, [(x, x_rows), (dy, dy_rows)])
        self.layout = (*dy_rows.arguments, *x_rows.arguments, 0 if gamma is None else gamma.stride(0))
        self.flags = {
            "DY_TWO": dy_rows.two,
            "DY_UNIT": dy_rows.unit,
            "TWO": x_rows.two,
            "UNIT": x_rows.unit,
            "GAMMA": gamma is not None,
            "GAMMA_UNIT": gamma is not None and (gamma.stride(0) == 1 or self.N == 1),
        }
        self.plain = all(rows.unit and not rows.two and rows.inner == self.N for rows in (x_rows, dy_rows))
        self.sms = multiprocessors(x.get_device())
        self.early = (
            not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (9, 0)
        )
        self.itemsize = x.element_size()
        ringed = backward_table(self.N, self.itemsize, ring=True)
        odd = backward_unaligned(self.N, self.itemsize)
        rows = [x_rows, dy_rows]
        if need_dx and takes_ring(x, self.align, rows) and holds_ring(ringed, self.N, 2, x):
            self._choose(ringed)
        elif odd is not None and takes_unaligned(odd, self.align, rows, x):
            self._choose(odd)
        else:
            self._choose(self._without_gluon(x))

    # --- choice ---------------------------------------------------------------------------------------------------

    def _without_gluon(self, x: Tensor) -> Backward:
        config = backward_table(self.N, self.itemsize)
        shareable = self.need_dx and can_share(triton.cdiv(self.N, config.A), config.per_sm, x)
        return backward_by_chunks(self.itemsize) if config.path == "shared" and not shareable else config

    def _choose(self, config: Backward) -> None:
        self.config = config
        self.path = f"backward/{config.path}"
        self.sum_after: Program | None = None
        # Without dx too, so that dgamma keeps its bits when x is frozen.
        small = self.need_dgamma and self.M <= tables.SMALL_ROWS and self.M * self.N <= tables.SMALL_ELEMENTS
        # The compiler lays out several rows in two tiles as suits the whole kernel: these two would sum in two orders.
        alike = INTERPRETED or config.B == 0 or config.rows == 1
        if config.path == "walk" and small and alike:
            self._small(config)
        elif config.path == "unaligned" and small:
            self._small_unaligned(config)
        elif config.path == "unaligned":
            self._unaligned(config)
        elif config.path == "walk":
            self._walk(config)
        elif config.path == "reload":
            self._reload(config)
        elif config.path == "ring":
            self._ring(config)
        elif config.path == "shared":
            self._share(config)
        else:
            self._chunk(config)

    def _tiles(self, config: Backward) -> dict[str, Any]:
        return {"A": config.A, "B": config.B, "FULL": config.A + config.B == self.N, "ALIGN": self.align}

    def _walking(self, config: Backward) -> dict[str, Any]:
        needs = {"DX": self.need_dx, "DGAMMA": self.need_dgamma, "DEPENDENT": self.early}
        return {**needs, "EVICT": "evict_first" if config.gone else ""}

    def _small(self, config: Backward) -> None:
        self.path = "backward/small"
        row_programs = triton.cdiv(self.M, config.rows) if self.need_dx else 0
        rows, columns = tables.SMALL_TILE[0], geometry(tables.SMALL_TILE[1])
        constants = {"ROWS": config.rows, **self._tiles(config), "TILE_ROWS": rows, "TILE_COLS": columns, **self.flags}
        self.main = Program(backward.small_kernel, constants, config.warps)
        self.grid = (row_programs + triton.cdiv(self.N, columns), 1)
        self.scalars: tuple[int, ...] = (self.M, self.N, *self.layout, row_programs)

    def _walk(self, config: Backward) -> None:
        programs = min(self.sms * config.per_sm, triton.cdiv(self.M, config.rows))
        tiles = {"ROWS": config.rows, **self._tiles(config), "STAGES": config.stages}
        constants = {**tiles, **self.flags, **self._walking(config)}
        # The limits were found where columns lie side by side; elsewhere the same kernel takes more, and would spill.
        beside = self.flags["UNIT"] and self.flags["DY_UNIT"]
        registers, per_sm = (config.registers, config.per_sm) if beside else (None, 1)
        self.main = Program(backward.walk_kernel, constants, config.warps, registers=registers, per_sm=per_sm)
        self.grid = (programs, 1)
        self.scalars = (self.M, self.N, *self.layout)
        self._sum(programs, self.early)

    def _reload(self, config: Backward) -> None:
        programs = min(self.sms * config.per_sm, self.M)
        constants = {
            **self._tiles(config),
            "PLAIN": self.plain,
            **self.flags,
            "DX": self.need_dx,
            "DGAMMA": self.need_dgamma,
        }
        self.main = Program(reread.reload_kernel, constants, config.warps)
        self.grid = (programs, 1)
        self.scalars = (self.M, self.N, *self.layout)
        self._sum(programs, False)

    def _ring(self, config: Backward) -> None:
        K, width, _ = divided(config, self.N, self.itemsize)
        groups = min(self.sms * config.per_sm // K, self.M)
        constants = {
            **ring_constants(config, self.N, self.itemsize, self.align),
            **{name: value for name, value in self.flags.items() if name not in ("UNIT", "DY_UNIT")},
            "DGAMMA": self.need_dgamma,
            "DEPENDENT": self.early,
        }
        self.main = Program(
            ringbackward.ring_backward_kernel,
            constants,
            config.warps,
            cooperative=K > 1,
            registers=config.registers,
            per_sm=config.per_sm,
        )
        self.grid = (groups * K, 1)
        self.words = groups * K * 8 if K > 1 else 0
        self.scalars = (self.M, self.N, K, width, *self.layout)
        self._sum(groups, self.early)

    def _unaligned(self, config: Backward) -> None:
        programs = min(self.sms * config.per_sm, self.M)
        pitch = triton.cdiv(self.N, PADDING) * PADDING
        constants = unaligned_constants(config, self.N, self.itemsize)
        constants |= {"KEEP": self.N <= tables.KEPT_COLUMNS}
        constants |= {name: self.flags[name] for name in ("DY_TWO", "TWO", "GAMMA")}
        constants |= self._walking(config)
        kernel = unalignedbackward.unaligned_backward_kernel
        self.main = Program(kernel, constants, config.warps, registers=config.registers, per_sm=config.per_sm)
        self.grid = (programs, 1)
        self.scalars = (self.M, self.N, *self.layout, pitch)
        self._sum(programs, self.early, pitch)

    def _small_unaligned(self, config: Backward) -> None:
        self.path = "backward/small"
        row_programs = self.M if self.need_dx else 0
        rows, columns = tables.SMALL_TILE[0], min(4 * config.warps, tables.SMALL_TILE[1])
        walking = unaligned_constants(config, self.N, self.itemsize)
        constants = {name: walking[name] for name in ("UNITS", "WHOLE", "WARPS")}
        constants |= {"TILE_ROWS": rows, "TILE_COLS": columns}
        constants |= {name: self.flags[name] for name in ("DY_TWO", "TWO", "GAMMA")}
        self.main = Program(unalignedbackward.unaligned_small_kernel, constants, config.warps)
        self.grid = (row_programs + triton.cdiv(self.N, columns), 1)
        self.scalars = (self.M, self.N, *self.layout, row_programs)

    def _share(self, config: Backward) -> None:
        K = triton.cdiv(self.N, config.A)
        width = triton.cdiv(triton.cdiv(self.N, K), self.align) * self.align
        groups = min(self.sms * config.per_sm // K, self.M)
        constants = {
            "ROWS": 1,
            "BLOCK": config.A,
            "PARTS": triton.next_power_of_2(K),
            "STAGES": config.stages,
            "LAG": 2,
            "PTX": not INTERPRETED,
            "FULL": width == config.A and self.N % width == 0,
            "ALIGN": self.align,
            **self.flags,
            "DGAMMA": self.need_dgamma,
        }
        self.main = Program(
            split.shared_backward_kernel, constants, config.warps, cooperative=True, registers=config.registers
        )
        self.grid = (groups * K, 1)
        self.words = groups * K * 8
        self.scalars = (self.M, self.N, K, width, *self.layout)
        self._sum(groups, False)

    def _chunk(self, config: Backward) -> None:
        rows, columns = tables.CHUNK_TILE[0], geometry(tables.CHUNK_TILE[1])
        dots = {
            "CHUNK": config.A,
            "STAGES": config.stages,
            "FULL": self.N % config.A == 0,
            "ALIGN": self.align,
            **self.flags,
        }
        self.main = Program(chunks.dot_kernel, dots, config.warps)
        tile = {"ROWS": rows, "COLUMNS": columns, "STAGES": config.stages, "ALIGN": self.align, **self.flags}
        needs = {"DX": self.need_dx, "DGAMMA": self.need_dgamma}
        self.first = Program(chunks.columns_kernel, {**tile, **needs, "FIRST": True}, 8)
        self.later = Program(chunks.columns_kernel, {**tile, **needs, "FIRST": False}, 8)
        self.parts = min(tables.CHUNK_PARTS, triton.cdiv(min(self.M, tables.CHUNK_ROWS), rows))
        self._sum(self.parts, False)

    def _sum(self, parts: int, early: bool, pitch: int | None = None) -> None:
        self.partials, self.pitch = parts, pitch or self.N
        if not self.need_dgamma:
            return
        rows, columns, warps = column_sum_table(parts, self.N)
        columns = geometry(columns)
        constants = {
            "BLOCK_P": rows,
            "COLUMNS": columns,
            "ALIGN": self.align if pitch is None else PADDING,
            "PADDED": pitch is not None,
            "DEPENDENT": early,
        }
        self.sum_after = Program(backward.column_sum_kernel, constants, warps, dependent=early)
        self.sum_grid = (triton.cdiv(self.N, columns), 1)

    # --- run ------------------------------------------------------------------------------------------------------

    def run(
        self, dy: Tensor, x: Tensor, gamma: Tensor | None, rstd: Tensor
    ) -> tuple[Tensor | None, Tensor | None, str]:
        """Allocate what is needed, launch, and return dx, dgamma and the name of the path."""
        empty, dx = self.allocation(), None
        if self.need_dx:
            dx = empty(self.shape, self.stride, self.dtype)
        dgamma = None
        if self.need_dgamma:
            assert gamma is not None
            dgamma = empty((self.N,), (1,), gamma.dtype)
        if self.path == "backward/empty":
            return dx, None if dgamma is None else dgamma.zero_(), self.path
        small = self.path == "backward/small"
        partial = dgamma if small else rstd  # rstd: never touched where dgamma is not needed
        if self.need_dgamma and not small:
            partial = empty((self.partials * self.pitch,), (1,), accumulator(x.dtype))
        assert partial is not None
        tensors: tuple[Tensor, ...] = (dy, x, x if gamma is None else gamma, rstd, x if dx is None else dx, partial)
        if self.config.path == "chunks":
            self._run_chunks(tensors)
        else:
            if self.config.path in ("shared", "ring"):
                words = rstd  # never touched where no row is shared
                if self.words:
                    words = torch.zeros(self.words, dtype=torch.int64, device=x.device).view(torch.uint64)
                tensors = (*tensors, words)
            try:
                self.main.launch(self.grid, tensors, self.scalars)
            except (RuntimeError, OutOfResources, CompilationError) as problem:
                if not refused(problem, self.config.path):
                    raise
                by_chunks = backward_by_chunks(self.itemsize)
                self._choose(self._without_gluon(x) if self.config.path in GLUON else by_chunks)
                return self.run(dy, x, gamma, rstd)
        if self.sum_after is not None:
            assert dgamma is not None
            self.sum_after.launch(self.sum_grid, (partial, dgamma), (self.partials, self.N, self.pitch))
        return dx, dgamma, self.path

    def _run_chunks(self, tensors: tuple[Tensor, ...]) -> None:
        dy, x, weights, rstd, dx, partial = tensors
        means = self.allocation()((min(self.M, tables.CHUNK_ROWS),), (1,), rstd.dtype)
        grid = (triton.cdiv(self.N, geometry(tables.CHUNK_TILE[1])), self.parts)
        for first in range(0, self.M, tables.CHUNK_ROWS):
            rows = min(tables.CHUNK_ROWS, self.M - first)
            if self.need_dx:
                self.main.launch((rows, 1), (dy, x, weights, rstd, means), (first, self.N, *self.layout))
            columns = self.first if first == 0 else self.later
            columns.launch(grid, (dy, x, weights, rstd, means, dx, partial), (first, rows, self.N, *self.layout))
