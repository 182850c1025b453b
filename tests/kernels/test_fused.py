"""The fused kernels: right in every dtype, width and launch path, deterministic, and independent of the batch."""

import pytest
import torch
from plans import where_launches_fail
from triton.runtime.errors import OutOfResources

from rmsnorm_cli.kernels import ContractError, backplan, fused, reference, rms_norm, tables
from rmsnorm_cli.kernels.backplan import BackwardPlan
from rmsnorm_cli.kernels.contract import INTERPRETED
from rmsnorm_cli.kernels.frontplan import ForwardPlan
from rmsnorm_cli.kernels.geometry import Backward, Forward
from rmsnorm_cli.kernels.tables import column_sum_table

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float64: 2**-53}


def draw(M: int, N: int, dtype: torch.dtype, device: str, gamma_dtype: torch.dtype | None = None):
    """Return x with rows of rms 1e-2 to 30, gamma of both signs and dy of a mean loss, rounded to their dtypes."""
    generator = torch.Generator().manual_seed(1000 * M + N)
    scales = torch.logspace(-2, 1.5, M, dtype=torch.float64)[torch.randperm(M, generator=generator)]
    x = scales[:, None] * torch.randn(M, N, generator=generator, dtype=torch.float64)
    gamma = torch.randn(N, generator=generator, dtype=torch.float64)
    dy = torch.randn(M, N, generator=generator, dtype=torch.float64) / M**0.5
    return x.to(device, dtype), gamma.to(device, gamma_dtype or dtype), dy.to(device, dtype)


def excess(got, want, reference_size, dtype):
    """Return the largest error over what one rounding to dtype and the arithmetic's own roundings explain."""
    store = UNIT[dtype] * (2 if INTERPRETED and dtype == torch.bfloat16 else 1)  # the interpreter truncates to bf16
    own = 16 * UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    smallest = 2.0**-24 if dtype == torch.float16 else 0.0  # half of fp16's subnormal spacing
    limit = store * want.abs() + own * reference_size + smallest
    return float(((got.double() - want).abs() / limit).max())


def judge(x, gamma, dy, y, dx, dgamma, eps=1e-6):
    """Assert that results are as float64's of the same inputs, up to the roundings that must be."""
    X, D = x.double(), dy.double()
    G = torch.ones_like(X[0]) if gamma is None else gamma.double()
    rstd = reference.statistics(X, eps)
    x_hat, u = X * rstd, D * G
    want_y = reference.forward(X, G, eps)
    want_dx, want_dgamma = reference.backward(D, X, G, eps)
    size = rstd * (u.abs() + x_hat.abs() * (u * x_hat).abs().mean(-1, keepdim=True))
    assert (y.shape, y.dtype, dx.shape, dx.dtype) == (x.shape, x.dtype, x.shape, x.dtype)
    assert excess(y, want_y, want_y.abs(), x.dtype) <= 1
    assert excess(dx, want_dx, size, x.dtype) <= 1
    if gamma is not None:
        assert (dgamma.shape, dgamma.dtype) == (gamma.shape, gamma.dtype)
        sums = (D * x_hat).abs().reshape(-1, x.shape[-1]).sum(0)
        assert excess(dgamma, want_dgamma, sums, gamma.dtype) <= 1


def run(x, gamma, dy, eps=1e-6):
    y, rstd = fused.forward(x, gamma, eps)
    return y, *fused.backward(dy, x, gamma, rstd)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 2, 3, 31, 33, 127, 256, 257, 1000, 1023, 1025, 4096, 5000])
@pytest.mark.parametrize("M", [1, 19])
def test_as_float64_up_to_the_roundings_that_must_be(M, N, dtype, device):
    """y, dx and dgamma differ from float64's by one rounding at the store and a few of the arithmetic."""
    x, gamma, dy = draw(M, N, dtype, device)
    judge(x, gamma, dy, *run(x, gamma, dy))


@pytest.mark.parametrize("N", [1, 257, 512, 1024, 2048, 4096, 8192, 16384, 20480, 131072])
def test_y_has_the_same_bits_where_rstd_is_not_kept(N, device):
    """Without a derivative to come, rows that are read once keep no rstd, nor the memory for it; y is the same."""
    x, gamma, _ = draw(5, N, torch.bfloat16, device)
    y, rstd = fused.forward(x, gamma, 1e-6)
    alone, none = fused.forward(x, gamma, 1e-6, need_rstd=False)
    assert torch.equal(y, alone)
    assert rstd.shape == (5,)
    assert (none is None) == (N <= 8192), "wide rows, which do not feel it, keep it all the same"


@pytest.mark.parametrize("N", [8191, 12000, 16384, 20480, 32768, 65537, 131072])
def test_wide_rows(N, device):
    """Rows that do not fit in registers, and rows that several programs would share, are as right as narrow ones."""
    x, gamma, dy = draw(3, N, torch.float16, device)
    judge(x, gamma, dy, *run(x, gamma, dy))


@pytest.mark.parametrize("M", [255, 257, 531])
def test_many_rows(M, device):
    """Programs that walk several tiles, the last of which hangs over the end, leave out no row and add none twice."""
    x, gamma, dy = draw(M, 96, torch.float32, device)
    judge(x, gamma, dy, *run(x, gamma, dy))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp32_gamma_beside_16_bit_x(dtype, device):
    """Y and dx have x's dtype, dgamma gamma's, summed and stored in fp32."""
    x, gamma, dy = draw(21, 257, dtype, device, torch.float32)
    judge(x, gamma, dy, *run(x, gamma, dy))


@pytest.mark.parametrize("N", [40, 5000, 20000, 70000])
def test_what_is_not_needed_is_not_computed(N, device):
    """Without dgamma, without dx, without gamma: the rest is the same, and what was not asked for is None."""
    x, gamma, dy = draw(5, N, torch.float32, device)
    _, rstd = fused.forward(x, gamma, 1e-6)
    dx, dgamma = fused.backward(dy, x, gamma, rstd)
    only_dx, no_dgamma = fused.backward(dy, x, gamma, rstd, need_dgamma=False)
    no_dx, only_dgamma = fused.backward(dy, x, gamma, rstd, need_dx=False)
    assert no_dx is None
    assert no_dgamma is None
    torch.testing.assert_close(only_dx, dx, atol=0, rtol=1e-5)
    torch.testing.assert_close(only_dgamma, dgamma, atol=1e-6, rtol=1e-5)
    judge(x, None, dy, *run(x, None, dy))


# --- every path, wherever the tables would send the call --------------------------------------------------------------

FORWARDS = [
    Forward("rows", 512, 0, 4, 4),
    Forward("rows", 256, 64, 2, 4),
    Forward("rows", 512, 0, 1, 4),
    Forward("reload", 256, 64, 1, 4),
    Forward("loop", 64, stages=2),
    Forward("shared", 512, stages=2, per_sm=1),
]
BACKWARDS = [
    Backward("walk", 512, 0, 4, 4),
    Backward("walk", 256, 64, 2, 4),
    Backward("walk", 256, 64, 1, 4),
    Backward("reload", 512, 0, 1, 4),
    Backward("reload", 256, 64, 1, 4),
    Backward("chunks", 64, stages=2),
    Backward("shared", 512, stages=2, per_sm=1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [300, 320])
@pytest.mark.parametrize("config", FORWARDS, ids=lambda config: f"{config.path}-{config.A}-{config.B}-{config.rows}")
def test_every_forward_path(config, N, dtype, device):
    """Each path alone gives y and rstd, with and without a rest of columns, and with rows beyond one tile."""
    x, gamma, dy = draw(21, N, dtype, device)
    plan = ForwardPlan(x, gamma)
    plan._choose(config, x)
    y, rstd, path = plan.run(x, gamma, 1e-6)
    assert path == f"forward/{config.path}"
    torch.testing.assert_close(rstd.double(), reference.statistics(x.double(), 1e-6).flatten(), atol=0, rtol=1e-6)
    judge(x, gamma, dy, y, *run(x, gamma, dy)[1:])


@pytest.mark.parametrize("few", [16, 256])
@pytest.mark.parametrize("N", [300, 320])
@pytest.mark.parametrize("config", BACKWARDS, ids=lambda config: f"{config.path}-{config.A}-{config.B}-{config.rows}")
def test_every_backward_path(config, N, few, device, monkeypatch):
    """Each path alone gives dx and dgamma: few rows in one launch, many in a walk whose last tile hangs over."""
    monkeypatch.setattr(tables, "SMALL_ROWS", few)
    x, gamma, dy = draw(21, N, torch.float32, device)
    y, rstd = fused.forward(x, gamma, 1e-6)
    plan = BackwardPlan(dy, x, gamma, (0,), True, True)
    plan._choose(config)
    dx, dgamma, path = plan.run(dy, x, gamma, rstd)
    assert path == ("backward/small" if config.path == "walk" and few > 21 else f"backward/{config.path}")
    judge(x, gamma, dy, y, dx, dgamma)


def test_x_is_told_to_stay_in_the_cache_where_it_is_much_and_bits_do_not_show_it(device):
    """One row less than 4 MiB of x is not told so, and has the same bits."""
    x, gamma, _ = draw(128, 8192, torch.float32, device)
    few = x[:127]
    assert [ForwardPlan(rows, gamma).program.constants["STAY"] for rows in (x, few)] == [True, False]
    assert torch.equal(fused.forward(x, gamma, 1e-6)[0][:127], fused.forward(few, gamma, 1e-6)[0])


def test_rows_that_start_off_a_vector_are_not_read_twice(device):
    """Reading a row a second time is only cheap by whole vectors; the result is the same up to rounding."""
    x, gamma, dy = draw(5, 16384, torch.bfloat16, device)
    off = torch.empty(x.numel() + 2, dtype=x.dtype, device=device)[2:].view(x.shape).copy_(x)
    paths = []
    for rows in (x, off):
        fused.reset_launched()
        judge(rows, gamma, dy, *run(rows, gamma, dy))
        paths += [path for path in fused.launched() if path.startswith("forward")]
    assert paths == ["forward/reload", "forward/rows"]


def test_a_refused_cooperative_launch_takes_the_path_without_waiting(device, monkeypatch):
    """A card that cannot hold all programs at once gives the same results by chunks, and the path's name says so."""
    x, gamma, dy = draw(5, 300, torch.float32, device)
    problem = RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
    paths, results = where_launches_fail(problem, monkeypatch, x, gamma, dy, FORWARDS[-1], BACKWARDS[-1])
    assert paths == ("forward/loop", "backward/chunks")
    judge(x, gamma, dy, *results)


def test_a_program_too_large_for_the_card_takes_the_path_without_waiting(device, monkeypatch):
    """A card with less shared memory than the table counts on gives the same results by chunks."""
    x, gamma, dy = draw(300, 300, torch.float32, device)
    y, rstd = fused.forward(x, gamma, 1e-6)
    plan = BackwardPlan(dy, x, gamma, (0,), True, True)

    def refuse(*_):
        raise OutOfResources(131144, 101376, "shared memory")

    monkeypatch.setattr(plan.main, "launch", refuse)
    dx, dgamma, path = plan.run(dy, x, gamma, rstd)
    assert path == "backward/chunks"
    judge(x, gamma, dy, y, dx, dgamma)


def test_any_other_launch_failure_is_raised(device, monkeypatch):
    """Only the refusal of a cooperative launch is answered by another path: a real failure is not hidden."""
    x, gamma, _ = draw(5, 300, torch.float32, device)
    plan = ForwardPlan(x, gamma)
    plan._choose(FORWARDS[-1], x)

    def fail(*_):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(plan.program, "launch", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        plan.run(x, gamma, 1e-6)


# --- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("N", [4, 257, 1024, 5000])
def test_a_row_keeps_its_bits_in_any_batch(N, dtype, device):
    """Y and dx of one row are the same alone, first and last of 2, 255 and 300 rows: whichever launch M leads to."""
    row, gamma, gradient = draw(1, N, dtype, device)
    y, dx, _ = run(row, gamma, gradient)
    for M in (2, 15, 37):
        x, _, dy = draw(M, N, dtype, device)
        for at in (0, M - 1):
            x[at], dy[at] = row[0], gradient[0]
            batch_y, batch_dx, _ = run(x, gamma, dy)
            assert torch.equal(batch_y[at], y[0])
            assert torch.equal(batch_dx[at], dx[0])
    fused._backward_plans.clear()  # they were made with another border between few rows and many


@pytest.mark.case("B61")
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("N", "dtype"),
    [
        *((N, torch.bfloat16) for N in (24, 96, 128, 192, 257, 264, 576, 640, 1536, 4096, 4099, 6144, 10240)),
        *((N, torch.bfloat16) for N in (16384, 32768, 131072)),
        *((N, torch.float32) for N in (68, 132, 260, 384, 548, 576, 640, 768, 1280, 5120, 12288, 24576)),
    ],
)
def test_a_row_keeps_its_bits_on_a_gpu(N, dtype, device):
    """The same over the widths at which a GPU's launches change, and where a tile has two parts, up to 4096 rows."""
    row, gamma, gradient = draw(1, N, dtype, device)
    y, dx, _ = run(row, gamma, gradient)
    for M in (2, 255, 257, 400 if N > 8192 else 4096):
        x, _, dy = draw(M, N, dtype, device)
        for at in (0, M - 1):
            x[at], dy[at] = row[0], gradient[0]
            batch_y, batch_dx, _ = run(x, gamma, dy)
            assert torch.equal(batch_y[at], y[0])
            assert torch.equal(batch_dx[at], dx[0])


@pytest.mark.case("B16")
@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N"), [(4096, 4096), (300, 65536), (65536, 128), (300, 16384)])
def test_the_same_bits_a_hundred_times(M, N, device):
    """Dx and dgamma repeat bit for bit: no atomics, every sum in a fixed order, no word taken for another's."""
    x, gamma, dy = draw(M, N, torch.bfloat16, device)
    _, dx, dgamma = run(x, gamma, dy)
    for _ in range(100):
        _, again, weights = run(x, gamma, dy)
        assert torch.equal(again, dx)
        assert torch.equal(weights, dgamma)


@pytest.mark.case("B10")
@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N"), [(2**23 + 16, 256), (524289, 4096)])
def test_more_than_two_to_the_31_elements(M, N, device):
    """Offsets are 64 bits wide in forward, dx and dgamma: the last row is written, and nothing before it."""
    if torch.cuda.mem_get_info()[0] < 8 * M * N:
        pytest.skip("not enough memory on this GPU")
    x = torch.zeros(M, N, device=device, dtype=torch.bfloat16)
    x[-1] = 1
    gamma = torch.ones(N, device=device, dtype=torch.bfloat16)
    y, dx, dgamma = run(x, gamma, torch.ones((), device=device, dtype=torch.bfloat16).expand(M, N))
    assert bool((y[-1] == 1).all())
    assert not y[:-1].any()
    assert bool((dgamma == 1).all())
    assert dx[0, 0] == dx[-2, -1] == 1000


@pytest.mark.case("B19")
def test_few_rows_leave_no_partial_unwritten(device):
    """With fewer rows than programs dgamma holds no stale memory, though all free memory is NaN."""
    del_me = [torch.full((n,), float("nan"), device=device) for n in (64, 4096, 65536)]
    del del_me
    for M in (1, 3, 131):
        x = torch.ones(M, 2056, device=device)
        dy = torch.zeros_like(x)
        dy[0] = 7
        _, _, dgamma = run(x, torch.ones(2056, device=device), dy)
        torch.testing.assert_close(dgamma, torch.full_like(dgamma, 7 * (1 + 1e-6) ** -0.5), atol=0, rtol=1e-6)


def test_scratch_does_not_grow_with_the_rows(device):
    """The partial sums of dgamma are as many for 300 as for 300,000 rows once every program has work."""
    plans = []
    for M in (30_000, 300_000):
        x = torch.empty(1, 64, device=device).expand(M, 64)
        plans.append(BackwardPlan(x, x, torch.ones(64, device=device), (0,), True, True))
    assert plans[0].partials == plans[1].partials <= 4096


@pytest.mark.parametrize("N", [4096, 4099, 8192])
def test_dgamma_where_a_column_sums_tile_holds_fewer_rows_than_there_are(N, device, monkeypatch):
    """As on a card of 40 SMs, each with its row of partial sums: 32 of them fit a tile."""
    monkeypatch.setattr(backplan, "multiprocessors", lambda _: 40)
    fused._backward_plans.clear()  # they were made for another card
    assert column_sum_table(40, N)[0] < 40
    x, gamma, dy = draw(67, N, torch.float32, device)
    judge(x, gamma, dy, *run(x, gamma, dy))
    fused._backward_plans.clear()


# --- contract ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "gamma", "words"),
    [
        (torch.ones(2, 4, dtype=torch.float32), torch.ones(4, dtype=torch.float16), "gamma has dtype torch.float16"),
        (torch.ones(2, 4, dtype=torch.float16), torch.ones(4, dtype=torch.bfloat16), "torch.float16 or torch.float32"),
        (torch.ones(2, 4, dtype=torch.int32), None, "x has dtype torch.int32"),
        (torch.ones(3, 0), torch.ones(0), "at least 1 column"),
        (torch.ones(()), None, "0 dimensions"),
        (torch.ones(2, 4), torch.ones(5), r"gamma has shape \(5,\)"),
    ],
)
def test_refusals_name_the_argument_and_the_limit(x, gamma, words, device):
    """What fused does not take raises ContractError before anything is allocated."""
    with pytest.raises(ContractError, match=words):
        rms_norm(x.to(device), None if gamma is None else gamma.to(device), impl="fused")


@pytest.mark.parametrize(("x", "gamma"), [([1.0, 2.0], None), (torch.ones(2, 4), [1.0] * 4)])
def test_what_is_no_tensor_is_refused_by_name(x, gamma, device):
    x = x.to(device) if isinstance(x, torch.Tensor) else x
    with pytest.raises(ContractError, match=r"is a list: it must be a torch\.Tensor"):
        rms_norm(x, gamma, impl="fused")


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_eps_is_refused_also_when_the_call_is_known(eps, device):
    """A kept plan does not let a bad eps through."""
    x, gamma, _ = draw(3, 8, torch.float32, device)
    fused.forward(x, gamma, 1e-6)
    with pytest.raises(ContractError, match="eps"):
        fused.forward(x, gamma, eps)


def test_a_gradient_that_does_not_match_is_refused(device):
    """Dy of another shape or dtype is refused by name."""
    x, gamma, dy = draw(3, 8, torch.float32, device)
    _, rstd = fused.forward(x, gamma, 1e-6)
    with pytest.raises(ContractError, match=r"dy is \(2, 8\)"):
        fused.backward(dy[:2], x, gamma, rstd)
    with pytest.raises(ContractError, match=r"dy is .*torch.float64"):
        fused.backward(dy.double(), x, gamma, rstd)


@pytest.mark.parametrize(("M", "N"), [(3, 65), (17, 257), (40, 1024)])
def test_few_rows_give_dgamma_the_same_bits_with_and_without_dx(M, N, device):
    """One program sums the columns of a small problem, whether or not others beside it write dx."""
    draws = torch.Generator().manual_seed(M)
    x, dy = (torch.randn(M, N, generator=draws).to(device) for _ in range(2))
    found = []
    for wanted in (True, False):
        gamma = torch.ones(N, device=device, requires_grad=True)
        rms_norm(x.clone().requires_grad_(wanted), gamma, impl="fused").backward(dy)
        found.append(gamma.grad)
    assert torch.equal(*found)
