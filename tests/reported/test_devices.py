"""Reports about devices: another GPU than the current one, and tensors that lie where no kernel reaches them."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rmsnorm_cli.kernels import ContractError, RMSNorm, rms_norm

X, GAMMA = [[3.0, 4.0], [1.0, 7.0]], [2.0, 0.5]


@pytest.mark.case("B49")
@pytest.mark.gpu2
@pytest.mark.parametrize("elsewhere", [False, True], ids=["this thread", "another thread"])
@pytest.mark.parametrize("N", [2, 257, 4096])
def test_everything_happens_on_the_gpu_of_x(N, elsewhere, impl, device, same):
    """The same bits as on GPU 0, every tensor on GPU 1, not a byte on GPU 0, which stays the current one."""
    draws = torch.Generator().manual_seed(N)
    values = torch.randn(3, N, generator=draws) if N > 2 else torch.tensor(X)
    weights = torch.randn(N, generator=draws) if N > 2 else torch.tensor(GAMMA)
    found = {}
    for index in (0, 1):
        x = values.to(f"cuda:{index}").requires_grad_()
        gamma = weights.to(f"cuda:{index}").requires_grad_()
        with torch.cuda.device(0):
            torch.cuda.synchronize(0)
            before = torch.cuda.memory_allocated(0)
            y = rms_norm(x, gamma, impl=impl)

            def backward(y=y):
                y.sum().backward()

            if elsewhere:
                worker = threading.Thread(target=backward)
                worker.start()
                worker.join()
            else:
                backward()
            assert torch.cuda.current_device() == 0
            if index == 1:
                assert torch.cuda.memory_allocated(0) == before
        assert {tensor.device.index for tensor in (y, x.grad, gamma.grad)} == {index}
        found[index] = [tensor.detach().cpu() for tensor in (y, x.grad, gamma.grad)]
        del y, backward  # what they hold on GPU 0 must not be freed while GPU 1 is asked
    for left, right in zip(found[0], found[1], strict=True):
        assert torch.equal(left, right)
    if N == 2:
        same(found[1][1], [[0.29415643, -0.22061728], [0.37799999, -0.05399999]])


@pytest.mark.case("B49")
@pytest.mark.gpu2
def test_operands_on_two_gpus_are_refused_by_name(impl):
    with pytest.raises(ContractError, match="gamma is on cuda:1: it must be where x is, on cuda:0"):
        rms_norm(torch.ones(2, 4, device="cuda:0"), torch.ones(4, device="cuda:1"), impl=impl)


@pytest.mark.case("B50")
@pytest.mark.gpu
def test_a_cpu_tensor_beside_a_gpu_tensor_is_refused_by_name(impl):
    with pytest.raises(ContractError, match="gamma is on cpu: it must be where x is, on cuda:0"):
        rms_norm(torch.ones(2, 4, device="cuda:0"), torch.ones(4), impl=impl)
    with pytest.raises(ContractError, match="gamma is on cuda:0: it must be where x is, on cpu"):
        rms_norm(torch.ones(2, 4), torch.ones(4, device="cuda:0"), impl=impl)


@pytest.mark.case("B50")
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rowwise", "fused"])
def test_cpu_tensors_on_a_gpu_machine_are_refused_with_the_way_out(name):
    with pytest.raises(ContractError, match=r"x is on cpu: .*TRITON_INTERPRET=1"):
        rms_norm(torch.ones(2, 4), torch.ones(4), impl=name)
    assert torch.equal(rms_norm(torch.ones(2, 4), torch.ones(4), impl="reference"), torch.full((2, 4), 0.9999995))


@pytest.mark.case("B50")
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("door", ["function", "module"])
def test_an_offloaded_gamma_is_refused_by_name_also_when_the_call_is_known(door, warm, impl, device):
    """A meta tensor has shape, strides and dtype, and no number: a plan kept for such a call must not take it."""
    x, norm = torch.ones(2, 4, device=device), RMSNorm(4, device=device, impl=impl)
    if warm:
        norm(x)
    gamma = torch.nn.Parameter(torch.empty(4, device="meta"))
    norm.weight = gamma
    call = norm if door == "module" else lambda x: rms_norm(x, gamma, impl=impl)
    with pytest.raises(ContractError, match=f"gamma is on meta: it must be where x is, on {device}"):
        call(x)


@pytest.mark.case("B50")
@pytest.mark.parametrize("name", ["rowwise", "fused"])
@pytest.mark.parametrize("gradient", [False, True])
def test_a_meta_or_sparse_x_is_refused_by_name(name, gradient, device):
    gamma = torch.ones(4, device=device, requires_grad=gradient)
    rms_norm(torch.ones(2, 4, device=device), gamma, impl=name)
    with pytest.raises(ContractError, match=r"x is on meta|gamma is on .*, on meta"):
        rms_norm(torch.empty(2, 4, device="meta"), gamma, impl=name)
    with pytest.raises(ContractError, match="x is on meta"):
        rms_norm(torch.empty(2, 4, device="meta"), torch.empty(4, device="meta", requires_grad=gradient), impl=name)
    with pytest.raises(ContractError, match=r"x has layout torch\.sparse_coo"):
        rms_norm(torch.ones(2, 4, device=device).to_sparse(), gamma, impl=name)


@pytest.mark.case("B50")
@pytest.mark.parametrize("name", ["rowwise", "fused"])
@pytest.mark.parametrize("of", ["x", "gamma"])
@pytest.mark.parametrize("warm", [False, True])
def test_memory_that_was_freed_is_refused_by_name(warm, of, name, device):
    """A sharded weight keeps its shape between forwards and loses its memory: a kernel would read address 0."""
    given = {"x": torch.ones(2, 4, device=device), "gamma": torch.ones(4, device=device)}
    if warm:
        rms_norm(given["x"], given["gamma"], impl=name)
    given[of].untyped_storage().resize_(0)
    with pytest.raises(ContractError, match=f"{of} is a Tensor without memory: it was freed"):
        rms_norm(given["x"], given["gamma"], impl=name)


@pytest.mark.filterwarnings("ignore")  # of prototypes and of what is deprecated
@pytest.mark.case("B50")
@pytest.mark.parametrize("name", ["rowwise", "fused"])
def test_a_tensor_whose_numbers_lie_elsewhere_is_refused_by_name(name, device):
    """Masked and fake tensors have shape and dtype, and no address."""
    gamma = torch.ones(4, device=device)
    masked = torch.masked.masked_tensor(torch.ones(2, 4, device=device), torch.ones(2, 4, device=device) > 0)
    with pytest.raises(ContractError, match="x is a MaskedTensor without memory"):
        rms_norm(masked, gamma, impl=name)
    with FakeTensorMode():
        x, weight = torch.empty(2, 4, device=device), torch.empty(4, device=device)
        with pytest.raises(ContractError, match="x is a FakeTensor without memory"):
            rms_norm(x, weight, impl=name)


@pytest.mark.filterwarnings("ignore")  # of prototypes and of what is deprecated
@pytest.mark.case("B50")
def test_rows_of_different_lengths_are_refused_by_name(impl, device):
    rows = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], device=device)
    with pytest.raises(ContractError, match="x is a nested tensor"):
        rms_norm(rows, torch.ones(4, device=device), impl=impl)
