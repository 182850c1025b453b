"""Small inputs on the device under test, our implementations, and comparisons with right values written out in full."""

import pytest
import torch

from rmsnorm_cli.kernels import rms_norm
from rmsnorm_cli.kernels.contract import INTERPRETED

OURS = ("reference", "rowwise", "fused")


@pytest.fixture(params=OURS)
def impl(request):
    """Return each of our implementations in turn."""
    return request.param


@pytest.fixture(params=["reference", "fused"])
def free(request):
    """Return those of our implementations that take any rank, any strides and bf16."""
    return request.param


@pytest.fixture
def tensor(device):
    """Return a maker of leaves on the device under test."""

    def make(values, dtype=torch.float32, grad=True):
        return torch.tensor(values, dtype=dtype, device=device, requires_grad=grad)

    return make


@pytest.fixture
def same():
    """Return a comparison with right values, shape included, to float32's eight digits by default."""

    def compare(got, want, atol=1e-6, rtol=1e-6):
        assert got is not None
        right = torch.as_tensor(want, dtype=torch.float64).cpu()
        torch.testing.assert_close(got.detach().cpu().double(), right, atol=atol, rtol=rtol)

    return compare


@pytest.fixture
def rounded():
    """Return a comparison with exact values to one rounding of the result's dtype; the interpreter's bf16 truncates."""

    def compare(got, want):
        right = torch.as_tensor(want, dtype=torch.float64).cpu()
        unit = torch.finfo(got.dtype).eps / 2 * (2 if INTERPRETED and got.dtype == torch.bfloat16 else 1)
        smallest = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps / 2
        own = 0.0 if got.dtype == torch.float64 else 2.0**-21  # of the arithmetic before the rounding
        assert got.shape == right.shape
        off = (got.detach().cpu().double() - right).abs()
        assert bool((off <= (unit + own) * right.abs() + smallest).all()), float((off / right.abs()).max())

    return compare


@pytest.fixture
def gradients():
    """Return a function that runs forward and backward once and returns y, dx and dgamma (None without gamma)."""

    def run(x, gamma, dy, impl, eps=1e-6):
        x = x.detach().requires_grad_()
        leaves = [x] if gamma is None else [x, gamma.detach().requires_grad_()]
        y = rms_norm(x, None if gamma is None else leaves[1], eps, impl)
        found = torch.autograd.grad(y, leaves, dy)
        return y.detach(), found[0], found[1] if gamma is not None else None

    return run
