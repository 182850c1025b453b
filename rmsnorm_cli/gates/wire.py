"""What the "autograd" gate holds the graphs of one call against: the plain call's results, and how far off is wrong."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.budget import Budget, budget
from rmsnorm_cli.judging.numerics import dx_scale
from rmsnorm_cli.judging.oracle import answer
from rmsnorm_cli.judging.tolerances import Tolerance

if TYPE_CHECKING:
    from rmsnorm_cli.kernels.api import Implementation


@dataclass(frozen=True)
class Wire:
    """One implementation, one set of inputs, and what the plain call gave for them."""

    impl: "Implementation"
    inputs: Inputs
    eps: float
    y: Tensor
    dx: Tensor
    dgamma: Tensor
    rstd: Tensor
    tolerance: Tolerance

    def call(self, x: Tensor, gamma: Tensor) -> Tensor:
        """Call the implementation."""
        return self.impl.call(x, gamma, self.eps)

    def dy(self) -> Tensor:
        """Return a dy for one backward alone: who writes to it is found where a graph shares one, and not elsewhere."""
        return self.inputs.dy.clone()

    def leaves(self, *, x: bool = True, gamma: bool = True) -> tuple[Tensor, Tensor]:
        """Return fresh leaves for x and gamma."""
        kept = self.inputs.pristine()
        assert kept.gamma is not None
        return kept.x.requires_grad_(x), kept.gamma.requires_grad_(gamma)

    def rounding(self, dy: Tensor) -> Budget:
        """Return what rounding explains of the results for a dy that another program may read, in another order.

        A kernel is compiled anew for a dy whose columns do not lie side by side, and then a row's terms lie in other
        threads: on a GPU the last bit of dx moves.
        """
        inputs = Inputs(self.inputs.x, self.inputs.gamma, dy)
        return budget(inputs, answer(inputs, self.eps, self.impl.rounding), self.impl.rounding)

    def differs(self, what: str, got: Tensor | None, want: Tensor, explained: Tensor | float = 0.0) -> str:
        """Say how a result differs from the one expected, "" where it does not.

        `explained` is what each of two right results of ours may be off by; 0 asks for equal bits.
        """
        if got is None:
            return f"{what} is missing"
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{what} is {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"
        got, want = got.detach(), want.detach()
        if self.impl.ours and self.impl.triton:  # the reference's gradients are summed by autograd, in any order
            allowed = torch.zeros_like(want, dtype=torch.float64) + 2 * explained
        else:
            unit = dx_scale(self.rstd).expand_as(self.dx) if want.shape == self.dx.shape else 1.0
            allowed = 2 * (self.tolerance.atol * unit + self.tolerance.rtol * want.double().abs())
        off = (got.double() - want.double()).abs()
        if bool((off <= allowed).all()):
            return ""
        return f"{what} differs from the plain call's by up to {float(off.nan_to_num(nan=float('inf')).max()):.3g}"


def first(*findings: str) -> str:
    """Return the first finding that says something, "" where none does."""
    return next((finding for finding in findings if finding), "")
