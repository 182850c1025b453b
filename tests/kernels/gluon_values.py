"""What kernels compute with when they run on the CPU (`gluon_on_cpu.py`): types, tiles, memory and addresses in it."""

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

    def __getitem__(self, at: Any) -> "Tile":
        return Tile(self.data[at], self.dtype)

    def reshape(self, shape: list[int]) -> "Tile":
        """Return the same numbers in another shape."""
        return Tile(self.data.reshape(shape), self.dtype)

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


def _numbers(name: str, operands: tuple[Any, ...]) -> list[Any]:
    """Return operands in the type that Gluon computes in, not numpy: an integer beside an fp32 becomes fp32."""
    numbers = [raw(each) for each in operands]
    own = [number.dtype for number in numbers if isinstance(number, np.ndarray)]
    assert {"i", "u"} - {each.kind for each in own}, "signed and unsigned numbers meet"
    if "truediv" in name or any(np.asarray(number).dtype.kind == "f" for number in numbers):
        floats = [each for each in own if each.kind == "f"]
        wide = max(floats, key=lambda each: each.itemsize) if floats else np.dtype("f4")
        numbers = [np.asarray(number, wide) for number in numbers]
    return numbers


def _operator(name: str) -> Callable[..., Tile]:
    def apply(*operands: Any) -> Any:
        if any(isinstance(each, Pointer) for each in operands):
            return NotImplemented
        numbers = _numbers(name, operands)
        with np.errstate(all="ignore"):
            if name.endswith(("mod", "floordiv")):  # towards zero, as in C, not down, as in Python
                a, b = reversed(numbers) if name.startswith("r") else numbers
                rest = np.fmod(a, b)
                result = Tile(rest if name.endswith("mod") else (a - rest) // b)
            else:
                result = Tile(getattr(np.asarray(numbers[0]), f"__{name}__")(*numbers[1:]))
        brain = all(each.dtype.brain for each in operands if isinstance(each, Tile))
        return result.to(BFLOAT16) if brain and result.data.dtype.kind == "f" else result

    return apply


OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod and or lshift rshift lt le gt ge eq ne"
)
for _name in (*OPERATORS.split(), "neg"):
    setattr(Tile, f"__{_name}__", _operator(_name))
Tile.__hash__ = None  # type: ignore[assignment]


class Memory:
    """What tensors lie in, in the GPU's memory: elements, which are a tensor's, and how often each was written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = TYPES[tensor.dtype]
        whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        self.data = whole.view(integer).numpy().view(self.dtype.memory)
        self.meant = torch.zeros(len(self.data), dtype=torch.bool)
        self.spanned = np.zeros(len(self.data), bool)
        self.written = np.zeros(len(self.data), np.int32)

    def holds(self, tensor: torch.Tensor) -> None:
        """Let the elements of a tensor be accessed: not those between its rows, but by a vector that holds both."""
        self.meant.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.spanned[tensor.storage_offset() : tensor.storage_offset() + last + 1] = True

    def check(self) -> None:
        """Assert that nothing is left unwritten of a tensor that is written: what lay there before may look right."""
        left = self.meant.numpy() & (self.written == 0)
        assert not self.written.any() or not left.any(), f"{left.sum()} elements of a tensor are never written"


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

    def __getitem__(self, at: Any) -> "Pointer":
        return Pointer(self.memory, np.asarray(self.offset)[at])

    def to(self, dtype: Type, bitcast: bool = False) -> Any:
        """Return the address in bytes; or stay a pointer, where a number stands for one (`uint64`)."""
        return Tile(np.asarray(self.offset, np.int64) * self.dtype.memory.itemsize) if dtype == INT64 else self

    def chosen(self, mask: Any, vector: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses and which of them are meant; those must lie in the tensor.

        Of a vector of several numbers one must, and the others between the tensor's first and last.
        """
        where = np.broadcast_to(
            np.asarray(self.offset), np.broadcast_shapes(np.shape(self.offset), np.shape(raw(mask)))
        )
        meant = np.broadcast_to(np.asarray(raw(mask), bool), where.shape)
        inside = (where >= 0) & (where < len(self.memory.data))
        within = inside & self.memory.meant.numpy()[np.where(inside, where, 0)]
        if vector > 1:
            some = np.repeat(within.reshape(-1, vector).any(1), vector).reshape(where.shape)
            within = some & inside & self.memory.spanned[np.where(inside, where, 0)]
        outside = meant & ~within
        assert not outside.any(), f"{outside.sum()} addresses outside a tensor"
        return where, meant
