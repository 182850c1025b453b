"""Where the values of a case lie in memory: dense, sliced, strided, transposed, misaligned, expanded.

Everything around a value is NaN, so that reading past it shows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rmsnorm_cli.inputs.cases import Case


@dataclass(frozen=True)
class Inputs:
    """x (..., N), gamma (N,) or None, dy like x: what a kernel is given, in the tested dtypes and layout."""

    x: Tensor
    gamma: Tensor | None
    dy: Tensor

    def pristine(self) -> "Inputs":
        """Return dense copies, out of reach of an implementation that writes to its inputs."""
        dense = torch.contiguous_format
        gamma = None if self.gamma is None else self.gamma.detach().clone(memory_format=dense)
        return Inputs(self.x.detach().clone(memory_format=dense), gamma, self.dy.detach().clone(memory_format=dense))


def arrange(case: Case, x: Tensor, gamma: Tensor | None, dy: Tensor, device: str) -> Inputs:
    """Return the float64 values of `distributions.draw` in the case's dtypes and layout on `device`."""
    dtype = getattr(torch, case.dtype)
    gamma_dtype = dtype if case.gamma_dtype in (None, "none") else getattr(torch, case.gamma_dtype)
    everywhere = "misaligned" if case.layout == "misaligned" else "dense"
    of_x = case.layout if case.layout in ("sliced_rows", "transposed_heads", "far_rows") else everywhere
    of_dy = {"expanded_dy": "expanded", "sliced_dy": "sliced_rows", "transposed_dy": "transposed_heads"}
    placed = None if gamma is None else place(gamma.to(device, gamma_dtype), everywhere)
    return Inputs(
        place(x.reshape(case.shape).to(device, dtype), of_x),
        placed,
        place(dy.reshape(case.shape).to(device, dtype), of_dy.get(case.layout, everywhere)),
    )


def place(values: Tensor, layout: str) -> Tensor:
    """Return a tensor equal to `values` whose strides and start follow `layout`, NaN wherever it has no element."""
    *leading, columns = values.shape
    if layout == "dense" or not values.numel():
        return values.contiguous()
    if layout == "sliced_rows":
        view = _nans(values, *leading, columns + 8)[..., 3 : 3 + columns]
    elif layout == "every_second":
        view = _nans(values, *leading, 2 * columns)[..., ::2]
    elif layout == "misaligned":
        view = _nans(values, values.numel() + 1)[1:].view(values.shape)
    elif layout == "transposed_heads":
        first = -3 if values.dim() > 2 else -2
        view = _nans(values, *values.transpose(first, first + 1).shape).transpose(first, first + 1)
    elif layout == "far_rows":  # two rows 2^31 elements apart; where a 32-bit offset would look, there is NaN too
        whole = torch.empty(2**32 + columns, dtype=values.dtype, device=values.device)
        whole[:columns] = math.nan
        view = whole.as_strided(values.shape, (2**31, 1), 2**31)
    elif layout == "expanded":
        one = _nans(values, values.numel())
        one[0] = values.flatten()[0]
        return one[:1].reshape([1] * values.dim()).expand(values.shape)
    else:
        raise AssertionError(f"unknown layout {layout}")
    return view.copy_(values)


def _nans(like: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)
