"""Public bug reports about the numbers of a fused norm: a small input and the right values; each stands for a kind.

Each docstring says what went wrong there. Run for `reference` and `rowwise`: a layout or dtype that the teaching kernel
does not take must be refused, which is an answer too.
"""

import pytest
import torch

from rmsnorm_cli.kernels import ContractError, rms_norm

both = pytest.mark.parametrize("impl", ["reference", "rowwise"])


@both
def test_transposed_view_is_read_by_its_strides_or_refused(impl, device, same):
    """The row mean used the column stride, the values to scale did not: y[0][1] came out as 0.309."""
    x = torch.arange(1.0, 25, device=device).reshape(6, 4).t()
    gamma = torch.arange(1.0, 7, device=device)
    if impl == "rowwise":
        with pytest.raises(ContractError, match="not contiguous"):
            rms_norm(x, gamma, impl=impl)
        x = x.contiguous()
    y = rms_norm(x, gamma, impl=impl)
    same(y[0], [0.07722833, 0.77228328, 2.08516486, 4.01587307, 6.56440790, 9.73076935])


@both
def test_gradient_of_a_sum_is_one_element_with_stride_zero(impl, tensor, same):
    """Kernels that assume unit strides read past the 4 bytes behind an expanded dy."""
    x, gamma = tensor([[3.0, 4.0], [1.0, 7.0]]), tensor([2.0, 0.5])
    rms_norm(x, gamma, impl=impl).sum().backward()
    same(x.grad, [[0.29415643, -0.22061728], [0.37799999, -0.05399999]])
    same(gamma.grad, [1.04852810, 2.53137078])


@both
def test_gradient_of_a_concatenation_is_a_slice(impl, tensor, same):
    """The row stride of dy is twice that of x; a reader with x's stride gives [-0.543, 0.407] in dx1[1]."""
    x1, x2, gamma = tensor([[1.0, 2.0], [3.0, 4.0]]), tensor([[5.0, 6.0], [7.0, 8.0]]), tensor([1.0, 2.0])
    weights = tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], grad=False)
    joined = torch.cat([rms_norm(x1, gamma, impl=impl), rms_norm(x2, gamma, impl=impl)], dim=-1)
    (joined * weights).sum().backward()
    same(x1.grad, [[-0.50596387, 0.25298307], [-0.72407714, 0.54305821]])
    same(x2.grad, [[-0.39182680, 0.32652239], [-0.52744274, 0.46151245]])
    same(gamma.grad, [14.11003123, 22.17819546], atol=1e-5, rtol=0)


def test_three_dimensions_cut_from_a_wider_projection(device, same):
    """Flattened rows were paired with one stride only; a view of swapped leading dimensions failed."""
    x = torch.arange(1.0, 49, device=device).reshape(2, 3, 8)[:, :2, :4].requires_grad_()
    gamma = torch.arange(1.0, 5, device=device, requires_grad=True)
    y = rms_norm(x, gamma, impl="reference")
    dx, dgamma = torch.autograd.grad(y.sum(), (x, gamma))
    same(y[1, 1], [0.95601986, 1.96998033, 3.04188139, 4.17172305])
    same(dx[1, 0], [-0.05273500, -0.01865018, 0.01543463, 0.04951945])
    same(dgamma, [3.11605064, 3.64257434, 4.16909804, 4.69562174])
    swapped = torch.arange(0.0, 24, device=device).reshape(3, 2, 4).transpose(0, 1)
    same(rms_norm(swapped, impl="reference")[1, 0], [0.71269663, 0.89087079, 1.06904495, 1.24721911])


@both
def test_zeros_give_a_zero_dgamma_each_time(impl, tensor, same):
    """A partial that no program wrote was summed: dgamma of a zero row changed from run to run."""
    for _ in range(10):
        x, gamma = tensor([[0.0] * 4]), tensor([1.0] * 4)
        (-rms_norm(x, gamma, 1e-5, impl=impl).sum()).backward()
        assert torch.equal(gamma.grad, torch.zeros_like(gamma))
        same(x.grad, [[-316.22776602] * 4], atol=1e-4, rtol=0)


def test_one_dimension_stays_one_dimension(tensor):
    """A single row without a batch keeps its shape forward and backward."""
    x, gamma = tensor([0.0] * 4), tensor([1.0] * 4)
    (-rms_norm(x, gamma, 1e-5, impl="reference").sum()).backward()
    assert x.grad.shape == gamma.grad.shape == (4,)


@both
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


def test_dgamma_of_half_precision_is_summed_in_float32(device, same):
    """Running sums in bfloat16 stall at 65536 where the sum is 68415.966; float16 ones stall at 2048 in `rowwise`."""
    dy = torch.where(torch.arange(4096, device=device) % 16 == 0, 256.0, 0.75)[:, None].expand(-1, 2).bfloat16()
    x = torch.ones(4096, 2, dtype=torch.bfloat16, device=device)
    for dtype, want, limit in ((torch.float32, 68415.966, 1e-6), (torch.bfloat16, 68608.0, 0.0)):
        gamma = torch.ones(2, dtype=dtype, device=device, requires_grad=True)
        rms_norm(x, gamma, impl="reference").backward(dy)
        same(gamma.grad, [want] * 2, atol=0, rtol=limit)
    gamma = torch.ones(2, dtype=torch.float16, device=device, requires_grad=True)
    dy = torch.full((129, 2), 0.75, dtype=torch.float16, device=device)
    dy[0] = 2048
    rms_norm(torch.ones_like(dy), gamma, impl="rowwise").backward(dy)
    same(gamma.grad, [2144.0] * 2, atol=0, rtol=0)


@both
def test_what_a_row_adds_to_dgamma_is_not_rounded(impl, device, same):
    """Forty-eight times 0.63245 is 30.359 in float16; rounded before the sum, the bias 48 times over gives 30.344."""
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float16, device=device).repeat(48, 1)
    gamma = torch.ones(2, dtype=torch.float16, device=device, requires_grad=True)
    rms_norm(x, gamma, impl=impl).sum().backward()
    same(gamma.grad, [30.359375, 60.71875], atol=0, rtol=0)


@both
def test_rows_outside_the_batch_do_not_reach_dgamma(impl, device, same):
    """A mask by multiplication lets the NaN of a row behind the batch into the column sum."""
    buffer = torch.ones(4, 8, device=device)
    buffer[3] = float("nan")
    x, gamma = buffer[:3].requires_grad_(), torch.ones(8, device=device, requires_grad=True)
    dy = torch.tensor([[1.0], [2.0], [4.0]], device=device).expand(3, 8)
    rms_norm(x, gamma, impl=impl).backward(dy)
    same(gamma.grad, [6.99999650] * 8)


@both
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


@both
def test_gamma_enters_dx_once(impl, tensor, same):
    """Multiplied twice into the correction term it gives dx[1] = -3.415, which gamma = 1 never shows."""
    x, gamma = tensor([[1.0, 2.0]]), tensor([1.0, 3.0])
    rms_norm(x, gamma, impl=impl).sum().backward()
    same(x.grad, [[-0.25298181, 0.12649179]])
    same(gamma.grad, [0.63245541, 1.26491081])


@both
def test_eps_stands_inside_the_root(impl, tensor, same):
    """Outside it gives 0.990, lost it gives 1."""
    same(rms_norm(tensor([[0.001] * 4]), tensor([1.0] * 4), 1e-5, impl=impl), [[0.30151134] * 4])


@both
def test_padding_lanes_count_for_nothing(impl, tensor, same):
    """Five columns in a block of eight: dividing by 8 gives 1.265, ones in the padding give 0.933."""
    x, gamma = tensor([[2.0] * 5]), tensor([1.0] * 5)
    y = rms_norm(x, gamma, impl=impl)
    y.backward(tensor([[1.0, 0, 0, 0, 0]], grad=False))
    same(y, [[0.99999988] * 5])
    same(x.grad, [[0.39999998, *[-0.09999996] * 4]])


@both
@pytest.mark.parametrize("N", [1, 3, 17, 1000, 4095])
def test_equal_numbers_normalise_to_one_at_any_width(impl, N, device, same):
    """The same, for widths on both sides of powers of two."""
    x, gamma = torch.full((1, N), 2.0, device=device), torch.ones(N, device=device)
    same(rms_norm(x, gamma, impl=impl), [[0.99999988] * N])


@both
def test_the_saved_statistic_is_the_one_that_the_forward_used(impl, tensor, same):
    """With the mean square saved in place of rstd, y is right and each gradient is off by a factor of its row."""
    x, gamma = tensor([[2.0, 2.0], [8.0, 8.0]]), tensor([1.0, 1.0])
    rms_norm(x, gamma, impl=impl).backward(tensor([[1.0, 0.0], [1.0, 0.0]], grad=False))
    same(x.grad, [[0.25, -0.25], [0.0625, -0.0625]])


@both
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


@both
@pytest.mark.parametrize(("eps", "dx"), [(1e-5, 316.2278), (1e-6, 1000.0), (1e-8, 1e4), (1e-12, 1e6)])
def test_zero_rows_are_finite_down_to_tiny_eps(impl, eps, dx, tensor, same):
    """No 0/0, and an eps of 1e-8 is not lost as it would be in float16."""
    x, gamma = tensor([[0.0] * 8] * 2), tensor([1.0] * 8)
    y = rms_norm(x, gamma, eps, impl=impl)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(x))
    assert torch.equal(gamma.grad, torch.zeros_like(gamma))
    same(x.grad, [[dx] * 8] * 2, atol=0, rtol=1e-6)


def test_the_default_eps_does_not_depend_on_the_dtype(device, same):
    """A bfloat16 row of 0.058 shows which eps was used: 0.549 for 2^-7, 0.99985 for 1e-6."""
    x = torch.full((1, 32), 0.058, dtype=torch.bfloat16, device=device)
    y = rms_norm(x.double(), torch.ones(32, dtype=torch.float64, device=device), impl="reference")
    same(y, [[0.99985] * 32], atol=5e-6, rtol=0)
    assert torch.equal(rms_norm(x, impl="reference"), y.bfloat16())


def test_gamma_multiplies_before_the_one_rounding(device, same):
    """In bfloat16 [3, 4] with gamma 1.5: rounding first gives 1.703125 in the second place."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16, device=device)
    gamma = torch.tensor([1.5, 1.5], dtype=torch.bfloat16, device=device)
    same(rms_norm(x, gamma, impl="reference"), [[1.2734375, 1.6953125]], atol=0, rtol=0)


@both
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


@both
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
