"""The fused kernels for rows wider than one program can hold: K programs share a row.

Program `part` of a group of K owns `width` columns of every row of its group. It sums its own part of the row's
reduction and publishes it as one 64-bit word: the fp32 sum in the low half, the step it belongs to in the high half,
so that nobody can see the one without the other. One step later it reads the K words of the row, waits for those that
are missing, adds them in the order of the parts and finishes the row from what it kept. All programs must be resident
for that, which a cooperative launch guarantees or refuses.

LAG is by how many steps a row is finished after its part was published: 0, 1 or 2. The words are asked for a step
before they are needed: on a busy card a read from L2 takes as long as a step.

A word is overwritten SLOTS = 8 steps later, when nobody can need it: a program publishes step s only after it has
read all words of step s - 1 - LAG, whose authors had by then read all words of step s - 2 - 2·LAG ≥ s - 6, and 6 < 8.
The words must be 0 before the launch; steps count from 1.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from rmsnorm_cli.kernels.tiles import (
    cell,
    column_limit,
    column_sum,
    input_gradient,
    inverse_rms,
    load_gamma,
    load_tile,
    row_numbers,
    row_pointers,
    row_sum,
    spread,
    store_tile,
    weighted,
    zeros_rows,
    zeros_tile,
)

SLOTS = tl.constexpr(8)


@triton.jit
def packed(tile, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return 16-bit values two to a 32-bit word (half the columns), others as they are.

    Carried from one step to the next as they are, each would take a register of its own, and ptxas spills.
    """
    if tile.dtype.primitive_bitwidth == 16:
        bits = tile.to(tl.uint16, bitcast=True)
        if ROWS == 1:
            low, high = tl.split(tl.reshape(bits, (BLOCK // 2, 2)))
        else:
            low, high = tl.split(tl.reshape(bits, (ROWS, BLOCK // 2, 2)))
        return low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    else:
        return tile


@triton.jit
def unpacked(words, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the values of `packed` in fp32."""
    if DTYPE.primitive_bitwidth == 16:
        low = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        if ROWS == 1:
            return tl.reshape(tl.join(low, high), (BLOCK,))
        else:
            return tl.reshape(tl.join(low, high), (ROWS, BLOCK))
    else:
        return words.to(tl.float32)


@triton.jit
def moved(words, PTX: tl.constexpr):
    """Return the words through an instruction: a loop that merely renames a value it carried is not pipelined."""
    if PTX and words.dtype.is_int():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], words.dtype, is_pure=False, pack=1)
    elif PTX:
        return words + 0.0
    else:
        return words


@triton.jit
def publish(words_ptr, sums, step, part, K, ROWS: tl.constexpr):
    """Store this program's sums of a step, each together with the number of the step."""
    word = sums.to(tl.uint32, bitcast=True).to(tl.uint64) | (tl.full((), step + 1, tl.uint64) << 32)
    slots = words_ptr + row_numbers(step % SLOTS, ROWS) * K + part
    tl.store(slots, word, cache_modifier=".wt")


@triton.jit
def peek(words_ptr, step, K, ROWS: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr):
    """Read the K words of a step, whether they are there or not; the lanes past K repeat the last word."""
    parts = tl.minimum(tl.arange(0, PARTS), K - 1)
    slots = cell(words_ptr + row_numbers((step + SLOTS) % SLOTS, ROWS) * K, parts, 1, ROWS, True)
    if PTX:  # a tl.load in the loop would be pipelined: read two steps too early
        return tl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l", [slots.to(tl.uint64)], tl.uint64, is_pure=False, pack=1
        )
    else:
        return tl.load(slots, volatile=True)


@triton.jit
def collect(words_ptr, seen, step, K, ROWS: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr):
    """Wait until all K programs have published a step and return the rows' whole sums; `seen` is an earlier peek."""
    tag = tl.full((), step + 1, tl.uint64)
    word = seen
    while tl.max((word >> 32 != tag).to(tl.int32)) != 0:
        word = peek(words_ptr, step, K, ROWS, PARTS, PTX)
    here = tl.arange(0, PARTS) < K
    sums = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    return row_sum(tl.where(here if ROWS == 1 else here[None, :], sums, 0.0), ROWS)


@triton.jit(
    do_not_specialize=[
        "x_ptr", "y_ptr", "rstd_ptr", "words_ptr", "M", "N", "K", "width",
        "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def shared_forward_kernel(
    x_ptr, gamma_ptr, y_ptr, rstd_ptr, words_ptr,
    M: tl.int64, N: tl.int32, eps: tl.float64, K: tl.int32, width: tl.int32,
    x_per: tl.int64, x_outer: tl.int64, x_inner: tl.int64, x_col: tl.int64, gamma_col: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    LAG: tl.constexpr, PTX: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr,
    TWO: tl.constexpr, UNIT: tl.constexpr, GAMMA: tl.constexpr, GAMMA_UNIT: tl.constexpr,
):  # fmt: skip
    """Normalise rows that K programs share."""
    pid = tl.program_id(0)
    group = pid // K
    part = pid % K
    groups = tl.num_programs(0) // K
    words = words_ptr + group * (SLOTS * ROWS) * K
    n = column_limit(tl.minimum(part * width + width, N), ALIGN)
    columns = tl.multiple_of(part * width, ALIGN) + tl.arange(0, BLOCK)
    gamma = 1.0
    if GAMMA:
        gamma = load_gamma(gamma_ptr, columns, gamma_col, n, FULL, GAMMA_UNIT)
    steps = (((M + ROWS - 1) // ROWS - group + groups - 1) // groups).to(tl.int32)
    kept = packed(zeros_tile(ROWS, BLOCK, x_ptr.dtype.element_ty), ROWS, BLOCK)
    # Not `older = kept`: two names of one value at a loop's start are taken for one that the loop never changes.
    older = packed(zeros_tile(ROWS, BLOCK, x_ptr.dtype.element_ty), ROWS, BLOCK)
    seen = peek(words, tl.full((), 0, tl.int32), K, ROWS, PARTS, PTX)
    # A row is finished LAG steps late, while later ones arrive, so there are LAG steps more than rows.
    for step in tl.range(0, steps + LAG, num_stages=STAGES):
        now = tl.full((), step, tl.int32)  # in the interpreter, step is a Python int
        done = now - LAG
        if LAG == 1:  # ask early for what is needed late
            seen = peek(words, done, K, ROWS, PARTS, PTX)
        if LAG == 2:
            coming = peek(words, now - 1, K, ROWS, PARTS, PTX)
        rows = row_numbers((now * groups + group).to(tl.int64), ROWS)
        live = rows < M
        x_rows = row_pointers(x_ptr, rows, x_per, x_outer, x_inner, TWO, ALIGN)
        raw = load_tile(x_rows, columns, x_col, live, n, ROWS, FULL, UNIT, LAG > 0)
        x = raw.to(tl.float32)
        publish(words, row_sum(x * x, ROWS), now, part, K, ROWS)
        if LAG == 0:
            older = packed(raw, ROWS, BLOCK)
            seen = peek(words, done, K, ROWS, PARTS, PTX)
        if LAG == 1:
            older = kept
        if done >= 0:
            rows = row_numbers((done * groups + group).to(tl.int64), ROWS)
            live = rows < M
            rstd = inverse_rms(collect(words, seen, done, K, ROWS, PARTS, PTX), N, eps, tl.float32)
            y = weighted(unpacked(older, x_ptr.dtype.element_ty, ROWS, BLOCK) * spread(rstd, ROWS), gamma, ROWS, GAMMA)
            store_tile(row_pointers(y_ptr, rows, 1, 0, N, False, ALIGN), columns, y, live, n, ROWS, FULL)
            tl.store(rstd_ptr + rows, rstd, mask=live & (part == 0))
        if LAG == 2:
            older = moved(kept, PTX)
            seen = coming
        if LAG > 0:
            kept = packed(raw, ROWS, BLOCK)


@triton.jit(
    do_not_specialize=[
        "dy_ptr", "x_ptr", "rstd_ptr", "dx_ptr", "partial_ptr", "words_ptr", "M", "N", "K", "width",
        "dy_per", "dy_outer", "dy_inner", "dy_col", "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def shared_backward_kernel(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, partial_ptr, words_ptr,
    M: tl.int64, N: tl.int32, K: tl.int32, width: tl.int32,
    dy_per: tl.int64, dy_outer: tl.int64, dy_inner: tl.int64, dy_col: tl.int64,
    x_per: tl.int64, x_outer: tl.int64, x_inner: tl.int64, x_col: tl.int64, gamma_col: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    LAG: tl.constexpr, PTX: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr,
    DY_TWO: tl.constexpr, DY_UNIT: tl.constexpr, TWO: tl.constexpr, UNIT: tl.constexpr,
    GAMMA: tl.constexpr, GAMMA_UNIT: tl.constexpr, DGAMMA: tl.constexpr,
):  # fmt: skip
    """Write dx of rows that K programs share, and each group's sums for dgamma."""
    pid = tl.program_id(0)
    group = pid // K
    part = pid % K
    groups = tl.num_programs(0) // K
    words = words_ptr + group * (SLOTS * ROWS) * K
    n = column_limit(tl.minimum(part * width + width, N), ALIGN)
    columns = tl.multiple_of(part * width, ALIGN) + tl.arange(0, BLOCK)
    gamma = 1.0
    if GAMMA:
        gamma = load_gamma(gamma_ptr, columns, gamma_col, n, FULL, GAMMA_UNIT)
    steps = (((M + ROWS - 1) // ROWS - group + groups - 1) // groups).to(tl.int32)
    total = zeros_tile(ROWS, BLOCK, tl.float32)
    # Each name has a zero of its own: two names of one value are taken for a value that the loop never changes.
    kept_x = packed(zeros_tile(ROWS, BLOCK, x_ptr.dtype.element_ty), ROWS, BLOCK)
    kept_dy = packed(zeros_tile(ROWS, BLOCK, dy_ptr.dtype.element_ty), ROWS, BLOCK)
    kept_rstd = zeros_rows(ROWS, tl.float32)
    old_x = packed(zeros_tile(ROWS, BLOCK, x_ptr.dtype.element_ty), ROWS, BLOCK)
    old_dy = packed(zeros_tile(ROWS, BLOCK, dy_ptr.dtype.element_ty), ROWS, BLOCK)
    old_rstd = zeros_rows(ROWS, tl.float32)
    seen = peek(words, tl.full((), 0, tl.int32), K, ROWS, PARTS, PTX)
    for step in tl.range(0, steps + LAG, num_stages=STAGES):
        now = tl.full((), step, tl.int32)  # in the interpreter, step is a Python int
        done = now - LAG
        if LAG == 1:  # ask early for what is needed late
            seen = peek(words, done, K, ROWS, PARTS, PTX)
        if LAG == 2:
            coming = peek(words, now - 1, K, ROWS, PARTS, PTX)
        rows = row_numbers((now * groups + group).to(tl.int64), ROWS)
        live = rows < M
        x_rows = row_pointers(x_ptr, rows, x_per, x_outer, x_inner, TWO, ALIGN)
        dy_rows = row_pointers(dy_ptr, rows, dy_per, dy_outer, dy_inner, DY_TWO, ALIGN)
        raw_x = load_tile(x_rows, columns, x_col, live, n, ROWS, FULL, UNIT, LAG > 0)
        raw_dy = load_tile(dy_rows, columns, dy_col, live, n, ROWS, FULL, DY_UNIT, LAG > 0)
        rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
        u = weighted(raw_dy.to(tl.float32), gamma, ROWS, GAMMA)
        publish(words, row_sum(u * (raw_x.to(tl.float32) * spread(rstd, ROWS)), ROWS), now, part, K, ROWS)
        if LAG == 0:
            old_x = packed(raw_x, ROWS, BLOCK)
            old_dy = packed(raw_dy, ROWS, BLOCK)
            old_rstd = rstd
            seen = peek(words, done, K, ROWS, PARTS, PTX)
        if LAG == 1:
            old_x = kept_x
            old_dy = kept_dy
            old_rstd = kept_rstd
        if done >= 0:
            rows = row_numbers((done * groups + group).to(tl.int64), ROWS)
            mean = collect(words, seen, done, K, ROWS, PARTS, PTX) / N
            x_hat = unpacked(old_x, x_ptr.dtype.element_ty, ROWS, BLOCK) * spread(old_rstd, ROWS)
            dy = unpacked(old_dy, dy_ptr.dtype.element_ty, ROWS, BLOCK)
            dx = input_gradient(weighted(dy, gamma, ROWS, GAMMA), x_hat, mean, old_rstd, ROWS)
            store_tile(row_pointers(dx_ptr, rows, 1, 0, N, False, ALIGN), columns, dx, rows < M, n, ROWS, FULL)
            if DGAMMA:
                total = tl.fma(dy, x_hat, total)
        if LAG == 2:
            old_x = moved(kept_x, PTX)
            old_dy = moved(kept_dy, PTX)
            old_rstd = kept_rstd + 0.0
            seen = coming
        if LAG > 0:
            kept_x = packed(raw_x, ROWS, BLOCK)
            kept_dy = packed(raw_dy, ROWS, BLOCK)
            kept_rstd = rstd
    if DGAMMA:
        partial_row = row_pointers(partial_ptr, group.to(tl.int64), 1, 0, N, False, ALIGN)
        store_tile(partial_row, columns, column_sum(total, ROWS), True, n, 1, FULL)
