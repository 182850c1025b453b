"""The machine on which the kernels of the ring run on the CPU finds what is wrong, and counts as a GPU does."""

import types

import gluon_on_cpu
import numpy as np
import pytest
import torch
from gluon_values import BFLOAT16, FLOAT32, Tile
from plans import in_place_of_a_card, through_plans
from test_fused import draw
from triton.experimental.gluon import language as gl

from rmsnorm_cli.kernels import ring, ringforward
from rmsnorm_cli.kernels.geometry import RING_SCRATCH, Backward, Forward, ring_bytes


def forward_of(words, lag, K, seed):
    """Run a forward whose groups keep the words of so many steps."""
    M, N = 16, K * 256
    x = torch.zeros(M, N, dtype=torch.float16)
    kept = torch.zeros(words * K, dtype=torch.int64).view(torch.uint64)
    constants = {
        "PIECES": 1, "DEPTH": lag + 1, "EXTRA": 0, "WARPS": 1, "SHARED": True, "LAG": lag, "PARTS": 4, "WHOLE": 1,
        "ALIGN": 8, "TWO": False, "GAMMA": False, "GAMMA_UNIT": False,
    }  # fmt: skip
    tensors = (x, x, torch.empty_like(x), torch.empty(M), kept)
    scalars = (M, N, 1e-6, K, 256, 1, 0, N, 1, 0)
    gluon_on_cpu.run(ringforward.ring_forward_kernel, (K, 1), tensors, scalars, constants, False, seed)


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_words_of_as_many_steps_as_the_proof_asks_for_are_enough_and_no_fewer(lag, monkeypatch):
    """The proof in `split.py`: 2 + 2 · LAG steps are kept, or in some order a program waits for ever."""
    assert ring.WORDS.value == 8 >= 2 + 2 * lag, "the plans allocate 8"
    for words, enough in ((2 + 2 * lag, True), (1 + 2 * lag, False)):
        for module in (ring, ringforward):
            monkeypatch.setattr(module, "WORDS", gl.constexpr(words))
        hangs = 0
        for seed in range(12):
            try:
                forward_of(words, lag, 4, seed)
            except AssertionError as problem:
                assert "for ever" in str(problem)  # noqa: PT017
                hangs += 1
        assert (hangs == 0) is enough


@pytest.mark.parametrize(("stages", "lag"), [(6, 2), (7, 1), (8, 3)])
def test_the_ring_takes_the_shared_memory_that_the_tables_count_on(stages, lag, monkeypatch):
    """As many bytes as `ring_bytes` says."""
    taken = []

    def run(kernel, *launch):
        taken.append(gluon_on_cpu.run(kernel, *launch, eager=True))

    in_place_of_a_card(monkeypatch, run)
    launches = [kind("ring", 512, warps=1, stages=stages, per_sm=1, lag=lag) for kind in (Forward, Backward)]
    for N in (512, 1000):
        x, gamma, dy = draw(2, N, torch.float16, "cpu")
        taken.clear()
        through_plans(x, gamma, dy, *launches)
        assert taken == [ring_bytes(launches[i], tensors=i + 1) - RING_SCRATCH for i in range(2)]


# --- kernels with one fault -------------------------------------------------------------------------------------------


def half_written(x_ptr, y_ptr):
    at = gl.arange(0, 8)
    gl.store(y_ptr + at, gl.load(x_ptr + at), mask=at < 4)


def read_between_rows(x_ptr, y_ptr):
    at = gl.arange(0, 16)
    gl.store(y_ptr + at, gl.load(x_ptr + at), mask=at < 8)


def left_out_of_a_load(x_ptr, y_ptr):
    at = gl.arange(0, 8)
    values = gl.load(x_ptr + at, mask=at < 4)
    gl.static_assert(not np.isnan(values.data).any(), "what a mask leaves out is used")


def copied_through_a_vector(x_ptr, y_ptr):
    at = gl.arange(0, 8)
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [8], None)
    gl.async_copy_global_to_shared(memory, x_ptr + at, at < 3)


def copied_unaligned(x_ptr, y_ptr):
    at = gl.arange(0, 8)
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [8], None)
    gl.async_copy_global_to_shared(memory, x_ptr + (at + 1), at < 4)


def unaligned_later(x_ptr, y_ptr):
    at = gl.arange(0, 8)
    gl.multiple_of(x_ptr + gl.where(at < 4, at, at + 1), 16)


@pytest.mark.parametrize(
    ("faulty", "problem"),
    [
        (half_written, "4 elements of a tensor are never written"),
        (read_between_rows, "8 addresses outside a tensor"),
        (left_out_of_a_load, "what a mask leaves out is used"),
        (copied_through_a_vector, "a mask goes through a vector"),
        (copied_unaligned, "not aligned"),
        (unaligned_later, "no multiples of 16"),
    ],
)
def test_a_fault_is_found(faulty, problem):
    """Faults whose results may look right all the same."""
    whole = torch.ones(2, 16)
    with pytest.raises(AssertionError, match=problem):
        gluon_on_cpu.run(types.SimpleNamespace(fn=faulty), (1, 1), (whole[:, :8], torch.ones(8)), (), {}, True)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_numbers_are_as_on_a_gpu_and_not_as_numpy_would_have_them():
    """Integers beside fp32 stay fp32, bf16 stays bf16, integers are divided towards zero, signs do not mix."""
    step, third = Tile(np.int32(-1)), Tile(np.float32(1)) / Tile(np.int32(3))
    assert third.dtype == FLOAT32
    assert third.data == np.float32(1) / np.float32(3)
    assert (int(step % 8), int(step // 8), int(7 // Tile(np.int32(-2)))) == (-1, 0, -3)
    brain = Tile(np.float32(1.0)).to(BFLOAT16)
    assert (brain + Tile(np.float32(2**-8)).to(BFLOAT16)).data == 1
    assert (brain + Tile(np.float32(2**-8))).data == 1 + 2**-8
    with pytest.raises(AssertionError, match="signed and unsigned"):
        _ = step + Tile(np.uint32(1))
