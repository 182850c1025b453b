"""Rows that do not start on 16 bytes, on a card: which kernels take them, that they are right, that bits stay."""

import pytest
import torch
import triton
from plans import where_launches_fail
from test_fused import draw, judge, run
from triton.compiler.errors import CompilationError

from rmsnorm_cli.kernels import backplan, frontplan, fused
from rmsnorm_cli.kernels.frontplan import VIEWING, takes_unaligned
from rmsnorm_cli.kernels.geometry import Backward, Forward, window
from rmsnorm_cli.kernels.rowlayout import alignment, describe
from rmsnorm_cli.kernels.tables import backward_unaligned, forward_unaligned

TAKEN = triton.__version__.startswith(VIEWING)
WIDTHS = [64, 65, 67, 127, 257, 513, 769, 1000, 1025, 1537, 2050, 3073, 4096, 4099, 6145, 8188, 8191, 12289, 16383]


def shifted(tensor, first):
    """Return the same rows, contiguous, from a number further on in memory."""
    memory = torch.empty(tensor.numel() + first, dtype=tensor.dtype, device=tensor.device)
    return memory[first:].view(tensor.shape).copy_(tensor)


def test_what_these_kernels_do_not_take(device, monkeypatch):
    """Rows in whole vectors, strided columns, rows that share memory, float64, too small a card, the interpreter."""
    base = torch.zeros(6, 2 * 4100 + 8, dtype=torch.bfloat16, device=device)
    cases = {
        "plain": (base[:, :4096], False),
        "off": (base[:, 1:4097], True),
        "odd": (base[:, :4099], True),
        "strided": (base[:, : 2 * 4099 : 2], False),
        "expanded": (base[:1, :4099].expand(6, 4099), False),
        "overlapping": (base.view(-1).as_strided((6, 4099), (1, 1)), False),
        "overlapping in one of two": (base.view(-1).as_strided((2, 3, 4099), (1, 8300, 1)), False),
        "double": (torch.zeros(6, 4099, dtype=torch.float64, device=device), False),
    }
    memory = 227
    monkeypatch.setattr(frontplan, "shared_memory", lambda _: memory * 1024)
    for name, (x, wanted) in cases.items():
        config = backward_unaligned(x.shape[-1], x.element_size())
        rows = [describe(x, tuple(range(x.dim() - 1)))]
        align = alignment(x.shape[-1], [(x, rows[0])])
        assert takes_unaligned(config, align, rows, x) is (wanted and TAKEN and x.is_cuda), name
        memory = 16
        assert not takes_unaligned(config, align, rows, x), name
        memory = 227


@pytest.mark.parametrize(
    "problem",
    [CompilationError("", None, "Gluon has no such name"), RuntimeError("error encountered during parsing")],
    ids=["compile", "verify"],
)
def test_a_triton_that_does_not_compile_them_takes_the_other_paths(problem, device, monkeypatch):
    """Many rows and few: the results are there, by the kernels that any Triton compiles."""
    for module in (frontplan, backplan):
        monkeypatch.setattr(module, "multiprocessors", lambda _: 132)
    for M in (5, 300):
        x, gamma, dy = draw(M, 257, torch.float32, device)
        launches = [kind("unaligned", *window(257, 4), warps=2, per_sm=1) for kind in (Forward, Backward)]
        paths, results = where_launches_fail(problem, monkeypatch, x, gamma, dy, *launches)
        assert paths == ("forward/rows", "backward/small" if M == 5 else "backward/walk")
        judge(x, gamma, dy, *results)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("N", WIDTHS)
def test_as_float64_wherever_rows_start(N, dtype, device):
    """One row, few, many; x and dy shifted apart: right up to the roundings, by the path that the tables name."""
    itemsize = dtype.itemsize
    for M, x_first, dy_first in ((1, 1, 0), (3, 0, 3), (300, 1, 2), (2500, 3, 1)):
        x, gamma, dy = draw(M, N, dtype, device)
        x, dy = shifted(x, x_first), shifted(dy, dy_first)
        fused.reset_launched()
        judge(x, gamma, dy, *run(x, gamma, dy))
        if TAKEN and backward_unaligned(N, itemsize) is not None:
            few = M <= 256 and M * N <= 2**18
            assert fused.launched()["backward/small" if few else "backward/unaligned"] == 1
        if TAKEN and forward_unaligned(N, itemsize) is not None and (N % 2 or x_first % 2):
            assert fused.launched()["forward/unaligned"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("N", [67, 257, 769, 1025, 2049, 4099, 8191, 12289])
def test_a_row_keeps_its_bits_wherever_it_starts_and_in_any_batch(N, dtype, device):
    """Shifted, alone, among few or many, and again: the same y and dx, and the same dgamma of the same rows."""
    x, gamma, dy = draw(1500, N, dtype, device)
    y, dx, dgamma = run(x, gamma, dy)
    for first in (0, 1, 2, 5):
        for got, want in zip(run(shifted(x, first), gamma, shifted(dy, first + 1)), (y, dx, dgamma), strict=True):
            assert torch.equal(got, want)
    for rows in (slice(0, 1), slice(700, 703), slice(1499, 1500), slice(10, 900)):
        part = run(x[rows], gamma, dy[rows])
        assert torch.equal(part[0], y[rows])
        assert torch.equal(part[1], dx[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("N", [257, 4099, 12289])
def test_layouts_and_partial_gradients(N, device):
    """Two row strides in memory of NaN, gamma in fp32, strided or none, and each gradient alone."""
    whole, gamma, gradient = draw(4 * 70 * 2, N + 6, torch.bfloat16, device)
    x = torch.full((4, 70, 2, N + 6), torch.nan, dtype=torch.bfloat16, device=device)[:, 1:60, 1, 3 : N + 3]
    dy = torch.full((4, 70, 2, N + 6), torch.nan, dtype=torch.bfloat16, device=device)[:, 1:60, 0, 4 : N + 4]
    x.copy_(whole.view(4, 70, 2, N + 6)[:, 1:60, 1, 3 : N + 3])
    dy.copy_(gradient.view(4, 70, 2, N + 6)[:, 1:60, 0, 4 : N + 4])
    gamma = gamma[:N].clone()
    _, rstd = fused.forward(x, gamma, 1e-6)
    fused.reset_launched()
    dx, dgamma = fused.backward(dy, x, gamma, rstd)
    few = x[..., 0].numel() <= 256 and x.numel() <= 2**18
    assert not TAKEN or fused.launched() == {"backward/small" if few else "backward/unaligned": 1}
    only_dx, none = fused.backward(dy, x, gamma, rstd, need_dgamma=False)
    assert none is None
    assert torch.equal(only_dx, dx)
    none, only_dgamma = fused.backward(dy, x, gamma, rstd, need_dx=False)
    assert none is None
    assert torch.equal(only_dgamma, dgamma)
    strided = torch.stack([gamma, gamma], 1)[:, 0]
    ones = torch.ones((), dtype=x.dtype, device=device).expand(x.shape)
    for weights, upstream in ((gamma, dy), (gamma.float(), dy), (None, dy), (strided, dy), (gamma, ones)):
        judge(x, weights, upstream, *run(x, weights, upstream))
