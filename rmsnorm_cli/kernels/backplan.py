"""The plan of a fused backward: which kernels, with which constants and grids, for one kind of call."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from rmsnorm_cli.kernels import backward, chunks, reread, split, tables
from rmsnorm_cli.kernels.contract import INTERPRETED
from rmsnorm_cli.kernels.frontplan import accumulator, can_share, multiprocessors, refused
from rmsnorm_cli.kernels.program import Program
from rmsnorm_cli.kernels.rowlayout import alignment, describe, empty_in_order
from rmsnorm_cli.kernels.tables import Backward, backward_by_chunks, backward_table


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
        self.order = order
        self.contiguous = x.is_contiguous()
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
        config = backward_table(self.N, x.element_size())
        shareable = config.path == "shared" and need_dx and can_share(triton.cdiv(self.N, config.A), config.per_sm, x)
        if config.path == "shared" and not shareable:
            config = backward_by_chunks(x.element_size())
        self._choose(config)

    # --- choice ---------------------------------------------------------------------------------------------------

    def _choose(self, config: Backward) -> None:
        self.config = config
        self.path = f"backward/{config.path}"
        self.sum_after: Program | None = None
        small = (
            self.need_dx
            and self.need_dgamma
            and self.M <= tables.SMALL_ROWS
            and self.M * self.N <= tables.SMALL_ELEMENTS
        )
        if config.path == "walk" and small:
            self._small(config)
        elif config.path == "walk":
            self._walk(config)
        elif config.path == "reload":
            self._reload(config)
        elif config.path == "shared":
            self._share(config)
        else:
            self._chunk(config)

    def _tiles(self, config: Backward) -> dict[str, Any]:
        return {"A": config.A, "B": config.B, "FULL": config.A + config.B == self.N, "ALIGN": self.align}

    def _small(self, config: Backward) -> None:
        self.path = "backward/small"
        row_programs = triton.cdiv(self.M, config.rows)
        rows, columns = tables.SMALL_TILE[0], geometry(tables.SMALL_TILE[1])
        constants = {"ROWS": config.rows, **self._tiles(config), "TILE_ROWS": rows, "TILE_COLS": columns, **self.flags}
        self.main = Program(backward.small_kernel, constants, config.warps)
        self.grid = (row_programs + triton.cdiv(self.N, columns), 1)
        self.scalars: tuple[int, ...] = (self.M, self.N, *self.layout, row_programs)

    def _walk(self, config: Backward) -> None:
        programs = min(self.sms * config.per_sm, triton.cdiv(self.M, config.rows))
        needs = {"DX": self.need_dx, "DGAMMA": self.need_dgamma, "DEPENDENT": self.early}
        constants = {"ROWS": config.rows, **self._tiles(config), "STAGES": config.stages, **self.flags, **needs}
        self.main = Program(backward.walk_kernel, constants, config.warps)
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

    def _sum(self, parts: int, early: bool) -> None:
        self.partials = parts
        if not self.need_dgamma:
            return
        columns = geometry(tables.COLUMN_SUM_COLUMNS)
        block = min(max(triton.next_power_of_2(parts), 2), tables.COLUMN_SUM_ROWS)
        constants = {"BLOCK_P": block, "COLUMNS": columns, "ALIGN": self.align, "DEPENDENT": early}
        self.sum_after = Program(backward.column_sum_kernel, constants, 4, dependent=early)
        self.sum_grid = (triton.cdiv(self.N, columns), 1)

    # --- run ------------------------------------------------------------------------------------------------------

    def run(
        self, dy: Tensor, x: Tensor, gamma: Tensor | None, rstd: Tensor
    ) -> tuple[Tensor | None, Tensor | None, str]:
        """Allocate what is needed, launch, and return dx, dgamma and the name of the path."""
        dx = None
        if self.need_dx:
            dx = torch.empty_like(x) if self.contiguous else empty_in_order(x, self.order)
        dgamma = None
        if self.need_dgamma:
            assert gamma is not None
            dgamma = torch.empty_like(gamma, memory_format=torch.contiguous_format)
        if self.path == "backward/empty":
            return dx, None if dgamma is None else dgamma.zero_(), self.path
        weights = x if gamma is None else gamma
        if self.path == "backward/small":
            assert dx is not None
            assert dgamma is not None
            self.main.launch(self.grid, (dy, x, weights, rstd, dx, dgamma), self.scalars)
            return dx, dgamma, self.path
        partial = rstd  # never touched where dgamma is not needed
        if self.need_dgamma:
            partial = torch.empty(self.partials * self.N, dtype=accumulator(x.dtype), device=x.device)
        tensors: tuple[Tensor, ...] = (dy, x, weights, rstd, x if dx is None else dx, partial)
        if self.config.path == "chunks":
            self._run_chunks(tensors)
        else:
            if self.config.path == "shared":
                words = torch.zeros(self.words, dtype=torch.int64, device=x.device).view(torch.uint64)
                tensors = (*tensors, words)
            try:
                self.main.launch(self.grid, tensors, self.scalars)
            except (RuntimeError, OutOfResources) as problem:
                if not refused(problem):
                    raise
                self._choose(backward_by_chunks(x.element_size()))
                return self.run(dy, x, gamma, rstd)
        if self.sum_after is not None:
            assert dgamma is not None
            self.sum_after.launch(self.sum_grid, (partial, dgamma), (self.partials, self.N))
        return dx, dgamma, self.path

    def _run_chunks(self, tensors: tuple[Tensor, ...]) -> None:
        dy, x, weights, rstd, dx, partial = tensors
        means = torch.empty(min(self.M, tables.CHUNK_ROWS), dtype=rstd.dtype, device=x.device)
        grid = (triton.cdiv(self.N, geometry(tables.CHUNK_TILE[1])), self.parts)
        for first in range(0, self.M, tables.CHUNK_ROWS):
            rows = min(tables.CHUNK_ROWS, self.M - first)
            if self.need_dx:
                self.main.launch((rows, 1), (dy, x, weights, rstd, means), (first, self.N, *self.layout))
            columns = self.first if first == 0 else self.later
            columns.launch(grid, (dy, x, weights, rstd, means, dx, partial), (first, rows, self.N, *self.layout))
