"""Reports about the formula and its padding: gamma twice, eps outside the root, lanes that count, a wrong statistic."""

import pytest
import torch

from rmsnorm_cli.kernels import fused, reference, rms_norm, rowwise


@pytest.mark.case("B22")
def test_gamma_enters_dx_once(impl, tensor, same):
    """Multiplied twice into the correction term it gives dx[1] = -3.415, which gamma = 1 never shows."""
    x, gamma = tensor([[1.0, 2.0]]), tensor([1.0, 3.0])
    rms_norm(x, gamma, impl=impl).sum().backward()
    same(x.grad, [[-0.25298181, 0.12649179]])
    same(gamma.grad, [0.63245541, 1.26491081])


@pytest.mark.case("B23")
def test_eps_stands_inside_the_root(impl, tensor, same):
    """Outside it gives 0.990, lost it gives 1."""
    same(rms_norm(tensor([[0.001] * 4]), tensor([1.0] * 4), 1e-5, impl=impl), [[0.30151134] * 4])


@pytest.mark.case("B25")
def test_padding_lanes_count_for_nothing(impl, tensor, same):
    """Five columns in a block of eight: dividing by 8 gives 1.265, ones in the padding give 0.933."""
    x, gamma = tensor([[2.0] * 5]), tensor([1.0] * 5)
    y = rms_norm(x, gamma, impl=impl)
    y.backward(tensor([[1.0, 0, 0, 0, 0]], grad=False))
    same(y, [[0.99999988] * 5])
    same(x.grad, [[0.39999998, *[-0.09999996] * 4]])


@pytest.mark.case("B25")
@pytest.mark.parametrize("N", [1, 3, 17, 1000, 4095])
def test_equal_numbers_normalise_to_one_at_any_width(impl, N, device, same):
    """The same, for widths on both sides of powers of two."""
    x, gamma = torch.full((1, N), 2.0, device=device), torch.ones(N, device=device)
    same(rms_norm(x, gamma, impl=impl), [[0.99999988] * N])


WIDTHS = [1, 2, 3, 5, 17, 31, 33, 127, 129, 255, 257, 769, 1000, 1023, 1025, 2047, 4095]


@pytest.mark.case("B22", "B25")
@pytest.mark.parametrize("N", WIDTHS)
def test_values_and_gradients_at_widths_on_both_sides_of_powers_of_two(N, impl, device, gradients):
    """Rows of different size, a gamma of both signs: nothing that padding, divisor or gamma's place could hide in."""
    judge(N, impl, device, gradients)


@pytest.mark.case("B22", "B25", "B26")
@pytest.mark.parametrize("N", [5000, 8192, 8193, 16384, 20000, 33000])
def test_values_and_gradients_on_the_paths_of_wide_rows(N, free, device, gradients):
    judge(N, free, device, gradients)


def judge(N, impl, device, gradients):
    """Hold y, dx and dgamma of three rows of random numbers against float64."""
    draws = torch.Generator().manual_seed(N)
    x = torch.randn(3, N, generator=draws) * torch.tensor([[0.1], [1.0], [20.0]])
    gamma, dy = torch.randn(N, generator=draws), torch.randn(3, N, generator=draws)
    wide = [tensor.double() for tensor in (x, gamma, dy)]
    y, dx, dgamma = (found.cpu().double() for found in gradients(*(t.to(device) for t in (x, gamma, dy)), impl))
    rstd = reference.statistics(wide[0], 1e-6)
    want_dx, want_dgamma = reference.backward(wide[2], wide[0], wide[1], 1e-6)
    torch.testing.assert_close(y, reference.forward(wide[0], wide[1], 1e-6), atol=0, rtol=2e-6)
    torch.testing.assert_close(dx / rstd, want_dx / rstd, atol=4e-6, rtol=1e-5)
    torch.testing.assert_close(dgamma, want_dgamma, atol=4e-6, rtol=1e-5)


@pytest.mark.case("B23")
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_eps_is_added_to_the_mean_square_in_both_directions(size, eps, impl, device, gradients):
    """Forward and dx over rows from far below to far above eps; outside the root, or as a floor, it shows at one."""
    x = size * torch.tensor([[1.0, -2.0, 0.5, 1.5, 3.0]])
    gamma, dy = torch.tensor([1.0, 2.0, -1.0, 0.5, 1.5]), torch.tensor([[1.0, 0.5, -2.0, 3.0, 1.0]])
    y, dx, _ = gradients(*(tensor.to(device) for tensor in (x, gamma, dy)), impl, eps)
    want = reference.backward(dy.double(), x.double(), gamma.double(), eps)[0]
    torch.testing.assert_close(y.cpu().double(), reference.forward(x.double(), gamma.double(), eps), atol=0, rtol=1e-6)
    torch.testing.assert_close(dx.cpu().double(), want, atol=2e-6 * float(want.abs().max()), rtol=2e-6)


@pytest.mark.case("B26")
@pytest.mark.parametrize("module", [rowwise, fused], ids=["rowwise", "fused"])
@pytest.mark.parametrize("N", [2, 257, 1025])
def test_the_saved_statistic_is_rstd(module, N, device, same):
    """One number a row, in fp32: the inverse root, neither the mean square nor the root."""
    x = torch.tensor([[2.0], [8.0], [1e-2]], device=device).expand(3, N).contiguous()
    _, rstd = module.forward(x, torch.ones(N, device=device), 1e-6)
    assert rstd.dtype == torch.float32
    same(rstd, [(4 + 1e-6) ** -0.5, (64 + 1e-6) ** -0.5, (1e-4 + 1e-6) ** -0.5], atol=0, rtol=2e-6)


@pytest.mark.case("B26")
def test_the_saved_statistic_is_the_one_that_the_forward_used(impl, tensor, same):
    """With the mean square saved in place of rstd, y is right and each gradient is off by a factor of its row."""
    x, gamma = tensor([[2.0, 2.0], [8.0, 8.0]]), tensor([1.0, 1.0])
    rms_norm(x, gamma, impl=impl).backward(tensor([[1.0, 0.0], [1.0, 0.0]], grad=False))
    same(x.grad, [[0.25, -0.25], [0.0625, -0.0625]])
