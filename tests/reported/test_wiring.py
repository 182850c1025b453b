"""Reports about the autograd wrapper: gradients that are missing, not asked for, or kept for ever."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rmsnorm_cli.gates.arena import Arena
from rmsnorm_cli.kernels import RMSNorm, fused, rms_norm, rowwise
from rmsnorm_cli.kernels.contract import INTERPRETED


@pytest.mark.case("B44")
def test_gamma_gets_its_gradient_and_learns(impl, tensor, same):
    """Norms whose backward gave nothing for gamma stayed frozen for whole runs."""
    x, gamma = tensor([[3.0, 4.0], [6.0, 8.0]]), torch.nn.Parameter(tensor([1.0, 1.0], grad=False))
    optimizer = torch.optim.SGD([gamma], lr=0.5)
    rms_norm(x, gamma, impl=impl).backward(tensor([[1.0, 0.0], [0.0, 1.0]], grad=False))
    same(gamma.grad, [0.84852810, 1.13137084])
    same(x.grad, [[0.18101934, -0.13576449], [-0.06788225, 0.05091169]])
    optimizer.step()
    same(gamma, [1 - 0.42426405, 1 - 0.56568542])


@pytest.mark.case("B44")
@pytest.mark.parametrize("name", ["Adam", "SGD", "AdamW"])
def test_every_weight_of_a_stack_of_norms_moves_at_every_step(name, impl, device):
    """Three norms and a frozen one among linear layers: only the frozen one stays, at each of three steps."""
    torch.manual_seed(0)
    norms = [RMSNorm(6, device=device, impl=impl) for _ in range(4)]
    norms[2].weight.requires_grad_(False)
    layers = [layer for norm in norms for layer in (torch.nn.Linear(6, 6, device=device), norm)]
    network = torch.nn.Sequential(*layers)
    optimizer = getattr(torch.optim, name)([p for p in network.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        before = [norm.weight.detach().clone() for norm in norms]
        optimizer.zero_grad()
        (network(torch.randn(5, 6, device=device)) * torch.arange(1.0, 7, device=device)).square().mean().backward()
        optimizer.step()
        moved = [not torch.equal(norm.weight, was) for norm, was in zip(norms, before, strict=True)]
        assert moved == [True, True, False, True]
    assert norms[2].weight.grad is None


@pytest.mark.case("B46")
@pytest.mark.parametrize("N", [2, 257, 4096])
@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("gamma_grad", [True, False])
def test_what_is_asked_for_equals_the_full_run_and_the_rest_is_none(gamma_grad, x_grad, N, impl, device, gradients):
    draws = torch.Generator().manual_seed(N)
    x, gamma, dy = (torch.randn(*shape, generator=draws).to(device) for shape in ((3, N), (N,), (3, N)))
    y, dx, dgamma = gradients(x, gamma, dy, impl)
    leaf, weights = x.clone().requires_grad_(x_grad), gamma.clone().requires_grad_(gamma_grad)
    again = rms_norm(leaf, weights, impl=impl)
    assert torch.equal(again, y)
    assert again.requires_grad == (x_grad or gamma_grad)
    if again.requires_grad:
        again.backward(dy)
    for asked, got, want in ((x_grad, leaf.grad, dx), (gamma_grad, weights.grad, dgamma)):
        if asked:
            torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
        else:
            assert got is None


@pytest.mark.case("B46")
def test_no_gamma_is_a_gamma_of_ones(free, device, gradients):
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(2)).to(device)
    dy = x.flip(0)
    y, dx, none = gradients(x, None, dy, free)
    same_y, same_dx, _ = gradients(x, torch.ones(33, device=device), dy, free)
    assert none is None
    torch.testing.assert_close(y, same_y, atol=0, rtol=1e-6)
    torch.testing.assert_close(dx, same_dx, atol=1e-6, rtol=1e-5)


@pytest.mark.case("B46")
@pytest.mark.parametrize("module", [rowwise, fused], ids=["rowwise", "fused"])
@pytest.mark.parametrize("N", [24, 3000])
def test_a_frozen_gamma_allocates_no_partial_sums(module, N, device):
    """Nothing beside dx is allocated by a backward without dgamma, and with it something is."""
    x, gamma = torch.randn(20, N, device=device), torch.ones(N, device=device)
    _, rstd = module.forward(x, gamma, 1e-6)
    with Arena("nan") as frozen:
        dx, _ = module.backward(x, x, gamma, rstd, need_dgamma=False)
    assert [block.tensor.data_ptr() for block in frozen.blocks] == [dx.data_ptr()]
    with Arena("nan") as trained:
        module.backward(x, x, gamma, rstd)
    assert trained.served >= 2


def still_there(x, y):
    """Return whether the memory of x outlives y and every name for it."""
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, y)]


@pytest.mark.case("B47")
@pytest.mark.parametrize("used", ["dropped", "differentiated", "differentiated twice", "checkpointed"])
def test_what_a_forward_saved_goes_with_its_result(used, impl, device):
    """Compiled, without the collector of cycles: x, y and what was saved are free as soon as y is dropped."""
    gamma = torch.ones(16, device=device, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            x = torch.ones(8, 16, device=device, requires_grad=True) * 1
            if used == "checkpointed":
                y = checkpoint(lambda x: rms_norm(x, gamma, impl=impl), x, use_reentrant=False)
            else:
                y = rms_norm(x, gamma, impl=impl)
            refs = still_there(x, y)
            if used != "dropped":
                y.sum().backward(retain_graph=used.endswith("twice"))
            if used.endswith("twice"):
                y.sum().backward()
            del x, y
            if INTERPRETED:
                gc.collect()  # the interpreter itself leaves cycles behind each launch
            assert all(ref.expired() for ref in refs)
    finally:
        gc.enable()


@pytest.mark.case("B47")
@pytest.mark.gpu
@pytest.mark.parametrize("used", ["dropped", "checkpointed"])
def test_memory_after_two_hundred_calls_is_that_after_five(used, impl, device):
    gamma = torch.ones(1024, device=device, requires_grad=True)
    x = torch.randn(4096, 1024, device=device, requires_grad=True)
    for step in range(200):
        if used == "dropped":
            rms_norm(x, gamma, impl=impl)
        else:
            checkpoint(lambda t: rms_norm(t * 1.5, gamma, impl=impl), x, use_reentrant=False).sum().backward()
            x.grad = gamma.grad = None
        if step == 5:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
