"""What both kernels for rows that do not start on 16 bytes share: odd widths, slices such as `x[:, 1:]`.

Memory is read fastest 16 bytes at a time, and copied to shared memory ahead of its use only 4 bytes at a time or more;
such rows start and end in the middle. So a program copies the whole vectors that a row lies in, neighbours' numbers
included, and reads the row from shared memory number by number, from wherever in its first vector it starts (`lead`).
Column c is read by the same thread in every row, so a row has the same bits wherever it starts.

Persistent programs walk the rows, DEPTH of them on their way to shared memory or there. Of a tensor's first row and of
its last the vectors that reach outside the tensor are left out; their ends are read by themselves (`ends`).

A row is UNITS units of one number a thread; WHOLE of them need no mask. A and B are the tiles of numbers that are
copied, SLOT the numbers from one row in shared memory to the next.

Written in Gluon, as `ring.py` is: Triton itself cannot read shared memory from an offset that is not known before.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rmsnorm_cli.kernels.tiles import USUAL

# --- layouts ----------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def numbers_layout(size, warps):
    """Return the layout of one number a thread, neighbours beside neighbours.

    Numbers of 4 bytes so laid out would be read by `ldmatrix`, which wants whole vectors: their lanes change places.
    """
    if size != 4:
        return gl.BlockedLayout([1], [32], [warps], [0])
    high = [[32 << bit] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([], [[4], [8], [16], [1], [2]], high, [], [32 * warps])


@gluon.constexpr_function
def ends_layout(size, warps):
    """Return the layout of the numbers of one vector, one a thread; as above where they are of 4 bytes."""
    if size != 4:
        return gl.BlockedLayout([1], [32], [warps], [0])
    same = [[0] for _ in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([], [[2], [1], [0], [0], [0]], same, [], [4])


# --- rows in shared memory --------------------------------------------------------------------------------------------


@gluon.jit
def room_for(like_ptr, NUMBERS: gl.constexpr):
    """Return shared memory that is addressed number by number."""
    return gl.allocate_shared_memory(like_ptr.dtype.element_ty, [NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def part_of(memory, at, NUMBERS: gl.constexpr):
    """Return a view of shared memory from number `at` on."""
    return memory.index(at)._reinterpret(memory.dtype, [NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def lead_of(ptr, offset):
    """Return how many numbers after a multiple of 16 bytes the row starts that is `offset` numbers after ptr."""
    SIZE: gl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    return ((ptr.to(gl.int64, bitcast=True) // SIZE).to(gl.int32) + offset.to(gl.int32)) & (16 // SIZE - 1)


@gluon.jit
def ask(
    memory, at, ptr, offset, N, live, FIRST, LAST,
    A: gl.constexpr, B: gl.constexpr, WARPS: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Start copying the vectors that a row lies in, where it is `live`: those of tile A, or (SECOND) those of B.

    FIRST, LAST: it is the tensor's first or last row. The compiler puts a barrier between two copies into one memory.
    """
    VECTOR: gl.constexpr = 128 // memory.dtype.primitive_bitwidth
    SKIP: gl.constexpr = A if SECOND else 0
    TILE: gl.constexpr = B if SECOND else A
    lead = lead_of(ptr, offset)
    vectors = SKIP + gl.arange(0, TILE, gl.BlockedLayout([VECTOR], [32], [WARPS], [0]))
    limit = (lead + N + gl.where(LAST, 0, VECTOR - 1)) & -VECTOR
    inside = vectors < gl.multiple_of(gl.where(live, limit, 0), VECTOR)
    if not SECOND:
        inside = inside & (vectors >= gl.multiple_of(gl.where(FIRST, VECTOR, 0), VECTOR))
    pointers = gl.multiple_of(ptr + (offset - lead), 16) + vectors
    async_copy.async_copy_global_to_shared(part_of(memory, at + SKIP, TILE), pointers, inside)


@gluon.jit
def ask_all(
    rows, at, N, live, FIRST, LAST,
    TENSORS: gl.constexpr, A: gl.constexpr, B: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start copying a row of each tensor: `rows` are their memories, pointers and offsets.

    Tile A of all of them, then tile B: one barrier, not one for each.
    """
    for i in gl.static_range(TENSORS):
        ask(rows[i][0], at, rows[i][1], rows[i][2], N, live, FIRST, LAST, A, B, WARPS, False)
    if B > 0:
        for i in gl.static_range(TENSORS):
            ask(rows[i][0], at, rows[i][1], rows[i][2], N, live, FIRST, LAST, A, B, WARPS, True)


@gluon.jit
def ends(memory, at, ptr, offset, N, WARPS: gl.constexpr):
    """Read the ends of a row, a vector each, and write them where `ask` left them out."""
    VECTOR: gl.constexpr = 128 // memory.dtype.primitive_bitwidth
    lead = lead_of(ptr, offset)
    pointers = ptr + offset + gl.arange(0, VECTOR, ends_layout(16 // VECTOR, WARPS))
    part_of(memory, at + lead, VECTOR).store(gl.load(pointers))
    part_of(memory, at + lead + N - VECTOR, VECTOR).store(gl.load(pointers + (N - VECTOR)))


@gluon.jit
def numbers(
    memory, at, columns, N,
    UNITS: gl.constexpr, WHOLE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Read a row that starts at number `at`, in fp32, a tuple of units; what lies past its N columns is 0."""
    UNIT: gl.constexpr = columns.shape[0]
    row = ()
    for unit in gl.static_range(UNITS):
        values = part_of(memory, at + unit * UNIT, UNIT).load(LAYOUT).to(gl.float32)
        row = row + (values if unit < WHOLE else gl.where(columns < N - unit * UNIT, values, 0.0),)
    return row


# --- rows in the GPU's memory -----------------------------------------------------------------------------------------


@gluon.jit
def read(pointers, columns, stride, N, UNITS: gl.constexpr):
    """Read a row whose columns are `stride` numbers apart, in fp32, a tuple of units; 0 past its N columns."""
    UNIT: gl.constexpr = columns.shape[0]
    row = ()
    for unit in gl.static_range(UNITS):
        at = columns + unit * UNIT
        row = row + (gl.load(pointers + at.to(gl.int64) * stride, mask=at < N, other=0.0).to(gl.float32),)
    return row


@gluon.jit
def write(
    pointers, columns, row, limit, UNITS: gl.constexpr, WHOLE: gl.constexpr, EVICT: gl.constexpr = USUAL
):  # fmt: skip
    """Write units of a row, rounding once, to the columns below the limit; `pointers` are those of the first unit.

    EVICT: as `tiles.load_tile` has it.
    """
    UNIT: gl.constexpr = columns.shape[0]
    for unit in gl.static_range(UNITS):
        values = row[unit].to(pointers.dtype.element_ty)
        if unit < WHOLE:
            gl.store(pointers + unit * UNIT, values, eviction_policy=EVICT)
        else:
            gl.store(pointers + unit * UNIT, values, mask=columns < limit - unit * UNIT, eviction_policy=EVICT)


@gluon.jit
def times(row, weights, UNITS: gl.constexpr, GAMMA: gl.constexpr):
    """Return row · weights, unit by unit; the row itself where there are none."""
    if not GAMMA:
        return row
    else:
        products = ()
        for unit in gl.static_range(UNITS):
            products = products + (row[unit] * weights[unit],)
        return products


@gluon.jit
def scaled(row, factor, UNITS: gl.constexpr):
    """Return row · factor, unit by unit."""
    products = ()
    for unit in gl.static_range(UNITS):
        products = products + (row[unit] * factor,)
    return products


@gluon.jit
def added(row, other, sums, UNITS: gl.constexpr):
    """Return sums + row · other, unit by unit, rounding once."""
    result = ()
    for unit in gl.static_range(UNITS):
        result = result + (gl.fma(row[unit], other[unit], sums[unit]),)
    return result
