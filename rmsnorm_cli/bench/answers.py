"""The right outputs of a cell, in float64, a chunk of rows at a time: memory stays bounded whatever the shape is."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rmsnorm_cli.bench.workload import Buffers
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.numerics import TOLERANCES, Comparison, compare
from rmsnorm_cli.judging.oracle import Oracle

CHUNK = 2**23  # elements judged at once: oracle and comparison hold a dozen float64 tensors of it, 0.8 GB in all


class Answers:
    """The oracle of the values in force, and how an output is held against it."""

    def __init__(self, inputs: Inputs, eps: float, rounding: str, chunk: int = CHUNK) -> None:
        self.inputs, self._eps, self._rounding = inputs, eps, rounding
        self._rows = max(1, chunk // inputs.x.shape[1])
        self._held: Oracle | None = None  # where one chunk is all
        self._dgamma = torch.zeros(inputs.x.shape[1], dtype=torch.float64, device=inputs.x.device)
        for _, oracle in self._chunks():
            assert oracle.dgamma is not None
            self._dgamma += oracle.dgamma

    def judge(self, what: str, got: Tensor) -> Comparison:
        """Compare y, dx or dgamma, whole, by the declared tolerance of its dtype."""
        x = self.inputs.x
        tolerance = TOLERANCES[str(x.dtype).removeprefix("torch.")]
        if what == "dgamma":
            return compare(got, self._dgamma, tolerance, dtype=x.dtype)
        if not isinstance(got, Tensor) or (got.shape, got.dtype, got.device) != (x.shape, x.dtype, x.device):
            return compare(got, x, tolerance, dtype=x.dtype)  # which says how it does not fit
        worst = 0.0
        for rows, oracle in self._chunks():
            want = oracle.y if what == "y" else oracle.dx
            # dx of a mean loss scales with rstd / sqrt(M): divided by that, zeros and halves show in every dtype
            scale = oracle.rstd / x.shape[0] ** 0.5 if what == "dx" else None
            found = compare(got[rows], want, tolerance, dtype=x.dtype, scale=scale)
            worst = max(worst, found.worst or 0.0)
            if not found.ok:
                told = f"from row {rows.start} on, as row 0: " if rows.start else ""
                return Comparison(False, worst, detail=told + found.detail)
        return Comparison(True, worst)

    def written_input(self, buffers: Buffers) -> str | None:
        """Name an input of the first set that is not what it was, and give all their values back; None if none is."""
        gamma = self.inputs.gamma
        assert gamma is not None
        pairs = {
            "x": (buffers.x[0], self.inputs.x),
            "gamma": (buffers.gamma, gamma),
            "dy": (buffers.dy[0], self.inputs.dy),
        }
        written = [name for name, (now, before) in pairs.items() if not torch.equal(now, before)]
        if not written:
            return None
        with torch.no_grad():
            for now, before in pairs.values():
                now.copy_(before)
        return f"it wrote to {' and '.join(written)}"

    def _chunks(self) -> Iterator[tuple[slice, Oracle]]:
        """Yield the oracle of one chunk of rows after another; y, dx and rstd of a row need no other row."""
        x, gamma, dy = self.inputs.x, self.inputs.gamma, self.inputs.dy
        M = x.shape[0]
        for first in range(0, M, self._rows):
            rows = slice(first, min(first + self._rows, M))
            held = self._held
            if held is None:
                held = cases.oracle(Inputs(x[rows], gamma, dy[rows]), self._eps, self._rounding)
                self._held = held if self._rows >= M else None
            yield rows, held
