"""Reports about dgamma, the sum over rows: lost rows, unwritten partial sums, 16-bit sums, NaN that is let in."""

import pytest
import torch

from rmsnorm_cli.kernels import fused, reference, rms_norm


@pytest.mark.case("B13")
@pytest.mark.parametrize("N", [1, 4, 257])
def test_zeros_give_a_zero_dgamma_each_time(impl, N, tensor, same):
    """A partial that no program wrote was summed: dgamma of a zero row changed from run to run."""
    for _ in range(10):
        x, gamma = tensor([[0.0] * N]), tensor([1.0] * N)
        (-rms_norm(x, gamma, 1e-5, impl=impl).sum()).backward()
        assert torch.equal(gamma.grad, torch.zeros_like(gamma))
        same(x.grad, [[-316.22776602] * N], atol=1e-4, rtol=0)


@pytest.mark.case("B13")
def test_one_dimension_stays_one_dimension(free, tensor):
    """A single row without a batch keeps its shape forward and backward."""
    for _ in range(10):
        x, gamma = tensor([0.0] * 4), tensor([1.0] * 4)
        y = rms_norm(x, gamma, 1e-5, impl=free)
        (-y.sum()).backward()
        assert y.shape == x.grad.shape == gamma.grad.shape == (4,)
        assert not gamma.grad.any()


@pytest.mark.case("B14")
@pytest.mark.parametrize(
    "M", [1, 2, 3, 63, 64, 65, 129, *(pytest.param(M, marks=pytest.mark.gpu) for M in (133, 4097))]
)
def test_the_last_row_reaches_dgamma(impl, M, device, same):
    """Partials were sized by floor(M / block), so the last rows were lost; here the last row is all that counts."""
    x, gamma = torch.ones(M, 32, device=device, requires_grad=True), torch.ones(32, device=device, requires_grad=True)
    dy = torch.ones(M, 32, device=device)
    dy[-1] = 1000
    rms_norm(x, gamma, impl=impl).backward(dy)
    same(gamma.grad, [(M - 1 + 1000) * 0.9999995] * 32, atol=0, rtol=1e-6)


@pytest.mark.case("B14")
@pytest.mark.parametrize("M", [127, 131, 132, 133, 255, 256, 257, 1023, 1025, 4097])
@pytest.mark.parametrize("N", [32, 5000])
def test_the_last_row_reaches_dgamma_at_every_number_of_tiles(M, N, device):
    """Row counts around whole tiles and whole waves of programs, on a narrow path and on one that is not."""
    if device == "cpu" and N > 32:
        M = 5 + M % 9  # the interpreter takes its time over wide rows, and has two programs there
    x, gamma = torch.ones(M, N, device=device), torch.ones(N, device=device)
    dy = torch.ones(M, N, device=device)
    dy[-1] = 1000
    _, rstd = fused.forward(x, gamma, 1e-6)
    for need_dx in (True, False):
        _, dgamma = fused.backward(dy, x, gamma, rstd, need_dx=need_dx)
        torch.testing.assert_close(dgamma, torch.full_like(dgamma, (M - 1 + 1000) * 0.9999995), atol=0, rtol=1e-6)


@pytest.mark.case("B16")
@pytest.mark.gpu
@pytest.mark.parametrize("values", ["ones", "random"])
@pytest.mark.parametrize(("name", "M", "N"), [("rowwise", 8192, 2048), ("fused", 8192, 2048), ("fused", 65537, 96)])
def test_dgamma_has_the_same_bits_in_a_hundred_runs(name, M, N, values, device, gradients):
    x, gamma = torch.ones(M, N, device=device), torch.ones(N, device=device)
    dy = x if values == "ones" else torch.randn(M, N, generator=torch.Generator().manual_seed(3)).to(device)
    _, _, first = gradients(x, gamma, dy, name)
    if values == "ones":
        torch.testing.assert_close(first, torch.full_like(first, M * 0.9999995), atol=0, rtol=1e-6)
    for _ in range(99):
        assert torch.equal(gradients(x, gamma, dy, name)[2], first)


@pytest.mark.case("B16")
def test_no_kernel_of_ours_adds_to_memory_that_another_program_adds_to():
    """Atomics add in whatever order programs finish; there are none in the sources, so the bits can repeat."""
    import inspect

    from rmsnorm_cli.kernels import backward, chunks, forward, reread, rowwise, split, tiles

    for module in (rowwise, forward, backward, chunks, reread, split, tiles):
        assert "atomic_add" not in inspect.getsource(module)


@pytest.mark.case("B17")
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [2, 9])
def test_dgamma_of_bfloat16_is_summed_in_float32(N, weights, free, device, same, rounded):
    """Running sums in bfloat16 stall at 65536 where the sum is 68415.966."""
    dy = torch.where(torch.arange(4096, device=device) % 16 == 0, 256.0, 0.75)[:, None].expand(-1, N).bfloat16()
    x = torch.ones(4096, N, dtype=torch.bfloat16, device=device)
    gamma = torch.ones(N, dtype=weights, device=device, requires_grad=True)
    rms_norm(x, gamma, impl=free).backward(dy)
    exact = (256 * 256.0 + 3840 * 0.75) * (1 + 1e-6) ** -0.5
    assert exact == pytest.approx(68415.966)
    if weights == torch.float32:
        same(gamma.grad, [exact] * N, atol=0, rtol=1e-5)
    else:
        rounded(gamma.grad, [exact] * N)


@pytest.mark.case("B17")
def test_dgamma_of_float16_does_not_stall(impl, device, same):
    """A float16 sum stops growing by ¾ at 2048."""
    gamma = torch.ones(2, dtype=torch.float16, device=device, requires_grad=True)
    dy = torch.full((129, 2), 0.75, dtype=torch.float16, device=device)
    dy[0] = 2048
    rms_norm(torch.ones_like(dy), gamma, impl=impl).backward(dy)
    same(gamma.grad, [2144.0] * 2, atol=0, rtol=0)


@pytest.mark.case("B17")
def test_what_a_row_adds_to_dgamma_is_not_rounded(impl, device, same):
    """Forty-eight times 0.63245 is 30.359 in float16; rounded before the sum, the bias 48 times over gives 30.344."""
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float16, device=device).repeat(48, 1)
    gamma = torch.ones(2, dtype=torch.float16, device=device, requires_grad=True)
    rms_norm(x, gamma, impl=impl).sum().backward()
    same(gamma.grad, [30.359375, 60.71875], atol=0, rtol=0)


@pytest.fixture
def poisoned():
    """Fill all uninitialised memory with NaN while the test runs."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def row_counts():
    """Return few rows, and on a GPU one less, as many and one more than there are processors."""
    if not torch.cuda.is_available():
        return [1, 2, 3, 5]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return [1, 2, 3, sms - 1, sms, sms + 1]


@pytest.mark.case("B19")
@pytest.mark.parametrize("M", row_counts())
@pytest.mark.parametrize("N", [8, 257, 2056, 4096, 5000, 16384, 20000])
def test_no_unwritten_partial_sum_is_read(N, M, impl, device, gradients, poisoned):
    """With fewer rows than programs, NaN in all free memory, on every path: dgamma is the sum of its rows."""
    if impl == "rowwise" and N > 4096:
        pytest.skip("outside the teaching kernel's contract, which refuses it")
    x, gamma = torch.ones(M, N, device=device), torch.ones(N, device=device)
    dy = 2.0 ** (torch.arange(M, device=device) % 3)[:, None].expand(M, N)
    _, dx, dgamma = gradients(x, gamma, dy, impl)
    torch.testing.assert_close(dgamma, dy.sum(0) * (1 + 1e-6) ** -0.5, atol=0, rtol=1e-6)
    assert dx.isfinite().all()


@pytest.mark.case("B19")
def test_the_poison_of_this_file_is_seen(device, poisoned):
    """Otherwise the test above could not fail."""
    assert torch.empty(64, device=device).isnan().all()


@pytest.mark.case("B20")
def test_rows_outside_the_batch_do_not_reach_dgamma(impl, device, same):
    """A mask by multiplication lets the NaN of a row behind the batch into the column sum."""
    buffer = torch.ones(4, 8, device=device)
    buffer[3] = float("nan")
    x, gamma = buffer[:3].requires_grad_(), torch.ones(8, device=device, requires_grad=True)
    dy = torch.tensor([[1.0], [2.0], [4.0]], device=device).expand(3, 8)
    rms_norm(x, gamma, impl=impl).backward(dy)
    same(gamma.grad, [6.99999650] * 8)


@pytest.mark.case("B20")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["x", "dy", "gamma"])
@pytest.mark.parametrize(("M", "N"), [(5, 3), (9, 257), (70, 33), (3, 5000)])
def test_a_bad_number_keeps_to_its_row_of_dx_and_to_what_the_formula_gives(M, N, where, bad, impl, device, gradients):
    """Other rows keep their numbers; y, dx and dgamma are NaN and infinite where float64's formula says so."""
    if impl == "rowwise" and N > 4096:
        pytest.skip("outside the teaching kernel's contract, which refuses it")
    draws = torch.Generator().manual_seed(M * N)
    x, dy, gamma = (torch.randn(*shape, generator=draws) for shape in ((M, N), (M, N), (N,)))
    row, column = M // 2, N // 2
    if where == "gamma":
        gamma[column] = bad
    else:
        (x if where == "x" else dy)[row, column] = bad
    y, dx, dgamma = (found.cpu() for found in gradients(x.to(device), gamma.to(device), dy.to(device), impl))
    right_dx, right_dgamma = reference.backward(dy.double(), x.double(), gamma.double(), 1e-6)
    for got, want in ((y, reference.forward(x.double(), gamma.double(), 1e-6)), (dx, right_dx), (dgamma, right_dgamma)):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5, equal_nan=True)
    if where == "gamma":  # a column of y, every row of dx, and nothing of dgamma, which gamma does not enter
        assert dgamma.isfinite().all()
        return
    others = [i for i in range(M) if i != row]
    assert dx[others].isfinite().all()
    assert y[others].isfinite().all()


@pytest.mark.case("B20")
def test_nan_stays_in_its_own_row_of_y_and_dx(impl, tensor, same):
    """A bad row does not spread; dgamma, a sum over all rows, is NaN even where its dy is 0 (0 · NaN is NaN)."""
    x, gamma = tensor([[1.0, 2.0], [float("nan")] * 2]), tensor([1.0, 1.0])
    y = rms_norm(x, gamma, impl=impl)
    y.backward(tensor([[1.0, 0.0], [0.0, 0.0]], grad=False))
    same(y[0], [0.63245541, 1.26491081])
    same(x.grad[0], [0.50596438, -0.25298206])
    assert torch.isnan(y[1]).all()
    assert torch.isnan(x.grad[1]).all()
    assert torch.isnan(gamma.grad).all()
