"""Rows that do not start on 16 bytes: their kernels run on the CPU, from their own source, wherever rows start."""

import random

import gluon_on_cpu
import pytest
import torch
from plans import in_place_of_a_card, through_plans
from test_fused import draw, judge

from rmsnorm_cli.kernels import frontplan, tables
from rmsnorm_cli.kernels.frontplan import takes_ring, takes_unaligned
from rmsnorm_cli.kernels.geometry import Backward, Forward, slot, unaligned_bytes, window
from rmsnorm_cli.kernels.rowlayout import alignment, describe, walking_order
from rmsnorm_cli.kernels.tables import backward_unaligned, forward_unaligned

FEW = 4


@pytest.fixture(params=[True, False], ids=["copies at once", "copies as late as they may"])
def on_cpu(request, monkeypatch):
    """Let the programs run on the CPU, of a card with three SMs: also on a machine that has a card. Few rows: 4."""
    monkeypatch.setattr(tables, "SMALL_ROWS", FEW)
    in_place_of_a_card(monkeypatch, lambda *launch: gluon_on_cpu.run(*launch, request.param, seed=request.param))


def launches(N, dtype, warps=1, stages=2, per_sm=1):
    """Return a forward and a backward launch."""
    return [
        kind("unaligned", *window(N, dtype.itemsize), warps=warps, stages=stages, per_sm=per_sm)
        for kind in (Forward, Backward)
    ]


def moved(tensor, first, gap=0):
    """Return the same rows in memory of NaN, `first` numbers after its start, `gap` numbers between two of them.

    Before the first and after the last lies nothing: the CPU's runner refuses an access there.
    """
    M, N = tensor.shape
    memory = torch.full((first + M * (N + gap) - gap,), torch.nan, dtype=tensor.dtype)
    rows = memory.as_strided((M, N), (N + gap, 1), first)
    return rows.copy_(tensor)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("M", [1, FEW, FEW + 1, 6, 7, 13])
@pytest.mark.parametrize(("N", "dtype"), [(65, torch.float16), (257, torch.bfloat16), (67, torch.float32)], ids=str)
def test_as_float64(N, dtype, M, stages, on_cpu):
    """One row, fewer than programs, as many, more than are on their way; few rows take one launch."""
    x, gamma, dy = draw(M, N, dtype, "cpu")
    judge(x, gamma, dy, *through_plans(x, gamma, dy, *launches(N, dtype, stages=stages)))


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize(("N", "gap"), [(64, 1), (67, 0), (67, 5), (100, 4), (104, 8)])
def test_rows_may_start_anywhere(N, gap, first, on_cpu):
    """X and dy start at every number of a vector, with and without others between rows: the same bits always."""
    x, gamma, dy = draw(6, N, torch.float16, "cpu")
    launch = launches(N, x.dtype)
    want = through_plans(x, gamma, dy, *launch)
    judge(x, gamma, dy, *want)
    got = through_plans(moved(x, first, gap), gamma, moved(dy, 3 * first, 8 - gap), *launch)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("warps", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_more_warps_two_tiles_and_no_mask(warps, dtype, on_cpu):
    """The last unit is full, or of one number, or of all but one; a row's vectors lie in one tile or in two."""
    unit = 32 * warps
    tiles = set()
    for N in (3 * unit - 1, 3 * unit, 3 * unit + 1, 4 * unit + 1):
        x, gamma, dy = draw(9, N, dtype, "cpu")
        launch = launches(N, dtype, warps=warps)
        tiles.add(launch[0].B > 0)
        judge(x, gamma, dy, *through_plans(moved(x, 1), gamma, moved(dy, 2), *launch))
    assert tiles == {True, False}


def test_layouts_and_each_gradient_alone(on_cpu):
    """Two row strides, gamma in fp32, strided or none, a frozen x, a frozen gamma: the same bits where they are due."""
    N, dtype = 99, torch.float16
    whole, gamma, gradient = draw(4 * 7 * 5, N + 6, dtype, "cpu")
    x = whole.view(4, 7, 5, N + 6)[1, 1:6, 1:4, 3 : N + 3]
    dy = gradient.view(4, 7, 5, N + 6)[1:4, 1, :, 4 : N + 4]
    dy = dy.transpose(0, 1)
    gamma = gamma[:N].clone()
    launch = launches(N, dtype)
    plain = through_plans(x.contiguous(), gamma, dy.contiguous(), *launch)
    for got, want in zip(through_plans(x, gamma, dy, *launch), plain, strict=True):
        assert torch.equal(got, want)
    y, dx, none = through_plans(x, gamma, dy, *launch, need_dgamma=False)
    assert none is None
    assert torch.equal(y, plain[0])
    assert torch.equal(dx, plain[1])
    y, none, dgamma = through_plans(x, gamma, dy, *launch, need_dx=False)
    assert none is None
    assert torch.equal(dgamma, plain[2])
    for weights in (gamma.float(), torch.stack([gamma, gamma], 1)[:, 0], None):
        needs = {"need_dgamma": weights is not None}
        judge(x, weights, dy, *through_plans(x, weights, dy, *launch, **needs))


@pytest.mark.parametrize("M", [FEW, 11])
def test_a_row_keeps_its_bits_in_any_batch(M, on_cpu):
    """Alone, among few rows (one launch) or many: the same y and dx."""
    N = 161
    x, gamma, dy = draw(M, N, torch.float16, "cpu")
    launch = launches(N, x.dtype, stages=3)
    y, dx, _ = through_plans(x, gamma, dy, *launch)
    for at in (0, M // 2, M - 1):
        alone = through_plans(x[at : at + 1], gamma, dy[at : at + 1], *launch)
        assert torch.equal(alone[0][0], y[at])
        assert torch.equal(alone[1][0], dx[at])


def test_a_row_too_wide_for_registers_is_read_again(on_cpu, monkeypatch):
    """Past the columns that a program carries, from shared memory: the same bits."""
    N = 131
    x, gamma, dy = draw(10, N, torch.float16, "cpu")
    kept = through_plans(x, gamma, dy, *launches(N, x.dtype))
    monkeypatch.setattr("rmsnorm_cli.kernels.tables.KEPT_COLUMNS", 130)
    again = through_plans(x, gamma, dy, *launches(N, x.dtype))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def scattered(chance, shape, dtype):
    """Return rows at strides that may let them overlap, or lie in another order than that of their dimensions.

    NaN lies before the first number, nothing behind the last.
    """
    *leading, N = shape
    vector = 16 // dtype.itemsize
    choices = (0, 1, vector - 1, vector, vector + 1, N // 2, N - 1, N, N + 1, N + vector - N % vector, 2 * N + 3)
    strides = [chance.choice(choices) for _ in leading]
    first = chance.randrange(2 * vector)
    reach = sum((size - 1) * stride for size, stride in zip(leading, strides, strict=True)) + N
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    memory = torch.cat([torch.full((first,), torch.nan), torch.randn(reach, generator=generator)]).to(dtype)
    return memory.as_strided(shape, (*strides, 1), first)


def test_whatever_rows_are_taken_lie_within_their_tensor(on_cpu, monkeypatch):
    """Of drawn strides some are refused; the CPU's runner sees that no vector of the others reaches out."""
    monkeypatch.setattr(frontplan, "shared_memory", lambda _: 227 * 1024)
    monkeypatch.setattr(frontplan, "VIEWING", ("3.",))
    chance = random.Random(20)
    answers = {True: 0, False: 0}
    while answers[True] < 60:
        dtype = chance.choice([torch.float16, torch.bfloat16, torch.float32])
        shape = (*(chance.choice([1, 1, 2, 3, 4]) for _ in range(chance.randrange(4))), chance.choice([64, 65, 72, 99]))
        x, dy = scattered(chance, shape, dtype), scattered(chance, shape, dtype)
        order = walking_order(x)
        if order is None or describe(dy, order) is None:
            continue
        lies = [describe(tensor, order) for tensor in (x, dy)]
        launch = launches(shape[-1], dtype, warps=chance.choice([1, 2]), stages=chance.choice([1, 2, 3]))
        align = alignment(shape[-1], list(zip((x, dy), lies, strict=True)))
        taken = takes_unaligned(launch[1], align, lies, x) and takes_unaligned(launch[0], align, lies[:1], x)
        answers[taken] += 1
        if taken:
            gamma = torch.ones(shape[-1], dtype=dtype)
            judge(x.contiguous(), gamma, dy.contiguous(), *through_plans(x, gamma, dy, *launch))
    assert answers[False] > 20


@pytest.mark.parametrize(("capability", "taken"), [((7, 5), False), ((8, 0), True), ((12, 0), True)], ids=str)
def test_cards_without_asynchronous_copies_keep_the_other_paths(capability, taken, on_cpu, monkeypatch):
    """The compiler would not refuse them for a Turing card: it ends the process."""
    monkeypatch.setattr(frontplan, "shared_memory", lambda _: 64 * 1024)
    monkeypatch.setattr(frontplan, "VIEWING", ("3.",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    x = torch.zeros(3, 257, dtype=torch.float16)
    lie = describe(x, (0,))
    assert takes_unaligned(backward_unaligned(257, 2), 1, [lie], x) is taken
    assert takes_ring(x, 8, [lie]) is taken


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("N", [64, 257, 511, 769, 1025, 2049, 3073, 4099, 6145, 8191, 12289, 16383])
def test_the_tables_launches_hold_what_they_copy_and_fit_on_an_sm(N, itemsize):
    """A slot holds the vectors of a row that starts at a vector's last number, and every unit that is read there."""
    for config, tensors in ((forward_unaligned(N, itemsize), 1), (backward_unaligned(N, itemsize), 2)):
        if config is None:
            continue
        vector, unit = 16 // itemsize, 32 * config.warps
        reach = vector - 1 + N
        assert -(-reach // vector) * vector <= config.A + config.B
        assert slot(config, N, itemsize) >= max(config.A + config.B, vector - 1 + -(-N // unit) * unit)
        assert slot(config, N, itemsize) % vector == 0
        assert config.per_sm * (unaligned_bytes(config, N, itemsize, tensors) + 1024) <= 228 * 1024
        assert config.per_sm * config.warps <= 64
        if config.B:
            assert config.B * itemsize % 16 == 0


def test_shared_memory_is_what_the_tables_count_on(monkeypatch):
    """As many bytes as `unaligned_bytes` says."""
    taken = []
    monkeypatch.setattr(tables, "SMALL_ROWS", FEW)
    in_place_of_a_card(monkeypatch, lambda *launch: taken.append(gluon_on_cpu.run(*launch, True)))
    for N, dtype in ((67, torch.float16), (260, torch.float32)):
        x, gamma, dy = draw(FEW + 1, N, dtype, "cpu")
        taken.clear()
        forward, backward = launches(N, dtype, stages=3)
        through_plans(x, gamma, dy, forward, backward)
        itemsize, scratch = dtype.itemsize, 1024
        assert taken == [
            unaligned_bytes(forward, N, itemsize, 1) - scratch - 4 * 3,  # rstd is written there, not read
            unaligned_bytes(backward, N, itemsize, 2) - scratch,
        ]
