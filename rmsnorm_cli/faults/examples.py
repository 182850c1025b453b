"""Inputs made by hand, for what no distribution of `cases` shows: all ones, and rows in which everything balances."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmsnorm_cli.inputs.layouts import Inputs

Row = list[float]


@dataclass(frozen=True)
class Example:
    """A small input: `values` returns x (M, N), gamma (N,) and dy (M, N) as plain numbers."""

    id: str
    values: Callable[[], tuple[list[Row], Row, list[Row]]]
    dtype: str = "float32"
    eps: float = 1e-6


def ones(N: int, M: int = 1) -> Example:
    """Return M rows of N ones, gamma 1 and dy 1: every quantity of the formula can be checked by hand."""
    return Example(f"{M} x {N} ones, gamma 1, dy 1", lambda: ([[1.0] * N] * M, [1.0] * N, [[1.0] * N] * M))


def _balanced() -> tuple[list[Row], Row, list[Row]]:
    x = [[scale, scale, -scale, -scale] * 2 for scale in (0.5, 2.0, 3.0)]
    dy = [[1.0, -1.0, 0.5, -0.5] * 2] * 3
    return x, [1.0] * 8, dy


BALANCED = Example("3 x 8 balanced: the sums of x, of dy and of dy·x vanish in each row, gamma 1", _balanced)


def inputs(question: object, device: str) -> "Inputs":
    """Return the tensors of a Case or an Example on a torch device."""
    from rmsnorm_cli.inputs import cases

    if isinstance(question, cases.Case):
        return cases.tensors(question, device)
    import torch

    from rmsnorm_cli.inputs.layouts import Inputs

    assert isinstance(question, Example)
    dtype = getattr(torch, question.dtype)
    x, gamma, dy = (torch.tensor(values, dtype=dtype, device=device) for values in question.values())
    return Inputs(x, gamma, dy)
