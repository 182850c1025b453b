"""Reports about memory that two owners share: gradients written over, operands changed between the passes."""

import pytest
import torch

from rmsnorm_cli.kernels import RMSNorm, reference, rms_norm


@pytest.mark.case("B41")
def test_the_incoming_gradient_is_never_written(impl, tensor, same):
    """Written over by dx, it corrupts the residual branch that shares it: [-0.181, 0.136]."""
    h, gamma = tensor([[3.0, 4.0]]), tensor([1.0, 1.0])
    out = h + rms_norm(h, gamma, impl=impl)
    kept: list[torch.Tensor] = []
    out.register_hook(kept.append)
    (out * tensor([[1.0, 2.0]], grad=False)).sum().backward()
    same(h.grad, [[0.90949037, 2.06788229]])
    same(kept[0], [[1.0, 2.0]], atol=0, rtol=0)


@pytest.mark.case("B41")
def test_one_gradient_may_be_used_twice(impl, tensor, same):
    """Two backwards over one kept graph give equal results that share no memory, and leave dy alone."""
    x, gamma, dy = tensor([[3.0, 4.0]]), tensor([1.0, 1.0]), tensor([[1.0, 2.0]], grad=False)
    y = rms_norm(x, gamma, impl=impl)
    (first,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(first, second)
    assert len({tensor.data_ptr() for tensor in (first, second, dy)}) == 3
    same(dy, [[1.0, 2.0]], atol=0, rtol=0)


@pytest.mark.case("B41")
@pytest.mark.parametrize("N", [8, 257, 4096])
@pytest.mark.parametrize("expanded", [False, True])
def test_neither_pass_writes_to_its_inputs(N, expanded, impl, device):
    """x, gamma and dy keep their bits, NaN payloads included, and no result lies in their memory."""
    x = torch.randn(5, N, generator=torch.Generator().manual_seed(N)).to(device)
    x[3, -1] = float("nan")
    gamma, dy = torch.linspace(-1, 1, N, device=device), torch.ones(5, 1, device=device)
    dy = dy.expand(5, N) if expanded else dy.expand(5, N).contiguous()
    kept = [tensor.clone() for tensor in (x, gamma, dy)]
    leaves = x.requires_grad_(), gamma.requires_grad_()
    y = rms_norm(*leaves, impl=impl)
    dx, dgamma = torch.autograd.grad(y, leaves, dy)
    for now, before in zip((x, gamma, dy), kept, strict=True):
        assert torch.equal(now.detach().view(torch.int32), before.view(torch.int32))
    places = [t.untyped_storage().data_ptr() for t in (x, gamma, dy, y, dx, dgamma)]
    assert len(set(places)) == 6


@pytest.mark.case("B41")
def test_two_norms_that_share_one_gradient(impl, tensor, same):
    """The sum of two branches hands the same dy to both."""
    x, gamma, weights = tensor([[3.0, 4.0]]), tensor([1.0, 1.0]), tensor([[1.0, 2.0]], grad=False)
    ((rms_norm(x, gamma, impl=impl) + rms_norm(2 * x, gamma, impl=impl)) * weights).sum().backward()
    same(x.grad, [[-0.09050963 * 2, 0.06788229 * 2]], atol=2e-6)


@pytest.mark.case("B43")
@pytest.mark.parametrize("which", ["x", "gamma"])
def test_an_operand_changed_in_place_is_noticed(impl, which, tensor):
    """Kept as a plain attribute, the changed operand silently gave the gradient of the new one."""
    operands = {"x": tensor([[3.0, 4.0]]) * 1, "gamma": tensor([1.0, 1.0]) * 1}
    y = rms_norm(operands["x"], operands["gamma"], impl=impl)
    operands[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def through_view(t):
    t[:1].mul_(3)


def through_base(t):
    t._base.add_(1)


CHANGES = {
    "added to": lambda t: t.add_(1),
    "a view of it": through_view,
    "one element": lambda t: t.view(-1).__setitem__(0, 7.0),
    "copied over": lambda t: t.copy_(torch.zeros_like(t)),
    "zeroed": lambda t: t.zero_(),
    "under no_grad": lambda t: torch.no_grad()(t.add_)(1),
}


@pytest.mark.case("B43")
@pytest.mark.parametrize("which", ["x", "gamma"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_way_to_change_an_operand_is_noticed(change, which, impl, tensor):
    operands = {"x": tensor([[3.0, 4.0], [1.0, 2.0]]) * 1, "gamma": tensor([1.0, 1.0]) * 1}
    y = rms_norm(operands["x"], operands["gamma"], impl=impl)
    CHANGES[change](operands[which])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.case("B43")
def test_a_change_through_the_base_of_a_view_is_noticed(impl, device):
    """X is a slice of a larger tensor, and the larger one is changed elsewhere: one version counter serves both."""
    base = torch.ones(4, 8, device=device, requires_grad=True) * 1
    y = rms_norm(base[:2], torch.ones(8, device=device), impl=impl)
    base.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.case("B43")
def test_a_weight_that_an_optimizer_moved_between_the_passes_is_noticed(impl, device):
    norm = RMSNorm(4, device=device, impl=impl)
    y = norm(torch.ones(2, 4, device=device, requires_grad=True) * 1)
    norm.weight.grad = torch.ones_like(norm.weight)
    torch.optim.SGD(norm.parameters(), lr=0.5).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.case("B43")
@pytest.mark.parametrize("N", [2, 257])
def test_a_change_of_y_does_not_reach_the_gradient(N, impl, device):
    """An activation may work in place on y: the backward uses x and rstd, and is right."""
    x = torch.randn(3, N, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    y = rms_norm(x, torch.ones(N, device=device), impl=impl)
    y.mul_(2)
    y.sum().backward()
    want = reference.backward(torch.full((3, N), 2.0), x.detach().cpu(), torch.ones(N), 1e-6)[0]
    torch.testing.assert_close(x.grad.cpu(), want, atol=5e-6, rtol=1e-5)
