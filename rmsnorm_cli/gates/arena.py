"""Fenced memory: allocations made during a call are served from larger blocks, [guard | tensor | guard], all poisoned.

A TorchDispatchMode sees every `torch.empty`, `empty_like`, `zeros`, ... that Python code makes, also inside an
autograd.Function, inside a custom operator's own body, and in the backward (autograd carries the mode to its thread).
It cannot see what compiled code allocates by itself: `served` tells how much was intercepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm_cli.judging.numerics import bits

Poison = Literal["nan", "finite"]
ALIGNMENT = 256  # bytes: what PyTorch's CUDA allocator gives, so that a fenced tensor is specialised like any other
_aten = torch.ops.aten
UNFILLED = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
FILLED = {
    _aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.ones, _aten.ones_like, _aten.new_ones, _aten.full,
    _aten.full_like, _aten.new_full,
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """One fenced tensor: the whole block, how its memory looked when it was handed out, where the tensor lies in it."""

    whole: Tensor
    before: Tensor
    first: int
    last: int
    tensor: Tensor

    def guards_intact(self) -> bool:
        """Tell whether nothing was written in front of the tensor or behind it."""
        return self._same(slice(None, self.first)) and self._same(slice(self.last, None))

    def intact(self) -> bool:
        """Tell whether nothing at all was written, tensor and padding between its rows included."""
        return self._same(slice(None))

    def _same(self, part: slice) -> bool:
        return torch.equal(_bytes(self.whole)[part], _bytes(self.before)[part])


def fence(like: Tensor, poison: Poison, values: Tensor | None = None) -> Block:
    """Return a block whose tensor has the shape, strides, dtype and device of `like`, and `values` if there are some.

    Everything else is poison: all bits set (NaN in every floating dtype), or finite numbers that differ by position.
    """
    size, stride = like.size(), like.stride()
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    guard = _guard(like)
    whole = torch.empty(guard + span + guard, dtype=like.dtype, device=like.device)
    _bytes(whole).fill_(0xFF)
    if poison == "finite":
        whole.copy_(torch.arange(whole.numel(), device=like.device) % 89 + 31)  # exact in every dtype
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    tensor.set_(whole.untyped_storage(), guard, size, stride)
    if values is not None:
        _distinct(tensor).copy_(_distinct(values, stride))
    width = like.element_size()
    return Block(whole, whole.clone(), guard * width, (guard + span) * width, tensor)


class Arena(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base class untyped
    """While active, serves allocations as fenced tensors; `blocks` holds them, in order."""

    def __init__(self, poison: Poison) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.poison = poison
        self.blocks: list[Block] = []

    @property
    def served(self) -> int:
        """Return how many allocations came from here."""
        return len(self.blocks)

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prim", "prims", "profiler"):
            return self._inside(func, args, kwargs)
        made = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet not in UNFILLED | FILLED or "out" in kwargs or not _can_be_fenced(made):
            return made
        block = fence(made, self.poison, made if packet in FILLED else None)
        self.blocks.append(block)
        return block.tensor

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a custom operator's body with this mode still active, so that its allocations are seen too."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not tensors:
            return func(*args, **kwargs)
        key = torch._C.DispatchKey.CUDA if tensors[0].is_cuda else torch._C.DispatchKey.CPU
        with self:  # by its key: an ordinary call would come back here, for ever
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def _can_be_fenced(made: Any) -> bool:
    plain = type(made) is Tensor and made.layout == torch.strided and made.device.type in ("cpu", "cuda")
    return plain and made.numel() > 0 and not made.is_quantized


def _distinct(tensor: Tensor, stride: Sequence[int] | None = None) -> Tensor:
    """Return one element for each place in memory: dimensions of stride 0 (an expanded tensor) are cut to one."""
    for dim, step in enumerate(tensor.stride() if stride is None else stride):
        if step == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _guard(like: Tensor) -> int:
    """Return elements of guard: a whole padded block of the last dimension, at least 256 bytes, aligned."""
    width = like.element_size()
    columns = like.size(-1) if like.dim() else 1
    block = 1 << max(columns - 1, 0).bit_length()
    least = max(ALIGNMENT, block * width)
    return -(-least // ALIGNMENT) * ALIGNMENT // width


def _bytes(whole: Tensor) -> Tensor:
    return whole.view(torch.uint8)


def same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    """Tell whether two results have the same shape, dtype and bits; two missing ones are the same."""
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(bits(left), bits(right))
