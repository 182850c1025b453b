"""Small inputs on the device under test, and a comparison with right values written out in full."""

import pytest
import torch


@pytest.fixture
def tensor(device):
    """Return a maker of leaves on the device under test."""

    def make(values, dtype=torch.float32, grad=True):
        return torch.tensor(values, dtype=dtype, device=device, requires_grad=grad)

    return make


@pytest.fixture
def same():
    """Return a comparison with nested lists of right values, shape included, to float32's eight digits by default."""

    def compare(got, want, atol=1e-6, rtol=1e-6):
        assert got is not None
        torch.testing.assert_close(
            got.detach().cpu().double(), torch.tensor(want, dtype=torch.float64), atol=atol, rtol=rtol
        )

    return compare
