"""The reference against numbers worked out by hand, against autograd, and against its own contract."""

import pytest
import torch

from rmsnorm_cli.kernels import ContractError, implementation, reference

close = torch.testing.assert_close


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_statistics_are_one_rstd_a_row():
    """Rows [3, 4] and [6, 8] have mean squares 12.5 and 50."""
    x = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    rstd = reference.statistics(x, 1e-6)
    assert rstd.shape == (2, 1)
    close(rstd, torch.tensor([[12.500001**-0.5], [50.000001**-0.5]]))


@pytest.mark.parametrize(
    ("gamma", "y"),
    [((1.0, 1.0), (0.848528, 1.131371)), ((2.0, 0.5), (1.697056, 0.565685)), (None, (0.848528, 1.131371))],
)
def test_forward_of_three_and_four(gamma, y):
    """The y of x = [3, 4] is what a person computes, with and without gamma."""
    got = reference.forward(column(3, 4), None if gamma is None else column(*gamma), 1e-6)
    close(got, column(*y), atol=5e-7, rtol=0)


def test_backward_of_three_and_four():
    """A dy of [1, 2] gives mean(u · x) = 5.5 and the dx that follows from it."""
    dx, dgamma = reference.backward(column(1, 2), column(3, 4), column(1, 1), 1e-6)
    close(dx, column(-0.090510, 0.067882), atol=5e-7, rtol=0)
    close(dgamma, column(0.848528, 2 * 1.131371), atol=1e-6, rtol=0)


def test_dgamma_is_a_sum_over_rows_and_not_a_mean():
    """Two rows that contribute [1, 2] and [3, 4] give [4, 6]; [2, 3] is the mistake."""
    x = torch.ones(2, 2, dtype=torch.float64)  # x · rstd = ½ exactly, with eps = 3
    _, dgamma = reference.backward(2 * torch.stack([column(1, 2), column(3, 4)]), x, column(1, 1), 3.0)
    assert dgamma is not None
    assert dgamma.tolist() == [4.0, 6.0]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (2, 1, 3, 7), (3, 1)])
def test_explicit_backward_is_the_derivative_of_the_forward(shape, affine):
    """In float64 the formula equals autograd through the forward, which gradcheck accepts, for rms near sqrt(eps)."""
    generator = torch.Generator().manual_seed(sum(shape))
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    x, dy = 1e-2 * draw(*shape), draw(*shape)
    gamma = draw(shape[-1]) if affine else None
    leaves = [tensor.requires_grad_() for tensor in (x, gamma) if tensor is not None]
    assert torch.autograd.gradcheck(lambda x, gamma=None: reference.forward(x, gamma, 1e-4), leaves)
    wanted = torch.autograd.grad(reference.forward(x, gamma, 1e-4), leaves, dy)
    got = [gradient for gradient in reference.backward(dy, x, gamma, 1e-4) if gradient is not None]
    close(got, list(wanted), atol=1e-11, rtol=1e-11)
    assert torch.autograd.gradgradcheck(lambda x, gamma=None: reference.forward(x, gamma, 1e-4), leaves)
    assert torch.autograd.gradcheck(
        lambda *leaves: reference.backward(dy, *leaves, *[None] * (not affine), 1e-4)[0], leaves
    )


@pytest.mark.parametrize("x_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gamma_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_follow_x_and_gamma(x_dtype, gamma_dtype):
    """Results y and dx have x's dtype, dgamma has gamma's, whatever the pair."""
    x, gamma = torch.ones(2, 4, dtype=x_dtype), torch.ones(4, dtype=gamma_dtype)
    assert reference.forward(x, gamma, 1e-6).dtype == x_dtype
    dx, dgamma = reference.backward(x, x, gamma, 1e-6)
    assert (dx.dtype, dgamma.dtype) == (x_dtype, gamma_dtype)


def test_arithmetic_is_double_for_double_alone():
    """An eps far below float32's resolution of 1 shows in a float64 result and not in a float32 one."""
    ones = torch.ones(1, 4, dtype=torch.float64)
    assert reference.forward(ones, None, 1e-12)[0, 0].item() == pytest.approx(1 - 5e-13, abs=1e-16)
    assert reference.forward(ones.float(), None, 1e-12)[0, 0].item() == 1.0


@pytest.mark.parametrize("scale", [1e-18, 1e15])
def test_dx_survives_rows_whose_rstd_cubed_leaves_float32(scale):
    """The correction term is right where rstd³ alone would be 0 or infinite."""
    x = torch.tensor([[3.0, 4.0]]) * scale
    dy, gamma, eps = torch.tensor([[1.0, 2.0]]), torch.ones(2), 1e-30
    dx, _ = reference.backward(dy, x, gamma, eps)
    want, _ = reference.backward(dy.double(), x.double(), gamma.double(), eps)
    close(dx.double(), want, atol=0, rtol=1e-5)


def test_any_layout_gives_the_numbers_of_a_contiguous_copy():
    """Transposed, sliced and expanded inputs are read by their strides."""
    base = torch.arange(1.0, 49, dtype=torch.float64).reshape(2, 4, 6)
    for x in (base.transpose(0, 2), base[:, ::2, 1:5], base[:1].expand(3, 4, 6)):
        gamma = torch.arange(1.0, 2 * x.shape[-1] + 1, dtype=torch.float64)[::2]
        close(reference.forward(x, gamma, 1e-6), reference.forward(x.contiguous(), gamma.contiguous(), 1e-6))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows_give_empty_results_and_a_zero_dgamma(shape):
    """An empty batch is a batch."""
    x = torch.empty(shape)
    dx, dgamma = reference.backward(x, x, torch.ones(8), 1e-6)
    assert reference.forward(x, torch.ones(8), 1e-6).shape == dx.shape == torch.Size(shape)
    assert torch.equal(dgamma, torch.zeros(8))


@pytest.mark.parametrize(
    ("x", "gamma", "says"),
    [
        (torch.ones(2, 2, dtype=torch.int64), None, "x has dtype torch.int64"),
        (torch.ones(2, 2, dtype=torch.complex64), None, "x has dtype torch.complex64"),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), "gamma has dtype torch.int32"),
        (torch.ones(2, 3), torch.ones(2), r"gamma has shape \(2,\): it must be \(3,\)"),
        (torch.ones(2, 3), torch.ones(1), r"gamma has shape \(1,\): it must be \(3,\)"),
        (torch.tensor(1.0), None, "x has 0 dimensions"),
        (torch.ones(3, 0), None, "a row needs at least 1 column"),
        (torch.ones(2, 2).to_sparse(), None, "x has layout torch.sparse_coo"),
        ([[1.0]], None, "x is a list"),
    ],
)
def test_the_named_reference_refuses_what_has_no_meaning(x, gamma, says):
    """What the formula does not cover is refused by name; a gamma that would broadcast is not stretched."""
    with pytest.raises(ContractError, match=says):
        implementation("reference").call(x, gamma, 1e-6)
