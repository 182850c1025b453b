"""Reports about numbers: overflow, zeros, eps, 16-bit sums, the place of the rounding, one column."""

import pytest
import torch

from rmsnorm_cli.config import COMMANDS, load, to_toml
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.kernels import ContractError, RMSNorm, fused, reference, rms_norm
from rmsnorm_cli.kernels.api import DEFAULT_EPS
from rmsnorm_cli.kernels.contract import INTERPRETED


@pytest.mark.case("B28")
def test_half_precision_squares_do_not_overflow(impl, tensor, same):
    """A float16 square is infinite from 256 on, which makes y 0 or NaN."""
    x, gamma = tensor([[1000.0] * 64], torch.float16), tensor([1.0] * 64, torch.float16)
    y = rms_norm(x, gamma, impl=impl)
    y.backward(tensor([[1.0, *[0.0] * 63]], torch.float16, grad=False))
    same(y, [[1.0] * 64], atol=0, rtol=0)
    same(x.grad, [[9.84375e-4, *[-1.5625e-5] * 63]], atol=3e-8, rtol=2**-11)  # half a float16 step
    extreme, gamma = tensor([[60000.0, -60000.0] * 4], torch.float16), tensor([1.0] * 8, torch.float16)
    same(rms_norm(extreme, gamma, impl=impl), [[1.0, -1.0] * 4], atol=0, rtol=0)
    spike, gamma = tensor([[300.0, 1.0, 1.0, 1.0]], torch.float16), tensor([1.0] * 4, torch.float16)
    same(rms_norm(spike, gamma, impl=impl), [[1.99996667, *[0.00666656] * 3]], atol=0, rtol=2**-11)


@pytest.mark.case("B28")
@pytest.mark.parametrize("N", [1, 8, 257, 4096])
@pytest.mark.parametrize("size", [256.0, 1000.0, 65504.0, 6e-8, 1e-5])
def test_the_whole_range_of_float16_normalises_like_float64(size, N, impl, device, gradients, rounded):
    """From the smallest subnormal to the largest number: y rounded once, dx finite where float64 says so."""
    signs = torch.where(torch.arange(N) % 3 == 0, -1.0, 1.0)
    x = (size * signs * (1 - 0.5 * (torch.arange(N) % 2))).half()[None]
    gamma, dy = torch.ones(N).half(), torch.linspace(-1, 1, N).half()[None]
    y, dx, _ = gradients(x.to(device), gamma.to(device), dy.to(device), impl)
    rounded(y, reference.forward(x.double(), gamma.double(), 1e-6))
    want = reference.backward(dy.double(), x.double(), gamma.double(), 1e-6)[0]
    unit = float(reference.statistics(x.double(), 1e-6))
    torch.testing.assert_close(dx.cpu().double(), want, atol=max(2e-6 * unit, 6e-8), rtol=1e-3)


@pytest.mark.case("B28")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_that_float32_cannot_hold_make_a_row_of_zeros_alike(dtype, impl, device, gradients):
    """Beyond 1.8e19 the mean square is infinite and rstd 0: y and dx are 0, as documented; other rows keep theirs."""
    if impl == "rowwise" and dtype == torch.bfloat16:
        pytest.skip("outside the teaching kernel's contract, which refuses it")
    x = torch.tensor([[1e20, 1.0, -3e25], [1e18, 1e18, -1e18], [1.0, 2.0, 3.0]], dtype=dtype, device=device)
    gamma, dy = torch.tensor([1.0, -2.0, 0.5]).to(device, dtype), torch.ones(3, 3, dtype=dtype, device=device)
    y, dx, dgamma = gradients(x, gamma, dy, impl)
    assert not y[0].any()
    assert not dx[0].any()
    want = reference.forward(x[1:].double(), gamma.double(), 1e-6)
    torch.testing.assert_close(y[1:].double(), want, atol=0, rtol=1e-6 if dtype == torch.float32 else 2**-7)
    alone = gradients(x[1:], gamma, dy[1:], impl)[2]
    torch.testing.assert_close(dgamma, alone, atol=0, rtol=1e-6)


@pytest.mark.case("B29")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [1.2e-38, 1e-12, 1e-8, 1e-6, 1.0])
def test_no_zero_row_is_ever_nan(eps, dtype, impl, device, gradients):
    """Dx is gamma · dy / sqrt(eps), infinite where the dtype ends, never NaN; rows beside it are not touched."""
    if impl == "rowwise" and dtype not in (torch.float32, torch.float16):
        pytest.skip("outside the teaching kernel's contract, which refuses it")
    x = torch.zeros(3, 8, dtype=dtype, device=device)
    x[1] = 1
    gamma, dy = torch.full((8,), 2.0, dtype=dtype, device=device), torch.ones(3, 8, dtype=dtype, device=device)
    y, dx, dgamma = gradients(x, gamma, dy, impl, eps)
    assert not y[::2].any()
    assert not dx.isnan().any()
    assert dgamma.isfinite().all()
    want = torch.tensor(2 * eps**-0.5, dtype=torch.float64).to(dtype)
    torch.testing.assert_close(dx[::2].cpu(), want.expand(2, 8), atol=0, rtol=max(2 * torch.finfo(dtype).eps, 1e-6))


@pytest.mark.case("B29")
@pytest.mark.parametrize("eps", [0, 0.0, -1, -1e-6, float("nan"), float("inf"), 1e-46])
def test_an_eps_that_is_no_number_above_zero_is_refused(eps, impl, tensor):
    with pytest.raises(ContractError, match=r"^eps is "):
        rms_norm(tensor([[0.0] * 4]), tensor([1.0] * 4), eps, impl)


@pytest.mark.case("B29")
@pytest.mark.parametrize(("eps", "dx"), [(1e-5, 316.2278), (1e-6, 1000.0), (1e-8, 1e4), (1e-12, 1e6)])
def test_zero_rows_are_finite_down_to_tiny_eps(impl, eps, dx, tensor, same):
    """No 0/0, and an eps of 1e-8 is not lost as it would be in float16."""
    x, gamma = tensor([[0.0] * 8] * 2), tensor([1.0] * 8)
    y = rms_norm(x, gamma, eps, impl=impl)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(x))
    assert torch.equal(gamma.grad, torch.zeros_like(gamma))
    same(x.grad, [[dx] * 8] * 2, atol=0, rtol=1e-6)


@pytest.mark.case("B31")
def test_the_default_eps_does_not_depend_on_the_dtype(free, device, same, rounded):
    """A bfloat16 row of 0.058 shows which eps was used: 0.549 for 2^-7, 0.99985 for 1e-6."""
    x = torch.full((1, 32), 0.058, dtype=torch.bfloat16, device=device)
    y = rms_norm(x.double(), torch.ones(32, dtype=torch.float64, device=device), impl="reference")
    same(y, [[0.99985] * 32], atol=5e-6, rtol=0)
    rounded(rms_norm(x, impl=free), y.cpu())


@pytest.mark.case("B31")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_function_module_and_reference_have_one_default_eps(dtype, impl, device):
    """Small numbers show which eps was used: at 1e-3, 2^-23 for 1e-6 is an eighth of y."""
    if impl == "rowwise" and dtype not in (torch.float32, torch.float16):
        pytest.skip("outside the teaching kernel's contract, which refuses it")
    x, gamma = torch.full((2, 32), 1e-3, dtype=dtype, device=device), torch.ones(32, dtype=dtype, device=device)
    module = RMSNorm(32, device=device, dtype=dtype, impl=impl)
    unnamed = RMSNorm(32, eps=None, device=device, dtype=dtype, impl=impl)
    named = rms_norm(x, gamma, 1e-6, impl)
    for y in (rms_norm(x, gamma, impl=impl), module(x), unnamed(x)):
        assert torch.equal(y, named)
    assert not torch.equal(rms_norm(x, gamma, 2.0**-23, impl), named)


@pytest.mark.case("B31")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_has_the_same_default_and_records_it(command):
    settings = load(command)
    assert settings.operator.eps == DEFAULT_EPS == 1e-6
    assert "eps = 1e-06" in to_toml(settings)


@pytest.mark.case("B32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("N", [4096, 4112, 20000])
def test_squares_of_16_bit_numbers_are_summed_in_float32(N, dtype, device, rounded):
    """A running bf16 sum of these gives a mean square of 16, not 16.527, and y of 4.0: one wrong scale for the row."""
    x = torch.where(torch.arange(N, device=device) % 16 == 0, 16.0, 0.75).to(dtype)[None]
    y, rstd = fused.forward(x, torch.ones(N, dtype=dtype, device=device), 1e-6)
    assert float(rstd) == pytest.approx(0.24597924, rel=1e-5)
    right = reference.forward(x.double(), None, 1e-6)
    rounded(y, right)
    rounded(rms_norm(x, impl="reference"), right)
    assert float(right[0, 0]) == pytest.approx(3.935668, rel=1e-6)


@pytest.mark.case("B34")
def test_gamma_multiplies_before_the_one_rounding(free, device, same, rounded):
    """In bfloat16 [3, 4] with gamma 1.5: rounding first gives 1.703125 in the second place."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16, device=device)
    gamma = torch.tensor([1.5, 1.5], dtype=torch.bfloat16, device=device)
    y = rms_norm(x, gamma, impl=free)
    rounded(y, reference.forward(x.double(), gamma.double(), 1e-6))
    if free == "reference" or not INTERPRETED:  # the interpreter's bf16 store truncates
        same(y, [[1.2734375, 1.6953125]], atol=0, rtol=0)


@pytest.mark.case("B34")
@pytest.mark.parametrize("weights", ["own", "float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [64, 257])
def test_one_rounding_in_forward_and_backward(N, dtype, weights, free, device, gradients, rounded):
    """Every element of y is float64's, rounded once; rounding x · rstd first is off by more in one of eight."""
    draws = torch.Generator().manual_seed(N)
    x = torch.randn(7, N, generator=draws).to(device, dtype)
    gamma = torch.randn(N, generator=draws).to(device, torch.float32 if weights == "float32" else dtype)
    dy = torch.randn(7, N, generator=draws).to(device, dtype)
    y, dx, dgamma = gradients(x, gamma, dy, free)
    rounded(y, reference.forward(x.double(), gamma.double(), 1e-6))
    want_dx, want_dgamma = reference.backward(dy.double(), x.double(), gamma.double(), 1e-6)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(dx.double(), want_dx, atol=4e-6, rtol=unit)
    torch.testing.assert_close(dgamma.double(), want_dgamma, atol=1e-5, rtol=1e-5 if weights == "float32" else unit)
    exact = reference.forward(x.double(), gamma.double(), 1e-6)
    first = reference.forward(x.double(), None, 1e-6).to(dtype).double() * gamma.double()
    limit = 0.501 * unit
    assert bool(((first.to(dtype).double() - exact).abs() > limit * exact.abs()).any())  # the input tells them apart


@pytest.mark.case("B34")
@pytest.mark.parametrize("rounding", ["fp32", "llama", "gemma"])
def test_the_oracle_follows_where_an_implementation_says_it_rounds(rounding, same):
    """[3, 4] with weights 1.5: 1.703125 in the second place where x · rstd is rounded first, else 1.6953125."""
    x, gamma = torch.tensor([[3.0, 4.0]]).bfloat16(), torch.tensor([1.5, 1.5]).bfloat16()
    if rounding == "gemma":
        gamma = gamma - 1
    want = cases.oracle(Inputs(x, gamma, torch.ones_like(x)), 1e-6, rounding)
    same(want.y.bfloat16(), [[1.2734375, 1.703125 if rounding == "llama" else 1.6953125]], atol=0, rtol=0)


@pytest.mark.case("B34")
def test_float16_rounds_once_as_well(impl, tensor):
    """The product is rounded at the store: rounding x · rstd first would give another last bit in one element of 64."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 64, generator=generator).half()
    gamma = torch.randn(64, generator=generator).half()
    exact = rms_norm(x.double(), gamma.double(), impl="reference")
    got = rms_norm(tensor(x.tolist(), torch.float16), tensor(gamma.tolist(), torch.float16), impl=impl)
    assert torch.equal(got.detach().cpu(), exact.half())
    rounded_first = (rms_norm(x.double(), impl="reference").half() * gamma).double()
    assert not torch.equal(rounded_first, exact.half().double())  # the input does tell the two apart


@pytest.mark.case("B35")
@pytest.mark.parametrize(
    ("x", "y", "dx", "limit"),
    [
        (3.0, 0.99999994, 3.7037e-8, 1e-6),
        (-3.0, -0.99999994, 3.7037e-8, 1e-6),
        (1000.0, 1.0, 1.0e-15, 1e-6),
        (0.001, 0.70710678, 353.55339, 1e-3),
    ],
)
def test_one_column_keeps_its_sign_and_has_almost_no_gradient(impl, x, y, dx, limit, tensor, same):
    """With N = 1, dx is a difference of near-equal numbers, so the error that counts is the absolute one."""
    row, gamma = tensor([[x]] * 3), tensor([1.0])
    result = rms_norm(row, gamma, impl=impl)
    result.sum().backward()
    same(result, [[y]] * 3)
    same(row.grad, [[dx]] * 3, atol=limit, rtol=0)
    same(gamma.grad, [3 * y])
