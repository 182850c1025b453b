"""The kernels of the ring run on the CPU, from their own source: schedule, masks, shared rows, every layout."""

import gluon_on_cpu
import pytest
import torch
from plans import in_place_of_a_card, through_plans
from test_fused import draw, judge

from rmsnorm_cli.kernels.geometry import Backward, Forward, divided, whole_pieces


@pytest.fixture(params=[True, False], ids=["copies at once", "copies as late as they may"])
def on_cpu(request, monkeypatch):
    """Let programs of the ring run on the CPU, of a card with three SMs: also on a machine that has a card."""
    in_place_of_a_card(monkeypatch, lambda *launch: gluon_on_cpu.run(*launch, request.param, seed=request.param))


SCHEDULES = [
    # N, A, stages, lag: what of a ring they are
    (256, 256, 1, 0),  # one piece, one row
    (256, 256, 3, 0),
    (512, 512, 2, 0),  # all pieces whole
    (704, 768, 3, 0),  # the last piece is masked
    (704, 768, 4, 0),  # one piece has a row more
    (704, 768, 5, 0),
    (704, 768, 8, 0),  # two rows and two pieces
    (1000, 512, 2, 0),  # two programs share a row, the second owns less
    (1000, 512, 4, 1),
    (1000, 512, 5, 1),  # and one piece a row more
    (1536, 512, 6, 2),  # three programs
    (1400, 512, 7, 2),
    (1400, 512, 8, 3),
    (1400, 512, 9, 3),
]


@pytest.mark.parametrize("M", [1, 2, 13])
@pytest.mark.parametrize(("N", "A", "stages", "lag"), SCHEDULES)
def test_every_schedule_gives_what_float64_gives(N, A, stages, lag, M, on_cpu, device):
    """One row, fewer rows than the ring holds, and more steps than a group keeps words."""
    x, gamma, dy = draw(M, N, torch.float16, "cpu")
    launches = [kind("ring", A, warps=1, stages=stages, per_sm=1, lag=lag) for kind in (Forward, Backward)]
    judge(x, gamma, dy, *through_plans(x, gamma, dy, *launches))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("warps", [1, 2, 8, 16])
def test_other_dtypes_and_more_warps(dtype, warps, on_cpu):
    """A piece is 16 bytes a thread, whatever the dtype and however many warps."""
    chunk = 512 * warps // dtype.itemsize
    N = 3 * chunk - 64
    x, gamma, dy = draw(7, N, dtype, "cpu")
    launches = [kind("ring", 2 * chunk, warps=warps, stages=5, per_sm=1, lag=1) for kind in (Forward, Backward)]
    judge(x, gamma, dy, *through_plans(x, gamma, dy, *launches))


def test_layouts_and_each_gradient_alone(on_cpu):
    """Two row strides, a slice, gamma in fp32, strided or none, and no dgamma: the same bits where nothing is added."""
    N = 1000
    launches = [kind("ring", 512, warps=1, stages=5, per_sm=1, lag=1) for kind in (Forward, Backward)]
    whole, gamma, gradient = draw(4 * 7 * 2, N + 64, torch.float16, "cpu")
    x = whole.view(4, 7, 2, N + 64)[:, 1:6, 1, 8 : N + 8]
    dy = gradient.view(4, 7, 2, N + 64)[:, 1:6, 0, 16 : N + 16]
    gamma = gamma[:N].clone()
    plain = through_plans(x.contiguous(), gamma, dy.contiguous(), *launches)
    for got, want in zip(through_plans(x, gamma, dy, *launches), plain, strict=True):
        assert torch.equal(got, want)
    y, dx, none = through_plans(x, gamma, dy, *launches, need_dgamma=False)
    assert none is None
    assert torch.equal(y, plain[0])
    assert torch.equal(dx, plain[1])
    for weights in (gamma.float(), torch.stack([gamma, gamma], 1)[:, 0], None):
        needs = {"need_dgamma": weights is not None}
        judge(x, weights, dy, *through_plans(x, weights, dy, *launches, **needs))


def test_a_row_keeps_its_bits_in_any_batch(on_cpu):
    """Where a row sits in a batch, and in which slot of the ring, is not seen in y or dx."""
    launches = [kind("ring", 512, warps=1, stages=7, per_sm=1, lag=2) for kind in (Forward, Backward)]
    x, gamma, dy = draw(11, 1400, torch.float16, "cpu")
    y, dx, _ = through_plans(x, gamma, dy, *launches)
    for at in (0, 5, 10):
        alone = through_plans(x[at : at + 1].clone(), gamma, dy[at : at + 1].clone(), *launches)
        assert torch.equal(alone[0][0], y[at])
        assert torch.equal(alone[1][0], dx[at])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("N", [*range(16392, 60000, 1112), 131072, 200008])
def test_parts_begin_with_a_line_of_memory_and_whole_pieces_are_whole(N, itemsize):
    """No two programs write to one line of 128 bytes; a piece without a mask lies in the columns of every program."""
    for config in (Forward("ring", 12288, warps=8, stages=28), Backward("ring", 16384, warps=16, stages=14)):
        parts, width, pieces = divided(config, N, itemsize)
        whole = whole_pieces(config, N, itemsize)
        assert parts == 1 or width * itemsize % 128 == 0
        assert 0 <= whole <= pieces
        for part in range(parts):
            assert min(width, N - part * width) * itemsize >= whole * 512 * config.warps
