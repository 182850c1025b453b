"""What both kernels for wide rows share on cards with large shared memory: rows wait there and are read there twice.

A program owns `width` columns of every row it takes: all N of them (K = 1), or the part of one of K programs that share
the rows of a group. Its columns are cut into PIECES pieces of one 16-byte vector a thread, and each piece has a ring of
its own in shared memory: DEPTH rows of it are on their way from memory, or lie there, and one more of the first EXTRA
pieces. A row is read from there once for its reduction and once more for its result, so it is never carried in
registers: only gamma and the sums for dgamma are. Then the row that takes its place is asked for.

Rings of their own, since the compiler puts a barrier between two copies into the same one.

Where K programs share a row, they exchange their sums as in `split.py`, with the same words, and for the same reason
all of them must be resident. LAG is by how many rows a row is finished later than it was summed: up to 3, since by
the proof in `split.py` step s - 2 - 2·LAG is the last that all have read when step s is published, and step s takes the
words of step s - 8. (With LAG = 4 the kernel hangs.)

Written in Gluon, Triton's language with explicit layouts and shared memory: Triton itself reads a tile from shared
memory once and then keeps it in registers, which a row of 16384 columns does not fit beside its sums.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="no-any-return, assignment"
# ruff: noqa: RUF005 (Triton knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rmsnorm_cli.kernels.tiles import USUAL, row_offset

WORDS = gl.constexpr(8)
"""Steps whose words a group keeps: as `split.SLOTS`."""


# --- rows in shared memory --------------------------------------------------------------------------------------------


@gluon.jit
def rings(like_ptr, CHUNK: gl.constexpr, PIECES: gl.constexpr, DEPTH: gl.constexpr, EXTRA: gl.constexpr):
    """Return shared memory for each piece of a row: for DEPTH rows, one more of the first EXTRA pieces."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pieces = ()
    for piece in gl.static_range(PIECES):
        if piece < EXTRA:
            pieces = pieces + (gl.allocate_shared_memory(like_ptr.dtype.element_ty, [DEPTH + 1, CHUNK], FLAT),)
        else:
            pieces = pieces + (gl.allocate_shared_memory(like_ptr.dtype.element_ty, [DEPTH, CHUNK], FLAT),)
    return pieces


@gluon.jit
def start(ptr, offset, columns, ALIGN: gl.constexpr):
    """Return where a program's columns of a row lie that starts `offset` elements after ptr."""
    return gl.multiple_of(ptr + (offset + columns), ALIGN * (ptr.dtype.element_ty.primitive_bitwidth // 8))


@gluon.jit
def ask(
    ring, slot, tensor, row, M, columns, n,
    FIRST: gl.constexpr, LAST: gl.constexpr, TWO: gl.constexpr, WHOLE: gl.constexpr, ALIGN: gl.constexpr,
):  # fmt: skip
    """Start copying pieces FIRST to LAST of a row into a slot; what lies past the n columns or the M rows becomes 0.

    `tensor`: pointer, per, outer and inner, as `tiles.row_offset` takes them.
    """
    CHUNK: gl.constexpr = columns.shape[0]
    pointers = start(tensor[0], row_offset(row, tensor[1], tensor[2], tensor[3], TWO, ALIGN), columns, ALIGN)
    for piece in gl.static_range(FIRST, LAST):
        inside = columns >= 0 if piece < WHOLE else columns < n - piece * CHUNK
        async_copy.async_copy_global_to_shared(ring[piece].index(slot), pointers + piece * CHUNK, inside & (row < M))


@gluon.jit
def held(ring, slots, piece: gl.constexpr, EXTRA: gl.constexpr, LAYOUT: gl.constexpr):
    """Read a piece of a row that has arrived, in fp32. `slots`: in the rings of DEPTH rows, and of one more."""
    if piece < EXTRA:
        return ring[piece].index(slots[1]).load(LAYOUT).to(gl.float32)
    else:
        return ring[piece].index(slots[0]).load(LAYOUT).to(gl.float32)


@gluon.jit
def following(slots, DEPTH: gl.constexpr):
    """Return the slots after these."""
    shorter = gl.where(slots[0] == DEPTH - 1, 0, slots[0] + 1)
    longer = gl.where(slots[1] == DEPTH, 0, slots[1] + 1)
    return shorter, longer


# --- gamma, sums, results ---------------------------------------------------------------------------------------------


@gluon.jit
def weights(gamma_ptr, columns, gamma_col, n, GAMMA: gl.constexpr, UNIT: gl.constexpr, PIECES: gl.constexpr):
    """Read gamma for all pieces, a tuple of tiles in gamma's dtype; of ones where there is no gamma."""
    CHUNK: gl.constexpr = columns.shape[0]
    tiles = ()
    for piece in gl.static_range(PIECES):
        at = columns + piece * CHUNK
        if GAMMA:
            offsets = at if UNIT else at.to(gl.int64) * gamma_col
            tiles = tiles + (gl.load(gamma_ptr + offsets, mask=at < n, other=0.0),)
        else:
            tiles = tiles + (1.0,)
    return tiles


@gluon.jit
def weighted(values, gamma, GAMMA: gl.constexpr):
    """Return values · gamma. 16-bit weights stay packed in pairs: the compiler would carry them as fp32 and spill."""
    if not GAMMA:
        return values
    elif gamma.dtype.primitive_bitwidth == 16:
        pairs = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gamma], gamma.dtype, is_pure=False, pack=2)
        return values * pairs.to(gl.float32)
    else:
        return values * gamma


@gluon.jit
def total(tile, WARPS: gl.constexpr):
    """Return the sum of a tile of one vector a thread.

    Up to 8 warps meet at one barrier, then each thread reads all their sums; gl.sum has two barriers, but needs fewer
    registers than 16 sums take.
    """
    if WARPS <= 8:
        by_warp = gl.sum(tile.reshape([WARPS, tile.shape[0] // WARPS]), 1)
        return gl.sum(gl.convert_layout(by_warp, gl.BlockedLayout([WARPS], [32], [WARPS], [0])), 0)
    else:
        return gl.sum(tile, 0)


@gluon.jit
def put(pointers, columns, piece: gl.constexpr, values, n, WHOLE: gl.constexpr, EVICT: gl.constexpr = USUAL):
    """Write a piece of one contiguous row, rounding once. EVICT: as `tiles.load_tile` has it."""
    shift: gl.constexpr = piece * columns.shape[0]
    values = values.to(pointers.dtype.element_ty)
    if piece < WHOLE:
        gl.store(pointers + shift, values, eviction_policy=EVICT)
    else:
        gl.store(pointers + shift, values, mask=columns < n - shift, eviction_policy=EVICT)


# --- words between the programs of a group ----------------------------------------------------------------------------


@gluon.jit
def publish(words_ptr, total, step, part, K):
    """Store this program's sum of a step together with the number of the step."""
    word = total.to(gl.uint32, bitcast=True).to(gl.uint64) | ((step + 1).to(gl.uint64) << 32)
    gl.store(words_ptr + (step % WORDS * K + part), word, cache_modifier=".wt")


@gluon.jit
def peek(words_ptr, step, K, PARTS: gl.constexpr, WARPS: gl.constexpr):
    """Read the K words of a step, whether they are there or not; the lanes past K repeat the last word."""
    parts = gl.minimum(gl.arange(0, PARTS, gl.BlockedLayout([1], [32], [WARPS], [0])), K - 1)
    slots = words_ptr + ((step + WORDS) % WORDS * K + parts)
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l", [slots.to(gl.uint64)], gl.uint64, is_pure=False, pack=1
    )


@gluon.jit
def collect(words_ptr, seen, step, K, PARTS: gl.constexpr, WARPS: gl.constexpr):
    """Wait until all K programs have published a step and return the row's whole sum; `seen` is an earlier peek."""
    tag = (step + 1).to(gl.uint64)
    word = seen
    while gl.max((word >> 32 != tag).to(gl.int32), 0) != 0:
        word = peek(words_ptr, step, K, PARTS, WARPS)
    here = gl.arange(0, PARTS, gl.BlockedLayout([1], [32], [WARPS], [0])) < K
    sums = (word & 0xFFFFFFFF).to(gl.uint32).to(gl.float32, bitcast=True)
    return gl.sum(gl.where(here, sums, 0.0), 0)
