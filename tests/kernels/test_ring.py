"""Rows that pass through a ring in shared memory: which do, that they are right, and what serves where they cannot."""

import pytest
import torch
from plans import where_launches_fail
from test_fused import draw, judge, run
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from rmsnorm_cli.kernels import backplan, frontplan, fused
from rmsnorm_cli.kernels.frontplan import ForwardPlan, holds_ring, takes_ring
from rmsnorm_cli.kernels.geometry import Backward, Forward, divided, ring_bytes
from rmsnorm_cli.kernels.rowlayout import alignment, describe
from rmsnorm_cli.kernels.tables import backward_table, forward_table

HOPPER = 227 * 1024  # bytes of shared memory that one program may have; an SM has one KiB more, and takes one a program
WIDTHS = [
    *range(10248, 50000, 1000),
    32768,
    33000,
    40960,
    47104,
    49152,
    65536,
    65544,
    98312,
    131072,
    200000,
    2**18,
    2**20,
]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("N", WIDTHS)
def test_the_parts_of_a_row_cover_it_once(N, itemsize):
    """Each program's columns start inside the row, all together reach its end, and its pieces hold them."""
    for config in (forward_table(N, itemsize, ring=True), backward_table(N, itemsize, ring=True)):
        if config.path == "ring":
            parts, width, pieces = divided(config, N, itemsize)
            assert (parts - 1) * width < N <= parts * width
            assert width <= config.A
            assert width * itemsize % 16 == 0
            assert (pieces - 1) * config.warps * 512 < width * itemsize <= pieces * config.warps * 512


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("N", WIDTHS)
def test_rings_fit_on_an_sm(N, itemsize):
    """All programs of an SM have room for their rows and registers, and for one row more than those that wait."""
    for config, tensors in ((forward_table(N, itemsize, ring=True), 1), (backward_table(N, itemsize, ring=True), 2)):
        if config.path == "ring":
            parts, _, pieces = divided(config, N, itemsize)
            assert config.per_sm * ring_bytes(config, tensors) <= HOPPER + 1024
            assert config.stages // pieces > (config.lag if parts > 1 else 0)
            assert config.lag <= 3, "the words of a step would be overwritten too early"
            assert config.per_sm * config.warps * 32 * (config.registers or 0) <= 65536
            assert parts <= 132 * config.per_sm


def test_what_a_ring_does_not_take(device):
    """Strided columns, rows that start off 16 bytes, float64, the interpreter: these keep the other paths."""
    base = torch.zeros(4, 2 * 16384 + 8, dtype=torch.bfloat16, device=device)
    cases = {
        "plain": base[:, :16384],
        "strided": base[:, :32768:2],
        "off": base[:, 1:16385],
        "double": torch.zeros(4, 16384, dtype=torch.float64, device=device),
    }
    taken = {}
    for name, x in cases.items():
        rows = describe(x, (0,))
        taken[name] = takes_ring(x, alignment(16384, [(x, rows)]), [rows])
    assert taken == {"plain": x.is_cuda, "strided": False, "off": False, "double": False}


def test_too_small_a_card_keeps_the_other_paths(device, monkeypatch):
    """A ring that needs more shared memory than a program may have is not begun."""
    x = torch.zeros(4, 20480, dtype=torch.bfloat16, device=device)
    config = backward_table(20480, 2, ring=True)
    for module in (frontplan, backplan):
        monkeypatch.setattr(module, "multiprocessors", lambda _: 132)
    for kib, enough in ((227, True), (163, False), (99, False)):
        monkeypatch.setattr(frontplan, "shared_memory", lambda _, kib=kib: kib * 1024)
        assert holds_ring(config, 20480, 2, x) is enough


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch"),
        OutOfResources(196672, 101376, "shared memory"),
        CompilationError("", None, "Gluon has no such name"),
        RuntimeError("error encountered during parsing"),
        RuntimeError("PassManager::run failed"),
    ],
    ids=["cooperative", "memory", "compile", "verify", "passes"],
)
def test_a_refused_ring_takes_the_other_path(problem, device, monkeypatch):
    """A card, or a Triton, that will not run the ring gives the same results by the path that is there without it."""
    x, gamma, dy = draw(300, 300, torch.float32, device)
    launches = [kind("ring", 512, warps=4, stages=2) for kind in (Forward, Backward)]
    paths, results = where_launches_fail(problem, monkeypatch, x, gamma, dy, *launches)
    assert paths == ("forward/rows", "backward/walk")
    judge(x, gamma, dy, *results)


@pytest.mark.parametrize(
    "problem",
    [CompilationError("", None, "no such name"), RuntimeError("error encountered during parsing")],
    ids=["compile", "verify"],
)
def test_a_kernel_that_does_not_compile_is_no_refusal(problem, device, monkeypatch):
    """Only what is written in Gluon may fail to compile without a word: any other kernel's error is raised."""
    x, gamma, _ = draw(5, 300, torch.float32, device)
    plan = ForwardPlan(x, gamma)

    def fail(*_):
        raise problem

    monkeypatch.setattr(plan.program, "launch", fail)
    with pytest.raises(type(problem)):
        plan.run(x, gamma, 1e-6)


def test_a_ring_may_fail_at_other_things_aloud(device, monkeypatch):
    """What a launch meets on a card, such as an address that is not there, is no reason to launch something else."""
    x, gamma, _ = draw(5, 300, torch.float32, device)
    monkeypatch.setattr(frontplan, "multiprocessors", lambda _: 132)
    plan = ForwardPlan(x, gamma)
    plan._choose(Forward("ring", 512, warps=4, stages=2), x)

    def fail(*_):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(plan.program, "launch", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        plan.run(x, gamma, 1e-6)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "N", [12304, 14336, 16384, 16392, 20480, 24576, 32768, 33000, 40960, 65536, 98304, 98312, 131072, 200000, 2**18]
)
def test_through_the_ring_as_float64(N, dtype, device):
    """One row, fewer rows than groups of programs, and more than the ring holds: right up to the roundings."""
    for M in (1, 3, 300):
        x, gamma, dy = draw(M, N, dtype, device)
        fused.reset_launched()
        judge(x, gamma, dy, *run(x, gamma, dy))
        itemsize = x.element_size()
        ringed = {"forward": forward_table(N, itemsize, ring=True), "backward": backward_table(N, itemsize, ring=True)}
        for way, config in ringed.items():
            assert config.path != "ring" or fused.launched()[f"{way}/ring"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("N", [16384, 20480, 40960, 73728, 131072])
def test_layouts_and_partial_gradients_through_the_ring(N, device):
    """Two row strides, a slice, an expanded dy, gamma in fp32, strided or none, and each gradient alone."""
    whole, gamma, gradient = draw(4 * 7 * 2, N + 64, torch.bfloat16, device)
    x = whole.view(4, 7, 2, N + 64)[:, 1:6, 1, 8 : N + 8]  # two strides between rows, no row at their common start
    dy = gradient.view(4, 7, 2, N + 64)[:, 1:6, 0, 16 : N + 16]
    gamma = gamma[:N]
    plain_x, plain_dy = x.contiguous(), dy.contiguous()
    _, rstd = fused.forward(plain_x, gamma, 1e-6)
    plain_dx, plain_dgamma = fused.backward(plain_dy, plain_x, gamma, rstd)
    fused.reset_launched()
    dx, dgamma = fused.backward(dy, x, gamma, rstd)
    assert fused.launched() == {"backward/ring": 1}
    assert torch.equal(dx, plain_dx)
    assert torch.equal(dgamma, plain_dgamma)
    only_dx, none = fused.backward(dy, x, gamma, rstd, need_dgamma=False)
    assert none is None
    assert torch.equal(only_dx, plain_dx)
    none, only_dgamma = fused.backward(dy, x, gamma, rstd, need_dx=False)
    assert none is None
    torch.testing.assert_close(only_dgamma.float(), plain_dgamma.float(), atol=1e-2, rtol=1e-2)
    strided = torch.stack([gamma, gamma], 1)[:, 0]
    ones = torch.ones((), dtype=x.dtype, device=device).expand(x.shape)  # strides of 0: not through the ring
    for weights, upstream in ((gamma, dy), (gamma.float(), dy), (None, dy), (strided, dy), (gamma, ones)):
        judge(x, weights, upstream, *run(x, weights, upstream))


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N"), [(400, 20480), (97, 65536), (400, 131072), (200, 262144)])
def test_shared_rows_repeat_and_keep_their_bits(M, N, device):
    """More steps than words in a group's ring: the same bits each time, and for a row alone."""
    x, gamma, dy = draw(M, N, torch.bfloat16, device)
    y, dx, dgamma = run(x, gamma, dy)
    for _ in range(20):
        again = run(x, gamma, dy)
        assert all(torch.equal(a, b) for a, b in zip(again, (y, dx, dgamma), strict=True))
    for at in (0, M // 2, M - 1):
        alone = run(x[at : at + 1].clone(), gamma, dy[at : at + 1].clone())
        assert torch.equal(alone[0][0], y[at])
        assert torch.equal(alone[1][0], dx[at])
