"""The wiring: what is asked for is computed, what is not is skipped, everything is counted, nothing is overwritten."""

import threading
from dataclasses import replace

import pytest
import torch

from rmsnorm_cli.kernels import (
    ContractError,
    KernelPair,
    counters,
    differentiable,
    fused,
    reference,
    reset_counters,
    rms_norm,
    rowwise,
)
from rmsnorm_cli.kernels.api import FUSED

close = torch.testing.assert_close
X, DY = [[3.0, 4.0], [6.0, 8.0]], [[1.0, 0.0], [0.0, 1.0]]
DX, DGAMMA = [[0.18101934, -0.13576449], [-0.06788225, 0.05091169]], [0.84852810, 1.13137084]


@pytest.fixture(autouse=True)
def _fresh_counters():
    reset_counters()


def leaves(device: str, x_grad: bool = True, gamma_grad: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.tensor(X, device=device, requires_grad=x_grad),
        torch.tensor([1.0, 1.0], device=device, requires_grad=gamma_grad),
    )


def events(name: str) -> dict[str, int]:
    return counters().get(name, {})


both = pytest.mark.parametrize("impl", ["rowwise", "fused"])  # our kernels


@pytest.mark.parametrize(("x_grad", "gamma_grad"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("impl", ["reference", "rowwise"])
def test_only_what_needs_a_gradient_gets_one(impl, x_grad, gamma_grad, device):
    """Needed gradients are those of the full run, the others None, for each combination of frozen operands."""
    x, gamma = leaves(device, x_grad, gamma_grad)
    rms_norm(x, gamma, impl=impl).backward(torch.tensor(DY, device=device))
    for leaf, needed, want in ((x, x_grad, DX), (gamma, gamma_grad, DGAMMA)):
        assert (leaf.grad is not None) == needed
        if needed:
            close(leaf.grad, torch.tensor(want, device=device), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("x_grad", "gamma_grad"), [(True, True), (True, False), (False, True)])
def test_the_launcher_is_told_what_is_needed(x_grad, gamma_grad, device):
    """A frozen gamma must not cost its partial sums: the backward launcher hears it."""
    asked: list[tuple[bool, bool]] = []

    def backward(*operands, need_dx, need_dgamma):
        asked.append((need_dx, need_dgamma))
        return rowwise.backward(*operands, need_dx=need_dx, need_dgamma=need_dgamma)

    norm = differentiable(KernelPair("spied", rowwise.forward, backward))
    norm(*leaves(device, x_grad, gamma_grad), 1e-6).backward(torch.tensor(DY, device=device))
    assert asked == [(x_grad, gamma_grad)]


def test_the_launcher_is_told_that_no_derivative_can_follow(device):
    """Rstd is not kept where nothing differentiates, by the forward that the pair has, and is kept everywhere else."""
    asked: list[dict[str, bool]] = []

    def forward(*operands, **options):
        asked.append(options)
        return fused.forward(*operands, **options)

    norm = differentiable(replace(FUSED, name="spied", forward=forward))
    norm(*leaves(device), 1e-6)
    norm(*leaves(device, False, False), 1e-6)
    with torch.no_grad():
        norm(*leaves(device), 1e-6)
    assert asked == [{}, {"need_rstd": False}, {"need_rstd": False}]


@both
def test_no_gradient_no_graph(impl, device):
    """Frozen operands, no_grad and inference_mode run the forward alone."""
    frozen = rms_norm(*leaves(device, False, False), impl=impl)
    with torch.no_grad():
        quiet = rms_norm(*leaves(device), impl=impl)
    with torch.inference_mode():
        inferred = rms_norm(*leaves(device), impl=impl)
    assert not any(y.requires_grad for y in (frozen, quiet, inferred))
    assert torch.equal(frozen, quiet)
    assert torch.equal(frozen, inferred.clone())
    assert events(impl) == {"forward": 3, "backward": 0, "double_backward": 0, "copies": 0}


def test_counters_count_calls_by_implementation(device):
    """Forward and backward calls are counted apart for each implementation, and forgotten on reset."""
    for impl, times in (("rowwise", 3), ("reference", 2)):
        for _ in range(times):
            rms_norm(*leaves(device), impl=impl).sum().backward()
        rms_norm(*leaves(device), impl=impl)
    assert {name: (seen["forward"], seen["backward"]) for name, seen in counters().items()} == {
        "rowwise": (4, 3),
        "reference": (3, 2),
    }
    counters()["rowwise"]["forward"] = 99  # a copy
    assert events("rowwise")["forward"] == 4
    reset_counters()
    assert counters() == {}


@both
def test_counting_loses_nothing_between_threads(impl, device):
    """Sixteen threads that call at once are all counted: the backward of a GPU graph runs in a thread of its own."""

    def work():
        for _ in range(10):
            rms_norm(*leaves(device), impl=impl).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (events(impl)["forward"], events(impl)["backward"]) == (160, 160)


@both
def test_a_refused_call_is_not_counted(impl, device):
    """The counters prove that kernels ran, so a refusal leaves them alone."""
    with pytest.raises(ContractError):
        rms_norm(torch.ones(1, 4, device=device), torch.ones(3, device=device), impl=impl)
    assert counters() == {}


def test_gradients_of_any_layout_give_the_same_bits(device):
    """A sliced, transposed or expanded dy is copied by the teaching kernel's wrapper and counted, and never written."""
    x, gamma = torch.randn(5, 33, device=device, requires_grad=True), torch.randn(33, device=device, requires_grad=True)
    wide = torch.randn(5, 66, device=device)
    for dy, copies in (
        (wide[:, :33].contiguous(), 0),
        (wide[:, :33], 1),
        (wide[:, ::2], 1),
        (wide[:, :33].t().contiguous().t(), 1),
        (wide[:1, :33].expand(5, 33), 1),
        (wide[:, :1].expand(5, 33), 1),
    ):
        reset_counters()
        before = dy.clone()
        got = torch.autograd.grad(rms_norm(x, gamma, impl="rowwise"), (x, gamma), dy)
        want = torch.autograd.grad(rms_norm(x, gamma, impl="rowwise"), (x, gamma), before.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(dy, before)
        assert events("rowwise")["copies"] == copies


@both
def test_gradients_accumulate(impl, device):
    """An x used twice and two steps without zero_grad give sums."""
    x, gamma = leaves(device)
    (rms_norm(x, gamma, impl=impl) + rms_norm(x, gamma, impl=impl)).backward(torch.tensor(DY, device=device))
    close(x.grad, 2 * torch.tensor(DX, device=device), atol=2e-6, rtol=0)
    rms_norm(x, gamma, impl=impl).backward(torch.tensor(DY, device=device))
    close(gamma.grad, 3 * torch.tensor(DGAMMA, device=device), atol=3e-6, rtol=0)


@both
def test_saved_tensors_are_what_the_backward_needs_and_no_more(impl, device):
    """One x, one gamma and an fp32 rstd a row are kept, through save_for_backward, which hooks can see."""
    kept: list[torch.Tensor] = []
    x, gamma = leaves(device)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = rms_norm(x, gamma, impl=impl)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in kept] == [
        ((2, 2), torch.float32),
        ((2,), torch.float32),
        ((2,), torch.float32),
    ]
    y.sum().backward()


@both
def test_checkpointing_runs_the_forward_again(impl, device):
    """Under activation checkpointing the gradients are the same, and the counters say that it ran twice."""
    x, gamma = leaves(device)
    y = torch.utils.checkpoint.checkpoint(rms_norm, x, gamma, 1e-6, impl, use_reentrant=False)
    y.backward(torch.tensor(DY, device=device))
    close(x.grad, torch.tensor(DX, device=device), atol=1e-6, rtol=0)
    assert (events(impl)["forward"], events(impl)["backward"]) == (2, 1)


def test_rowwise_refuses_a_second_derivative_by_name(device):
    """create_graph gives the first derivative; differentiating that is refused rather than silently wrong."""
    x, gamma = leaves(device)
    y = rms_norm(x, gamma, impl="rowwise")
    (dx,) = torch.autograd.grad(y, x, torch.tensor(DY, device=device), create_graph=True)
    close(dx, torch.tensor(DX, device=device), atol=1e-6, rtol=0)
    with pytest.raises(ContractError, match=r"rowwise has no second derivative.*impl='reference'"):
        dx.sum().backward()
    assert events("rowwise") == {"forward": 1, "backward": 1, "double_backward": 0, "copies": 0}


def doubled():
    """Return a float64 pair without kernels whose second derivative comes from the reference, as a fused one's does."""

    def forward(x, gamma, eps):
        return reference.forward(x, gamma, eps), reference.statistics(x, eps)

    def backward(dy, x, gamma, rstd, *, need_dx, need_dgamma):
        dx, dgamma = reference.backward(dy, x, gamma, 1e-4)
        return dx if need_dx else None, dgamma if need_dgamma else None

    return differentiable(KernelPair("doubled", forward, backward, contiguous_dy=False, second_derivative=True))


@pytest.mark.parametrize(("affine", "frozen"), [(True, None), (True, "x"), (True, "gamma"), (False, None)])
def test_second_derivative_of_a_pair_that_has_one(affine, frozen):
    """gradgradcheck passes through the wrapper, also where dy itself depends on x, and each is counted."""  # noqa: D403
    generator = torch.Generator().manual_seed(3)
    x = 1e-2 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    gamma = torch.randn(5, generator=generator, dtype=torch.float64) if affine else None
    operands = [t for t in (x, gamma) if t is not None]
    for name, operand in zip(("x", "gamma"), operands, strict=False):
        operand.requires_grad_(name != frozen)
    norm = doubled()
    squared = lambda x, gamma=None: norm(x, gamma, 1e-4).pow(3)  # noqa: E731  # so that dy depends on x
    assert torch.autograd.gradcheck(squared, operands)
    assert torch.autograd.gradgradcheck(squared, operands)
    assert events("doubled")["double_backward"] > 0


def test_third_derivative_follows_from_the_second():
    """The second derivative is itself differentiable: it agrees with autograd through the reference."""
    x = torch.tensor([[0.03, -0.01, 0.02]], dtype=torch.float64, requires_grad=True)
    gamma = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64, requires_grad=True)

    def third(norm):
        (first,) = torch.autograd.grad(norm(x, gamma, 1e-4).pow(2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(second.sum(), (x, gamma))

    for got, want in zip(third(doubled()), third(reference.forward), strict=True):
        close(got, want, atol=1e-6, rtol=1e-9)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x, g: f(x, g).sum())])
def test_function_transforms_are_refused_by_name_and_work_on_the_reference(transform, device):
    """vmap hides a dimension that the kernel would not see; the reference takes it."""  # noqa: D403
    x, gamma = torch.randn(3, 4, 5, device=device), torch.ones(3, 5, device=device)
    batched = transform is torch.func.vmap
    operands = (x, gamma) if batched else (x[0], gamma[0])
    with pytest.raises(ContractError, match=r"rowwise was called inside a torch\.func transform"):
        transform(lambda x, gamma: rms_norm(x, gamma, impl="rowwise"))(*operands)
    assert transform(lambda x, gamma: rms_norm(x, gamma, impl="reference"))(*operands).shape == operands[0].shape


@both
def test_autocast_casts_nothing(impl, device):
    """Under autocast an equal pair gives the same bits, and a mixed pair stays one: `rowwise` refuses it."""
    kind = torch.device(device).type
    x, gamma = torch.randn(3, 5, device=device), torch.randn(5, device=device)
    plain = rms_norm(x, gamma, impl=impl)
    mixed = None if impl == "rowwise" else rms_norm(x.half(), gamma, impl=impl)
    with torch.autocast(kind, dtype=torch.float16 if kind == "cuda" else torch.bfloat16):
        assert torch.equal(rms_norm(x, gamma, impl=impl), plain)
        if mixed is not None:
            assert torch.equal(rms_norm(x.half(), gamma, impl=impl), mixed)
            return
        with pytest.raises(ContractError, match=r"gamma has dtype torch\.float32"):
            rms_norm(x.half(), gamma, impl=impl)


@pytest.mark.case("B55")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for it, and hides the warning
def test_compiled_code_breaks_its_graph_at_the_kernel_and_goes_on(device):
    """Inside torch.compile the kernel runs as it does outside: same values, same gradients, counted."""
    x, gamma = leaves(device)
    step = torch.compile(lambda x, gamma: 2 * rms_norm(x * 1, gamma, impl="rowwise"), backend="eager")
    y = step(x, gamma)
    y.backward(torch.tensor(DY, device=device))
    close(y, 2 * rms_norm(x, gamma, impl="rowwise"))
    close(x.grad, 2 * torch.tensor(DX, device=device), atol=2e-6, rtol=0)
    assert events("rowwise")["backward"] == 1


@pytest.mark.case("B49")
@pytest.mark.gpu2
@both
def test_backward_from_another_thread_on_a_gpu_that_is_not_current(impl):
    """Forward, backward and all buffers stay on the GPU of the tensors, whatever thread and device are current."""
    x, gamma = leaves("cuda:1")
    x2 = torch.tensor([[3.0, 4.0], [1.0, 7.0]], device="cuda:1", requires_grad=True)
    with torch.cuda.device(0):
        before = torch.cuda.memory_allocated(0)
        y = rms_norm(x, gamma, impl=impl)
        thread = threading.Thread(target=y.backward, args=(torch.tensor(DY, device="cuda:1"),))
        thread.start()
        thread.join()
        rms_norm(x2, gamma, impl=impl).sum().backward()
        assert torch.cuda.current_device() == 0
        assert torch.cuda.memory_allocated(0) == before
    close(x.grad.cpu(), torch.tensor(DX), atol=1e-6, rtol=0)
    with pytest.raises(ContractError, match=r"gamma is on cuda:0.*cuda:1"):
        rms_norm(x, gamma.detach().to("cuda:0"), impl=impl)
