"""How the rows of a tensor lie in memory: the few strides by which a kernel finds them, or that there are too many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

VECTOR_BYTES = 16
"""The widest access of one lane."""


@dataclass(frozen=True)
class Rows:
    """Row i starts at (i // per) · outer + (i % per) · inner elements, its columns are `col` elements apart.

    One stride is enough where `two` is false: row i starts at i · inner.
    """

    per: int
    outer: int
    inner: int
    col: int
    two: bool = False

    @property
    def unit(self) -> bool:
        """Whether columns lie one behind the other."""
        return self.col == 1

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """Return the four numbers in the order in which every kernel takes them."""
        return self.per, self.outer, self.inner, self.col


def describe(tensor: Tensor, order: Sequence[int]) -> Rows | None:
    """Return how rows lie when the leading dimensions are walked in this order; None where two strides do not do.

    Neighbours that one stride serves are merged; a size of 1 has no stride. A tensor of at most one row starts at 0.
    """
    N = tensor.shape[-1]
    merged: list[tuple[int, int]] = []  # (size, stride), the outermost first
    for dimension in order:
        size, stride = tensor.shape[dimension], tensor.stride(dimension)
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    col = tensor.stride(-1) if N > 1 else 1
    if not merged:
        return Rows(1, 0, N, col)
    if len(merged) == 1:
        return Rows(1, 0, merged[0][1], col)
    if len(merged) > 2:
        return None
    (_, outer), (per, inner) = merged
    return Rows(per, outer, inner, col, two=True)


def walking_order(x: Tensor) -> tuple[int, ...] | None:
    """Return an order of x's leading dimensions in which two strides reach its rows, or None where there is none.

    As they come, if that does; else the largest stride first: transposed heads (B, H, T, D) are then rows one behind
    the other. Rows are independent, so any order is right as long as the outputs are written in the same.
    """
    natural = tuple(range(x.dim() - 1))
    if describe(x, natural) is not None:
        return natural
    by_stride = tuple(sorted(natural, key=lambda dimension: x.stride()[dimension], reverse=True))
    return by_stride if describe(x, by_stride) is not None else None


def empty_in_order(x: Tensor, order: tuple[int, ...], device: str | torch.device | None = None) -> Tensor:
    """Allocate a tensor of x's shape and dtype whose rows are contiguous when walked in this order."""
    device = x.device if device is None else device
    if order == tuple(range(len(order))):
        return torch.empty(x.shape, dtype=x.dtype, device=device)
    return torch.empty_permuted(x.shape, (*order, len(order)), dtype=x.dtype, device=device)


def output_form(x: Tensor, order: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of an output: x's own where x is contiguous, else of rows contiguous in this order."""
    like = torch.empty_like(x, device="meta") if x.is_contiguous() else empty_in_order(x, order, "meta")
    return tuple(like.shape), like.stride()


def copied_in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Copy a tensor into rows that are contiguous when walked in this order."""
    return empty_in_order(tensor, order).copy_(tensor)


def alignment(N: int, rows: Sequence[tuple[Tensor, Rows]]) -> int:
    """Return the largest power of two, in elements, that divides N, every row start and every base address.

    At most VECTOR_BYTES; the tensors are of one dtype. Vectors of that many elements are then aligned in every row.
    """
    itemsize = rows[0][0].element_size()
    common = math.gcd(VECTOR_BYTES // itemsize, N)
    for tensor, lie in rows:
        common = math.gcd(common, lie.inner, lie.outer, tensor.data_ptr() // itemsize if tensor.data_ptr() else 0)
        if tensor.data_ptr() % itemsize:
            return 1
    return max(common, 1)
