"""Run a kernel written in Gluon on the CPU, program by program, with numpy in the place of the GPU.

Triton's interpreter does not know Gluon. This runs the kernel's own Python source: the names that it takes from Gluon
are replaced by the few below, and those of other kernels' functions by the same functions so treated. What a GPU would
let pass is an error here: an access outside a tensor, an element written twice, by two programs or by none, a promised
alignment that does not hold. Memory of a program starts as NaN, and so does what a mask leaves out of a load.

A copy into shared memory may arrive at any time between the call and the wait for its group. `eager` makes all arrive
at once and the others as late as they may: a kernel that is right both ways reads nothing too early and overwrites
nothing that is still needed.

Programs run one at a time (`gluon_turns.py`) and another goes on wherever words between them are read or written.

What it cannot see: what the compiler makes of the source, threads of one program that race, roundings of sums and of
`rsqrt` (fp32's, but not in a GPU's order), a grid that does not fit on a card.
"""

import inspect
import math
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.experimental.gluon.language as real_gl
from gluon_turns import Turns
from gluon_values import FLOAT32, INT32, INT64, UINT32, UINT64, Memory, Pointer, Tile, Type, raw
from triton.runtime.jit import ConstexprFunction

VECTOR_BYTES = 16


class Gluon:
    """The names of Gluon that the kernels use, for one program."""

    int32, int64, uint32, uint64, float32 = INT32, INT64, UINT32, UINT64, FLOAT32
    constexpr = real_gl.constexpr

    def __init__(self, program: int, programs: int, eager: bool, turns: Turns) -> None:
        self.program, self.programs, self.eager, self.turns = program, programs, eager, turns
        self.shared = 0
        self.open: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []

    # what needs no machine

    static_range = range
    BlockedLayout = SwizzledSharedLayout = SliceLayout = staticmethod(lambda *_: None)
    zeros = staticmethod(lambda shape, dtype, _layout=None: Tile(np.zeros(shape, dtype.memory), dtype))
    arange = staticmethod(lambda low, high, _layout=None: Tile(np.arange(low, high, dtype=np.int32)))
    to_tensor = staticmethod(lambda value: Tile(np.int32(value)))
    minimum = staticmethod(lambda a, b: Tile(np.minimum(raw(a), raw(b))))
    where = staticmethod(lambda condition, a, b: Tile(np.where(raw(condition), raw(a), raw(b))))
    sum = staticmethod(lambda tile, axis: Tile(np.sum(tile.data, axis=axis, dtype=tile.data.dtype)))
    max = staticmethod(lambda tile, axis: Tile(np.max(tile.data, axis=axis)))
    rsqrt = staticmethod(lambda value: Tile(np.float32(1) / np.sqrt(raw(value))))
    convert_layout = staticmethod(lambda tile, _layout: tile)

    @staticmethod
    def fma(a: Tile, b: Tile, c: Tile) -> Tile:
        """Return a · b + c, all fp32, rounded to fp64 and then to fp32 (a GPU rounds once)."""
        assert a.dtype == b.dtype == c.dtype == FLOAT32, "fma of different types"
        exact = np.asarray(raw(a), np.float64) * np.asarray(raw(b), np.float64) + np.asarray(raw(c), np.float64)
        return Tile(exact.astype(np.float32))

    @staticmethod
    def static_assert(condition: bool, message: str = "") -> None:
        """Fail as the compiler would."""
        assert condition, message

    @staticmethod
    def multiple_of(value: Any, promised: int) -> Any:
        """Check the promise, of which the compiler makes wide accesses, where a vector starts."""
        promised = raw(promised)
        numbers = np.ravel(value.offset if isinstance(value, Pointer) else raw(value))
        starts = numbers[np.diff(numbers, prepend=numbers[0] - 2) != 1]
        size = value.dtype.memory.itemsize if isinstance(value, Pointer) else 1
        assert (starts * size % promised == 0).all(), f"no multiples of {promised}: {starts * size}"
        return value

    # memory

    def program_id(self, _axis: int) -> Tile:
        """Return which program this is."""
        return Tile(np.int32(self.program))

    def num_programs(self, _axis: int) -> Tile:
        """Return how many there are."""
        return Tile(np.int32(self.programs))

    def load(self, pointer: Pointer, mask: Any = True, other: float | None = None) -> Tile:
        """Read from memory."""
        where, meant = pointer.chosen(mask)
        read = pointer.dtype.seen(pointer.memory.data[np.where(meant, where, 0)])
        if other is None:  # a GPU leaves there what was there
            other = np.nan if read.dtype.kind == "f" else np.iinfo(read.dtype).max
        return Tile(np.where(meant, read, np.asarray(other, read.dtype)), pointer.dtype)

    def store(
        self, pointer: Pointer, value: Tile, mask: Any = True, cache_modifier: str = "", eviction_policy: Any = ""
    ) -> None:
        """Write to memory: each element once, but for words that programs exchange."""
        assert getattr(eviction_policy, "value", eviction_policy) in ("", "evict_first", "evict_last")
        where, meant = pointer.chosen(mask)
        shared = pointer.dtype == UINT64
        if shared:
            self.turns.pause(self.program)
            self.turns.news()
        pointer.memory.data[where[meant]] = np.broadcast_to(pointer.dtype.stored(value.data), where.shape)[meant]
        np.add.at(pointer.memory.written, where[meant], 0 if shared else 1)
        assert (pointer.memory.written[where[meant]] <= 1).all(), "an element is written twice"

    def inline_asm_elementwise(self, asm: str, _constraints: str, arguments: list, *_: Any, **__: Any) -> Any:
        """Do what the two instructions that are used do."""
        if asm.startswith("mov.b32"):
            return arguments[0]
        assert asm.startswith("ld.relaxed.gpu.global.b64")
        self.turns.pause(self.program, looks=True)
        return self.load(arguments[0])

    def allocate_shared_memory(self, dtype: Type, shape: list[int], _layout: None) -> "Shared":
        """Return memory of this program."""
        sizes = [int(raw(size)) for size in shape]
        nothing = dtype.stored(np.full(math.prod(sizes), np.nan, np.float32))
        self.shared += nothing.nbytes
        return Shared(nothing, dtype, 0, sizes)

    # copies

    def async_copy_global_to_shared(self, target: "Shared", pointer: Pointer, mask: Any) -> None:
        """Copy now or as late as allowed, 16 aligned bytes at a time, or 4; what is not meant becomes 0."""
        size = pointer.dtype.memory.itemsize
        vector = VECTOR_BYTES // size if np.size(pointer.offset) * size >= VECTOR_BYTES else 4 // size
        where, meant = pointer.chosen(mask, vector)
        lanes, some = where.reshape(-1, vector), meant.reshape(-1, vector)
        assert (some == some[:, :1]).all(), "a mask goes through a vector"
        whole = (np.diff(lanes) == 1).all(1) & (lanes[:, 0] % vector == 0)
        assert whole[some[:, 0]].all(), "a vector is scattered, or not aligned"
        assert target.start % vector == 0, "a vector is not aligned in shared memory"

        def arrive() -> None:
            target.data[...] = np.where(
                meant, pointer.memory.data[np.where(meant, where, 0)], target.data.dtype.type(0)
            )

        if self.eager:
            arrive()
        else:
            self.open.append(arrive)

    def commit_group(self) -> None:
        """Close a group of copies."""
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, pending: int) -> None:
        """Let all groups arrive but the last `pending`."""
        assert raw(pending) >= 0
        while len(self.groups) > raw(pending):
            for arrive in self.groups.pop(0):
                arrive()


@dataclass
class Shared:
    """Shared memory, or a part of it."""

    memory: np.ndarray
    dtype: Type
    start: int
    shape: list[int]

    @property
    def data(self) -> np.ndarray:
        """Return what lies there."""
        return self.memory[self.start : self.start + math.prod(self.shape)].reshape(self.shape)

    def index(self, at: Any) -> "Shared":
        """Return one of the parts."""
        at = int(raw(at))
        assert 0 <= at < self.shape[0], f"slot {at} of {self.shape[0]}"
        rest = self.shape[1:]
        return Shared(self.memory, self.dtype, self.start + at * math.prod(rest), rest)

    def _reinterpret(self, dtype: Type, shape: list[int], _layout: None) -> "Shared":
        """Return memory of another shape that starts here."""
        assert dtype == self.dtype
        sizes = [int(raw(size)) for size in shape]
        assert self.start + math.prod(sizes) <= len(self.memory), "a view reaches past the end of shared memory"
        return Shared(self.memory, dtype, self.start, sizes)

    def load(self, _layout: None) -> Tile:
        """Read it."""
        return Tile(self.dtype.seen(self.data.copy()), self.dtype)

    def store(self, value: Tile) -> None:
        """Write it."""
        self.data[...] = self.dtype.stored(value.data)


def bound(function: Any, machine: Gluon, done: dict[int, Any]) -> Callable[..., Any]:
    """Return a kernel's function with Gluon's names, and other such functions, as they are on this machine."""
    if id(function) not in done:  # a kernel hashes its source, and all that it calls
        plain = function.fn
        names = dict(plain.__globals__)
        twin = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)
        done[id(function)] = twin
        for name in plain.__code__.co_names:
            value = names.get(name)
            if name in ("gl", "tl", "async_copy"):
                names[name] = machine
            elif name == "gdc_launch_dependents":
                names[name] = lambda: None
            elif name == "range":  # at run time: its numbers are int32, and are converted as such
                names[name] = lambda *ends: (Tile(np.int32(i)) for i in range(*map(int, ends)))
            elif isinstance(value, real_gl.constexpr):
                names[name] = value.value
            elif isinstance(value, ConstexprFunction):  # of layouts, which mean nothing here
                names[name] = lambda *_: None
            elif hasattr(value, "fn"):
                names[name] = bound(value, machine, done)
    return done[id(function)]


def run(
    kernel: Any,
    grid: tuple[int, int],
    tensors: Any,
    scalars: Any,
    constants: dict[str, Any],
    eager: bool,
    seed: int = 0,
) -> int:
    """Run all programs of a launch on tensors of the CPU; raise the first failure, or return a program's shared bytes.

    `seed` draws in what order programs that wait for one another go on.
    """
    memories: dict[int, Memory] = {}
    pointers = []
    for tensor in tensors:
        memory = memories.setdefault(tensor.untyped_storage().data_ptr(), Memory(tensor))
        memory.holds(tensor)
        pointers.append(Pointer(memory, np.int64(tensor.storage_offset())))
    numbers = {"int64": np.int64, "int32": np.int32, "fp64": np.float64}
    parameters = inspect.signature(kernel.fn).parameters.values()
    kinds = [numbers[str(each.annotation)] for each in parameters if str(each.annotation) in numbers]
    values = [Tile(kind(value)) for kind, value in zip(kinds, scalars, strict=True)]
    turns = Turns(grid[0], seed)
    machines = [Gluon(number, grid[0], eager, turns) for number in range(grid[0])]

    def program(machine: Gluon) -> None:
        turns.run(machine.program, lambda: bound(kernel, machine, {})(*pointers, *values, **constants))

    threads = [threading.Thread(target=program, args=(machine,), daemon=True) for machine in machines]
    for thread in threads:
        thread.start()
    turns.begin()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a program does not end"
    if turns.failure is not None:
        raise turns.failure
    for memory in memories.values():
        memory.check()
    return machines[0].shared
