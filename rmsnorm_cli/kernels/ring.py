"""The fused kernels for wide rows on cards with large shared memory: rows wait there and are read from there twice.

A program owns `width` columns of every row it takes: all N of them (K = 1), or the part of one of K programs that share
the rows of a group. DEPTH rows are on their way from memory into a ring in shared memory, or lie there. A row is read
from it once for its reduction and once more for its result, so it is never carried in registers: only gamma and the
sums for dgamma are. Then the row DEPTH further on is asked for.

Where K programs share a row, they exchange their sums as in `split.py`, with the same words, and for the same reason
all of them must be resident. LAG is by how many rows a row is finished later than it was summed.

Written in Gluon, Triton's language with explicit layouts and shared memory: Triton itself reads a tile from shared
memory once and then keeps it in registers, which a row of 16384 columns does not fit beside its sums.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="no-any-return, assignment"
# ruff: noqa: RUF005 (Triton knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents

from rmsnorm_cli.kernels.tiles import row_offset

WORDS = gl.constexpr(8)
"""Steps whose words a group keeps: as `split.SLOTS`."""


# --- rows in shared memory --------------------------------------------------------------------------------------------


@gluon.jit
def ask(ring, slot, ptr, offset, columns, live, n, FULL: gl.constexpr, ALIGN: gl.constexpr):
    """Start copying a piece of a row into a slot of the ring; what lies past the n columns or the M rows becomes 0."""
    pointers = gl.multiple_of(ptr + (offset + columns), ALIGN * (ptr.dtype.element_ty.primitive_bitwidth // 8))
    mask = (columns >= 0) & live if FULL else (columns < n) & live
    async_copy.async_copy_global_to_shared(ring.index(slot), pointers, mask=mask)


@gluon.jit
def held(ring, slot, LAYOUT: gl.constexpr):
    """Read a piece of a row that has arrived, in fp32."""
    return ring.index(slot).load(LAYOUT).to(gl.float32)


@gluon.jit
def following(slot, DEPTH: gl.constexpr):
    """Return the slot after this one."""
    return gl.where(slot == DEPTH - 1, 0, slot + 1)


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
def put(ptr, offset, columns, values, n, FULL: gl.constexpr, ALIGN: gl.constexpr):
    """Write a piece of one contiguous row, rounding once."""
    pointers = gl.multiple_of(ptr + (offset + columns), ALIGN * (ptr.dtype.element_ty.primitive_bitwidth // 8))
    values = values.to(ptr.dtype.element_ty)
    if FULL:
        gl.store(pointers, values)
    else:
        gl.store(pointers, values, mask=columns < n)


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


# --- kernels ----------------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        "x_ptr", "y_ptr", "rstd_ptr", "words_ptr", "M", "N", "K", "width",
        "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def ring_forward_kernel(
    x_ptr, gamma_ptr, y_ptr, rstd_ptr, words_ptr,
    M: gl.int64, N: gl.int32, eps: gl.float64, K: gl.int32, width: gl.int32,
    x_per: gl.int64, x_outer: gl.int64, x_inner: gl.int64, x_col: gl.int64, gamma_col: gl.int64,
    CHUNK: gl.constexpr, PIECES: gl.constexpr, DEPTH: gl.constexpr, WARPS: gl.constexpr,
    SHARED: gl.constexpr, LAG: gl.constexpr, PARTS: gl.constexpr, FULL: gl.constexpr, ALIGN: gl.constexpr,
    TWO: gl.constexpr, GAMMA: gl.constexpr, GAMMA_UNIT: gl.constexpr,
):  # fmt: skip
    """Normalise every row of this program's group, as far as its columns go."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([128 // x_ptr.dtype.element_ty.primitive_bitwidth], [32], [WARPS], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    group = gl.program_id(0) // K
    part = gl.program_id(0) % K
    groups = gl.num_programs(0) // K
    words = words_ptr + group * (WORDS * K)
    n = gl.minimum(part * width + width, N) // ALIGN * ALIGN
    columns = gl.multiple_of(part * width, ALIGN) + gl.arange(0, CHUNK, LAYOUT)
    steps = ((M - group + groups - 1) // groups).to(gl.int32)
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [DEPTH * PIECES, CHUNK], FLAT)
    for slot in gl.static_range(DEPTH):
        row = (group + slot * groups).to(gl.int64)
        x_at = row_offset(row, x_per, x_outer, x_inner, TWO, ALIGN)
        for piece in gl.static_range(PIECES):
            at = columns + piece * CHUNK
            ask(ring, slot * PIECES + piece, x_ptr, x_at, at, row < M, n, FULL, ALIGN)
        async_copy.commit_group()
    gamma = weights(gamma_ptr, columns, gamma_col, n, GAMMA, GAMMA_UNIT, PIECES)
    # Not `tail = head`: two names of one value at a loop's start are taken for one that the loop never changes.
    head = gl.to_tensor(0)
    tail = gl.to_tensor(0)
    for step in range(0, steps + LAG):
        done = step - LAG
        if LAG > 0:  # ask early for what is needed late
            seen = peek(words, done, K, PARTS, WARPS)
        async_copy.wait_group(DEPTH - LAG - 1)
        squares = gl.zeros((CHUNK,), gl.float32, LAYOUT)
        for piece in gl.static_range(PIECES):
            x = held(ring, head * PIECES + piece, LAYOUT)
            squares = gl.fma(x, x, squares)
        head = following(head, DEPTH)
        square_sum = gl.sum(squares, 0)
        if SHARED:
            publish(words, square_sum, step, part, K)
            if LAG == 0:
                seen = peek(words, done, K, PARTS, WARPS)
        if done >= 0:
            if SHARED:
                square_sum = collect(words, seen, done, K, PARTS, WARPS)
            rstd = gl.rsqrt(square_sum / N + eps.to(gl.float32))
            row = (done * groups + group).to(gl.int64)
            gl.store(rstd_ptr + row, rstd, mask=part == 0)
            y_at = row_offset(row, 1, 0, N, False, ALIGN)
            for piece in gl.static_range(PIECES):
                y = weighted(held(ring, tail * PIECES + piece, LAYOUT) * rstd, gamma[piece], GAMMA)
                put(y_ptr, y_at, columns + piece * CHUNK, y, n, FULL, ALIGN)
            row += DEPTH * groups
            x_at = row_offset(row, x_per, x_outer, x_inner, TWO, ALIGN)
            for piece in gl.static_range(PIECES):
                at = columns + piece * CHUNK
                ask(ring, tail * PIECES + piece, x_ptr, x_at, at, row < M, n, FULL, ALIGN)
            async_copy.commit_group()
            tail = following(tail, DEPTH)


@gluon.jit(
    do_not_specialize=[
        "dy_ptr", "x_ptr", "rstd_ptr", "dx_ptr", "partial_ptr", "words_ptr", "M", "N", "K", "width",
        "dy_per", "dy_outer", "dy_inner", "dy_col", "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def ring_backward_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, partial_ptr, words_ptr,
    M: gl.int64, N: gl.int32, K: gl.int32, width: gl.int32,
    dy_per: gl.int64, dy_outer: gl.int64, dy_inner: gl.int64, dy_col: gl.int64,
    x_per: gl.int64, x_outer: gl.int64, x_inner: gl.int64, x_col: gl.int64, gamma_col: gl.int64,
    CHUNK: gl.constexpr, PIECES: gl.constexpr, DEPTH: gl.constexpr, WARPS: gl.constexpr,
    SHARED: gl.constexpr, LAG: gl.constexpr, PARTS: gl.constexpr, FULL: gl.constexpr, ALIGN: gl.constexpr,
    DY_TWO: gl.constexpr, TWO: gl.constexpr, GAMMA: gl.constexpr, GAMMA_UNIT: gl.constexpr, DGAMMA: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Write dx of every row of this program's group, as far as its columns go, and the group's sums for dgamma."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([128 // x_ptr.dtype.element_ty.primitive_bitwidth], [32], [WARPS], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if DEPENDENT:
        gdc_launch_dependents()
    group = gl.program_id(0) // K
    part = gl.program_id(0) % K
    groups = gl.num_programs(0) // K
    words = words_ptr + group * (WORDS * K)
    n = gl.minimum(part * width + width, N) // ALIGN * ALIGN
    columns = gl.multiple_of(part * width, ALIGN) + gl.arange(0, CHUNK, LAYOUT)
    steps = ((M - group + groups - 1) // groups).to(gl.int32)
    ring_x = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [DEPTH * PIECES, CHUNK], FLAT)
    ring_dy = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [DEPTH * PIECES, CHUNK], FLAT)
    for slot in gl.static_range(DEPTH):
        row = (group + slot * groups).to(gl.int64)
        x_at = row_offset(row, x_per, x_outer, x_inner, TWO, ALIGN)
        dy_at = row_offset(row, dy_per, dy_outer, dy_inner, DY_TWO, ALIGN)
        for piece in gl.static_range(PIECES):
            at = columns + piece * CHUNK
            ask(ring_x, slot * PIECES + piece, x_ptr, x_at, at, row < M, n, FULL, ALIGN)
            ask(ring_dy, slot * PIECES + piece, dy_ptr, dy_at, at, row < M, n, FULL, ALIGN)
        async_copy.commit_group()
    gamma = weights(gamma_ptr, columns, gamma_col, n, GAMMA, GAMMA_UNIT, PIECES)
    sums = ()
    for _ in gl.static_range(PIECES):
        sums = sums + (gl.zeros((CHUNK,), gl.float32, LAYOUT),)
    # Not `tail = head`: two names of one value at a loop's start are taken for one that the loop never changes.
    head = gl.to_tensor(0)
    tail = gl.to_tensor(0)
    coming = gl.load(rstd_ptr + group)
    for step in range(0, steps + LAG):
        done = step - LAG
        row = (step * groups + group).to(gl.int64)
        rstd = coming
        done_rstd = rstd
        if LAG > 0:  # ask early for what is needed late
            seen = peek(words, done, K, PARTS, WARPS)
            done_rstd = gl.load(rstd_ptr + (row - LAG * groups), mask=done >= 0, other=0.0)
        coming = gl.load(rstd_ptr + (row + groups), mask=row + groups < M, other=0.0)
        async_copy.wait_group(DEPTH - LAG - 1)
        products = gl.zeros((CHUNK,), gl.float32, LAYOUT)
        for piece in gl.static_range(PIECES):
            x = held(ring_x, head * PIECES + piece, LAYOUT)
            u = weighted(held(ring_dy, head * PIECES + piece, LAYOUT), gamma[piece], GAMMA)
            products = gl.fma(u, x * rstd, products)
        head = following(head, DEPTH)
        dot = gl.sum(products, 0)
        if SHARED:
            publish(words, dot, step, part, K)
            if LAG == 0:
                seen = peek(words, done, K, PARTS, WARPS)
        if done >= 0:
            if SHARED:
                dot = collect(words, seen, done, K, PARTS, WARPS)
            mean = dot / N
            row = (done * groups + group).to(gl.int64)
            dx_at = row_offset(row, 1, 0, N, False, ALIGN)
            added = ()
            for piece in gl.static_range(PIECES):
                x_hat = held(ring_x, tail * PIECES + piece, LAYOUT) * done_rstd
                dy = held(ring_dy, tail * PIECES + piece, LAYOUT)
                dx = gl.fma(-x_hat, mean, weighted(dy, gamma[piece], GAMMA)) * done_rstd
                put(dx_ptr, dx_at, columns + piece * CHUNK, dx, n, FULL, ALIGN)
                added = added + (gl.fma(dy, x_hat, sums[piece]),)
            sums = added
            row += DEPTH * groups
            x_at = row_offset(row, x_per, x_outer, x_inner, TWO, ALIGN)
            dy_at = row_offset(row, dy_per, dy_outer, dy_inner, DY_TWO, ALIGN)
            for piece in gl.static_range(PIECES):
                at = columns + piece * CHUNK
                ask(ring_x, tail * PIECES + piece, x_ptr, x_at, at, row < M, n, FULL, ALIGN)
                ask(ring_dy, tail * PIECES + piece, dy_ptr, dy_at, at, row < M, n, FULL, ALIGN)
            async_copy.commit_group()
            tail = following(tail, DEPTH)
    if DGAMMA:
        partial_at = row_offset(group.to(gl.int64), 1, 0, N, False, ALIGN)
        for piece in gl.static_range(PIECES):
            put(partial_ptr, partial_at, columns + piece * CHUNK, sums[piece], n, FULL, ALIGN)
