"""Reports about shapes at the edge: no rows, no columns, no dimensions."""

import pytest
import torch

from rmsnorm_cli.kernels import ContractError, RMSNorm, rms_norm


@pytest.mark.case("B62")
def test_no_rows_are_empty_results_and_do_not_poison_the_next_call(impl, device, same):
    """A zero-size grid is a launch error, which then shows in later calls."""
    x, gamma = (
        torch.empty(0, 8, device=device, requires_grad=True),
        torch.arange(1.0, 9, device=device).requires_grad_(),
    )
    y = rms_norm(x, gamma, impl=impl)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 8)
    assert torch.equal(gamma.grad, torch.zeros_like(gamma))
    same(rms_norm(torch.ones(1, 8, device=device), gamma, impl=impl)[0], [0.9999995 * n for n in range(1, 9)])


@pytest.mark.case("B62")
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 3, 8), (1, 0, 2, 8)], ids=str)
@pytest.mark.parametrize("door", ["function", "module"])
def test_no_rows_in_any_number_of_dimensions(door, shape, free, device, same):
    """Y and dx keep the shape, dgamma is zeros (not NaN, not None), and the next call is right."""
    norm = RMSNorm(8, device=device, impl=free)
    norm.weight.data = torch.arange(1.0, 9, device=device)
    x = torch.empty(shape, device=device, requires_grad=True)
    y = norm(x) if door == "module" else rms_norm(x, norm.weight, impl=free)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(norm.weight.grad, torch.zeros(8, device=device))
    same(norm(torch.ones(1, 8, device=device))[0], [0.9999995 * n for n in range(1, 9)])


@pytest.mark.case("B62")
@pytest.mark.parametrize("frozen", ["x", "gamma", "both", "none"])
def test_no_rows_whatever_is_frozen(frozen, impl, device):
    x = torch.empty(0, 5, device=device, requires_grad=frozen not in ("x", "both"))
    gamma = torch.ones(5, device=device, requires_grad=frozen not in ("gamma", "both"))
    y = rms_norm(x, gamma, impl=impl)
    if frozen != "both":
        y.sum().backward()
    assert (x.grad is None) == (frozen in ("x", "both"))
    assert (gamma.grad is None) == (frozen in ("gamma", "both"))


@pytest.mark.case("B62")
def test_no_columns_and_no_dimensions_are_refused(impl, device):
    """(3, 0) and a scalar have no row to take a mean of."""
    with pytest.raises(ContractError, match="at least 1 column"):
        rms_norm(torch.ones(3, 0, device=device), torch.ones(0, device=device), impl=impl)
    with pytest.raises(ContractError, match="0 dimensions"):
        rms_norm(torch.tensor(1.0, device=device), torch.ones(1, device=device), impl=impl)


@pytest.mark.case("B62")
@pytest.mark.parametrize("gamma", [(1,), (7,), (9,), (1, 8), (8, 1), (2, 8), ()], ids=str)
def test_a_gamma_that_only_broadcasts_is_refused_with_both_shapes(gamma, impl, device):
    """Broadcast, a gamma of one number or of two dimensions would give a y of another meaning or shape."""
    with pytest.raises(ContractError, match=r"gamma has shape .*must be \(8,\)"):
        rms_norm(torch.ones(2, 8, device=device), torch.ones(gamma, device=device), impl=impl)
