"""What kernels compute with when they run on the CPU (`gluon_on_cpu.py`): types, tiles, memory and addresses in it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Type:
    """A dtype of Gluon: how it lies in memory, and what arithmetic sees of it (bf16 has no numpy type of its own)."""

    memory: np.dtype
    brain: bool = False

    @property
    def primitive_bitwidth(self) -> int:
        """Return the bits of one number in memory."""
        return 8 * self.memory.itemsize

    @property
    def element_ty(self) -> "Type":
        """Return itself: pointers and tiles name their type in the same way here."""
        return self

    def seen(self, memory: np.ndarray) -> np.ndarray:
        """Return the numbers that lie in memory."""
        return (memory.astype(np.uint32) << 16).view(np.float32) if self.brain else memory

    def stored(self, values: np.ndarray) -> np.ndarray:
        """Return numbers as they lie in memory, rounded to nearest, ties to even."""
        if not self.brain:
            return values.astype(self.memory)
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


INT32, INT64, UINT32, UINT64 = (Type(np.dtype(name)) for name in ("i4", "i8", "u4", "u8"))
FLOAT32, BFLOAT16 = Type(np.dtype("f4")), Type(np.dtype("u2"), brain=True)
TYPES = {
    torch.float32: FLOAT32,
    torch.float16: Type(np.dtype("f2")),
    torch.bfloat16: BFLOAT16,
    torch.uint64: UINT64,
}


def raw(value: Any) -> Any:
    """Return what numpy can compute with."""
    return value.data if isinstance(value, Tile) else getattr(value, "value", value)


class Tile:
    """A tile or a scalar."""

    def __init__(self, data: Any, dtype: Type | None = None) -> None:
        self.data = np.asarray(data)
        self.dtype = dtype or Type(self.data.dtype)

    def to(self, dtype: Type, bitcast: bool = False) -> "Tile":
        """Convert, or take the same bits for another type."""
        if bitcast:
            return Tile(np.ascontiguousarray(self.data).view(dtype.memory).reshape(self.data.shape), dtype)
        if dtype.brain:
            return Tile(dtype.seen(dtype.stored(self.data)), dtype)
        return Tile(self.data.astype(dtype.memory), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""
        return self.data.shape

    def reshape(self, shape: list[int]) -> "Tile":
        """Return the same numbers in another shape."""
        return Tile(self.data.reshape(shape), self.dtype)

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


def _operator(name: str) -> Callable[..., Tile]:
    def apply(self: Tile, *others: Any) -> Any:
        if others and isinstance(others[0], Pointer):
            return NotImplemented
        with np.errstate(all="ignore"):
            return Tile(getattr(np.asarray(self.data), name)(*map(raw, others)))

    return apply


OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod and or lshift rshift lt le gt ge eq ne"
)
for _name in (*OPERATORS.split(), "neg"):
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))
Tile.__hash__ = None  # type: ignore[assignment]


class Memory:
    """A tensor in the GPU's memory: its elements one behind the other, and how often each was written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = TYPES[tensor.dtype]
        whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        self.data = whole.view(integer).numpy().view(self.dtype.memory)
        self.first = tensor.storage_offset()
        self.written = np.zeros(len(self.data), np.int32)
        self.lock = threading.Lock()


@dataclass
class Pointer:
    """Addresses in one tensor, in elements."""

    memory: Memory
    offset: Any

    @property
    def dtype(self) -> Type:
        """Return the type of what lies there."""
        return self.memory.dtype

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, np.asarray(self.offset, np.int64) + raw(other))

    def to(self, _dtype: Type) -> "Pointer":
        """Stay a pointer: an address as a number is used as one."""
        return self

    def chosen(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses and which of them are meant; those must lie in the tensor."""
        where = np.broadcast_to(
            np.asarray(self.offset), np.broadcast_shapes(np.shape(self.offset), np.shape(raw(mask)))
        )
        meant = np.broadcast_to(np.asarray(raw(mask), bool), where.shape)
        outside = meant & ((where < 0) | (where >= len(self.memory.data)))
        assert not outside.any(), f"{outside.sum()} addresses outside a tensor of {len(self.memory.data)} elements"
        return where, meant
