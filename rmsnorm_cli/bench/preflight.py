"""Foreign callables run once on every cell in a process of their own before they are let into the one that times.

Interleaving needs all programs in one process, where a crash or a hang would be everybody's end; here it is a row.
"""

from collections.abc import Sequence

import torch

from rmsnorm_cli.bench.lab import Standing
from rmsnorm_cli.bench.workload import Buffers, Cell
from rmsnorm_cli.errors import RmsnormError, flat
from rmsnorm_cli.gates.gate import classified
from rmsnorm_cli.kernels import Implementation
from rmsnorm_cli.kernels.foreign import ForeignWorker
from rmsnorm_cli.kernels.foreign_common import ForeignFailure
from rmsnorm_cli.kernels.peers import Rounding


def preflight(
    name: str, cells: Sequence[Cell], device: str, eps: float, rounding: Rounding, seed: int, seconds: float
) -> dict[str, Standing]:
    """Return, by cell, why a foreign callable is not let in; a cell that is not there went well.

    `seconds` are those of one forward or one backward, compiling included.
    Raises UnknownImplementation for a callable that is not there.
    """
    try:
        with ForeignWorker(name, device, seconds, rounding) as worker:
            found = {cell.name: _tried(worker.implementation, cell, device, seed, eps) for cell in cells}
    except ForeignFailure as failure:  # it crashed or hung while it was imported
        return dict.fromkeys((cell.name for cell in cells), _error(failure))
    return {cell: standing for cell, standing in found.items() if standing is not None}


def _tried(impl: Implementation, cell: Cell, device: str, seed: int, eps: float) -> Standing | None:
    try:
        buffers = Buffers(cell, 1, device, seed)
        y = impl.call(buffers.x[0], buffers.gamma, eps)
        torch.autograd.grad(y, (buffers.x[0], buffers.gamma), buffers.dy[0])
    except RmsnormError:  # an interrupt is not its doing
        raise
    except ForeignFailure as failure:
        return _error(failure)
    except Exception as problem:
        seen = classified(impl, problem)
        return {"status": seen.status, "detail": seen.text}
    return None


def _error(failure: ForeignFailure) -> Standing:
    return {"status": "error", "detail": flat(failure)[:300]}
