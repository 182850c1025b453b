"""Public bug reports about dtypes, aliasing, autograd and empty inputs of a fused norm; each stands for a kind.

Each docstring says what went wrong there. Run for `reference` and `rowwise`: a layout or dtype that the teaching kernel
does not take must be refused, which is an answer too.
"""

import pytest
import torch

from rmsnorm_cli.kernels import ContractError, rms_norm

both = pytest.mark.parametrize("impl", ["reference", "rowwise"])


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gamma_dtype", [torch.float32, torch.float16, torch.bfloat16])
@both
def test_mixed_dtypes_follow_one_rule_or_are_refused_by_name(impl, x_dtype, gamma_dtype, device):
    """A bfloat16 x with a float32 gamma came back as float32 and broke the next matmul."""
    x = torch.ones(2, 4, dtype=x_dtype, device=device, requires_grad=True)
    gamma = torch.ones(4, dtype=gamma_dtype, device=device, requires_grad=True)
    if impl == "rowwise" and torch.bfloat16 in (x_dtype, gamma_dtype):
        with pytest.raises(ContractError, match="has dtype torch"):
            rms_norm(x, gamma, impl=impl)
    elif impl == "rowwise" and x_dtype != gamma_dtype:
        with pytest.raises(ContractError, match=f"gamma has dtype {gamma_dtype}.*{x_dtype}"):
            rms_norm(x, gamma, impl=impl)
    else:
        y = rms_norm(x, gamma, impl=impl)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype, gamma.grad.dtype) == (x_dtype, x_dtype, gamma_dtype)


@both
def test_the_incoming_gradient_is_never_written(impl, tensor, same):
    """Written over by dx, it corrupts the residual branch that shares it: [-0.181, 0.136]."""
    h, gamma = tensor([[3.0, 4.0]]), tensor([1.0, 1.0])
    out = h + rms_norm(h, gamma, impl=impl)
    kept: list[torch.Tensor] = []
    out.register_hook(kept.append)
    (out * tensor([[1.0, 2.0]], grad=False)).sum().backward()
    same(h.grad, [[0.90949037, 2.06788229]])
    same(kept[0], [[1.0, 2.0]], atol=0, rtol=0)


@both
def test_one_gradient_may_be_used_twice(impl, tensor, same):
    """Two backwards over one kept graph give equal results that share no memory, and leave dy alone."""
    x, gamma, dy = tensor([[3.0, 4.0]]), tensor([1.0, 1.0]), tensor([[1.0, 2.0]], grad=False)
    y = rms_norm(x, gamma, impl=impl)
    (first,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(first, second)
    assert len({tensor.data_ptr() for tensor in (first, second, dy)}) == 3
    same(dy, [[1.0, 2.0]], atol=0, rtol=0)


@both
@pytest.mark.parametrize("which", ["x", "gamma"])
def test_an_operand_changed_in_place_is_noticed(impl, which, tensor):
    """Kept as a plain attribute, the changed operand silently gave the gradient of the new one."""
    operands = {"x": tensor([[3.0, 4.0]]) * 1, "gamma": tensor([1.0, 1.0]) * 1}
    y = rms_norm(operands["x"], operands["gamma"], impl=impl)
    operands[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@both
def test_gamma_gets_its_gradient_and_learns(impl, tensor, same):
    """Norms whose backward gave nothing for gamma stayed frozen for whole runs."""
    x, gamma = tensor([[3.0, 4.0], [6.0, 8.0]]), torch.nn.Parameter(tensor([1.0, 1.0], grad=False))
    optimizer = torch.optim.SGD([gamma], lr=0.5)
    rms_norm(x, gamma, impl=impl).backward(tensor([[1.0, 0.0], [0.0, 1.0]], grad=False))
    same(gamma.grad, [0.84852810, 1.13137084])
    same(x.grad, [[0.18101934, -0.13576449], [-0.06788225, 0.05091169]])
    optimizer.step()
    same(gamma, [1 - 0.42426405, 1 - 0.56568542])


@both
@pytest.mark.parametrize("eps", [1, 1.0])
def test_an_integer_eps_is_the_number_it_names(impl, eps, tensor, same):
    """Specialised as an integer, or half-typed, it arrived as 0; alternating values must work at once."""
    x, gamma = tensor([[3.0, 4.0]]), tensor([1.0, 1.0])
    same(rms_norm(x, gamma, eps, impl=impl), [[0.81649658, 1.08866211]])
    same(rms_norm(x, gamma, 1e-6, impl=impl), [[0.84852810, 1.13137080]])
    same(rms_norm(x, gamma, eps, impl=impl), [[0.81649658, 1.08866211]])


@both
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


@both
def test_no_columns_and_no_dimensions_are_refused(impl, device):
    """(3, 0) and a scalar have no row to take a mean of."""
    with pytest.raises(ContractError, match="at least 1 column"):
        rms_norm(torch.ones(3, 0, device=device), torch.ones(0, device=device), impl=impl)
    with pytest.raises(ContractError, match="0 dimensions"):
        rms_norm(torch.tensor(1.0, device=device), torch.ones(1, device=device), impl=impl)
