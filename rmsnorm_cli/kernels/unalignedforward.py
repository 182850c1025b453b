"""The fused forward of rows that do not start on 16 bytes: see `unaligned.py` for how."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rmsnorm_cli.kernels.ring import total
from rmsnorm_cli.kernels.tiles import row_offset
from rmsnorm_cli.kernels.unaligned import (
    ask_all,
    ends,
    lead_of,
    numbers,
    numbers_layout,
    read,
    room_for,
    scaled,
    times,
    write,
)


@gluon.jit(
    do_not_specialize=[
        "x_ptr", "y_ptr", "rstd_ptr", "M", "N", "eps", "x_per", "x_outer", "x_inner", "x_col", "gamma_col",
    ]
)  # fmt: skip
def unaligned_forward_kernel(
    x_ptr, gamma_ptr, y_ptr, rstd_ptr,
    M: gl.int64, N: gl.int32, eps: gl.float64,
    x_per: gl.int64, x_outer: gl.int64, x_inner: gl.int64, x_col: gl.int64, gamma_col: gl.int64,
    UNITS: gl.constexpr, WHOLE: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr,
    A: gl.constexpr, B: gl.constexpr, SLOT: gl.constexpr, TWO: gl.constexpr, GAMMA: gl.constexpr,
):  # fmt: skip
    """Walk every P-th row: write its y and its rstd."""
    LAYOUT: gl.constexpr = numbers_layout(x_ptr.dtype.element_ty.primitive_bitwidth // 8, WARPS)
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = ((M - pid + programs - 1) // programs).to(gl.int32)
    final = gl.where((M - 1) % programs == pid, steps - 1, -1)  # the step of the tensor's last row, if it is here
    memory = room_for(x_ptr, DEPTH * SLOT)
    for slot in gl.static_range(DEPTH):
        row = (pid + slot * programs).to(gl.int64)
        offset = row_offset(row, x_per, x_outer, x_inner, TWO, 1)
        live = slot < steps
        ask_all(((memory, x_ptr, offset),), slot * SLOT, N, live, row == 0, slot == final, 1, A, B, WARPS)
        async_copy.commit_group()
    columns = gl.arange(0, 32 * WARPS, LAYOUT)
    gamma = read(gamma_ptr, columns, gamma_col, N, UNITS) if GAMMA else ()
    at = gl.to_tensor(0)
    for step in range(0, steps):
        row = (step * programs + pid).to(gl.int64)
        here = row_offset(row, x_per, x_outer, x_inner, TWO, 1)
        async_copy.wait_group(DEPTH - 1)
        if (step == final) | (row == 0):
            ends(memory, at, x_ptr, here, N, WARPS)
        x = numbers(memory, at + lead_of(x_ptr, here), columns, N, UNITS, WHOLE, LAYOUT)
        squares = gl.zeros((32 * WARPS,), gl.float32, LAYOUT)
        for unit in gl.static_range(UNITS):
            squares = gl.fma(x[unit], x[unit], squares)
        rstd = gl.rsqrt(total(squares, WARPS) / N + eps.to(gl.float32))
        ahead = step + DEPTH
        there = row_offset(row + DEPTH * programs, x_per, x_outer, x_inner, TWO, 1)
        ask_all(((memory, x_ptr, there),), at, N, ahead < steps, False, ahead == final, 1, A, B, WARPS)
        async_copy.commit_group()
        at = gl.where(at == (DEPTH - 1) * SLOT, 0, at + SLOT)
        gl.store(rstd_ptr + row, rstd)
        y = times(scaled(x, rstd, UNITS), gamma, UNITS, GAMMA)
        write(y_ptr + row * N + columns, columns, y, N, UNITS, WHOLE)
