"""Run a kernel written in Gluon on the CPU, program by program, with numpy in the place of the GPU.

Triton's interpreter does not know Gluon. This runs the kernel's own Python source: the names that it takes from Gluon
are replaced by the few below, and those of other kernels' functions by the same functions so treated. What a GPU would
let pass is an error here: an access outside a tensor, an element written twice or by two programs, a promised
alignment that does not hold. Memory of a program starts as NaN.

A copy into shared memory may arrive at any time between the call and the wait for its group. `eager` makes all arrive
at once and the others as late as they may: a kernel that is right both ways reads nothing too early and overwrites
nothing that is still needed. Programs run as threads, so they may wait for one another.
"""

import inspect
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.experimental.gluon.language as real_gl
from gluon_values import FLOAT32, INT32, INT64, UINT32, UINT64, Memory, Pointer, Tile, Type, raw


class Gluon:
    """The names of Gluon that the kernels use, for one program."""

    int32, int64, uint32, uint64, float32 = INT32, INT64, UINT32, UINT64, FLOAT32
    constexpr = real_gl.constexpr

    def __init__(self, program: int, programs: int, eager: bool) -> None:
        self.program, self.programs, self.eager = program, programs, eager
        self.open: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []

    # what needs no machine

    static_range, BlockedLayout, SwizzledSharedLayout = (
        range,
        staticmethod(lambda *_: None),
        staticmethod(lambda *_: None),
    )
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
        """Return a · b + c, rounded once."""
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
        if isinstance(value, Pointer):
            first = np.asarray(value.offset).flat[0] * value.dtype.memory.itemsize
        else:
            first = np.asarray(raw(value)).flat[0]
        assert first % promised == 0, f"{first} is no multiple of {promised}"
        return value

    # memory

    def program_id(self, _axis: int) -> Tile:
        """Return which program this is."""
        return Tile(np.int32(self.program))

    def num_programs(self, _axis: int) -> Tile:
        """Return how many there are."""
        return Tile(np.int32(self.programs))

    def load(self, pointer: Pointer, mask: Any = True, other: float = 0.0) -> Tile:
        """Read from memory."""
        where, meant = pointer.chosen(mask)
        read = pointer.dtype.seen(pointer.memory.data[np.where(meant, where, 0)])
        return Tile(np.where(meant, read, np.asarray(other, read.dtype)), pointer.dtype)

    def store(self, pointer: Pointer, value: Tile, mask: Any = True, cache_modifier: str = "") -> None:
        """Write to memory: each element once, but for words that programs exchange."""
        where, meant = pointer.chosen(mask)
        with pointer.memory.lock:
            pointer.memory.data[where[meant]] = np.broadcast_to(pointer.dtype.stored(value.data), where.shape)[meant]
            np.add.at(pointer.memory.written, where[meant], 0 if cache_modifier else 1)
            assert (pointer.memory.written[where[meant]] <= 1).all(), "an element is written twice"

    def inline_asm_elementwise(self, asm: str, _constraints: str, arguments: list, *_: Any, **__: Any) -> Any:
        """Do what the two instructions that are used do."""
        if asm.startswith("mov.b32"):
            return arguments[0]
        assert asm.startswith("ld.relaxed.gpu.global.b64")
        time.sleep(0)  # let the others go on
        return self.load(arguments[0])

    def allocate_shared_memory(self, dtype: Type, shape: list[int], _layout: None) -> "Shared":
        """Return memory of this program."""
        nothing = dtype.stored(np.full([raw(size) for size in shape], np.nan, np.float32))
        return Shared(nothing, dtype)

    # copies

    def async_copy_global_to_shared(self, target: "Shared", pointer: Pointer, mask: Any) -> None:
        """Copy now or as late as allowed; what is not meant becomes 0."""
        where, meant = pointer.chosen(mask)

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

    data: np.ndarray
    dtype: Type

    def index(self, at: Any) -> "Shared":
        """Return one of the parts."""
        at = int(raw(at))
        assert 0 <= at < len(self.data), f"slot {at} of {len(self.data)}"
        return Shared(self.data[at], self.dtype)

    def load(self, _layout: None) -> Tile:
        """Read it."""
        return Tile(self.dtype.seen(self.data.copy()), self.dtype)


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
            elif hasattr(value, "fn"):
                names[name] = bound(value, machine, done)
    return done[id(function)]


def run(kernel: Any, grid: tuple[int, int], tensors: Any, scalars: Any, constants: dict[str, Any], eager: bool) -> None:
    """Run all programs of a launch on tensors of the CPU; the first failure of any is raised."""
    memories: dict[int, Memory] = {}
    pointers = []
    for tensor in tensors:
        memory = memories.setdefault(tensor.untyped_storage().data_ptr(), Memory(tensor))
        pointers.append(Pointer(memory, np.int64(tensor.storage_offset())))
    numbers = {"int64": np.int64, "int32": np.int32, "fp64": np.float64}
    parameters = inspect.signature(kernel.fn).parameters.values()
    kinds = [numbers[str(each.annotation)] for each in parameters if str(each.annotation) in numbers]
    values = [Tile(kind(value)) for kind, value in zip(kinds, scalars, strict=True)]
    failures: list[BaseException] = []

    def program(number: int) -> None:
        try:
            bound(kernel, Gluon(number, grid[0], eager), {})(*pointers, *values, **constants)
        except BaseException as problem:  # a thread's own would be lost
            failures.append(problem)

    threads = [threading.Thread(target=program, args=(number,), daemon=True) for number in range(grid[0])]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while any(thread.is_alive() for thread in threads) and not failures:
            assert time.monotonic() < deadline, "the programs wait for one another for ever"
            time.sleep(0.001)
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]
