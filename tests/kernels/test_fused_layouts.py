"""The fused implementation on tensors as networks hand them over: strides, slices, expanded gradients, operators."""

import pytest
import torch

from rmsnorm_cli.kernels import RMSNorm, counters, reference, reset_counters, rms_norm
from rmsnorm_cli.kernels.contract import INTERPRETED
from rmsnorm_cli.kernels.rowlayout import Rows, alignment, describe, walking_order

close = torch.testing.assert_close


def noise(*shape, dtype=torch.float32, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype).to(device)


# Made where they are used: a copy to another device would not keep the strides.
LAYOUTS = {
    "1-D": lambda device: noise(24, device=device),
    "slice of columns": lambda device: noise(5, 40, device=device)[:, 3:27],
    "slice of a fused projection": lambda device: noise(2, 3, 48, device=device)[..., :24],
    "heads (B, H, T, D)": lambda device: noise(2, 5, 3, 24, device=device).transpose(1, 2),
    "transposed rows": lambda device: noise(24, 7, device=device).T,
    "leading dims swapped": lambda device: noise(3, 4, 24, device=device).transpose(0, 1),
    "every other row": lambda device: noise(9, 24, device=device)[::2],
    "every other column": lambda device: noise(5, 48, device=device)[:, ::2],
    "misaligned start": lambda device: noise(1 + 5 * 24, device=device)[1:].view(5, 24),
    "expanded row": lambda device: noise(1, 24, device=device).expand(6, 24),
    "expanded outside": lambda device: noise(3, 24, device=device).expand(4, 3, 24),
    "one number": lambda device: noise(1, device=device).expand(6, 24),
    "no rows": lambda device: noise(0, 24, device=device),
    "three strides": lambda device: noise(4, 6, 8, 24, device=device)[::2, ::2, ::2],
}


@pytest.mark.case("B01", "B02", "B04", "B05")
@pytest.mark.parametrize("dy", ["contiguous", "expanded", "one number", "transposed", "column slice"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_x_and_dy(layout, dy, device):
    """The result is that of contiguous copies, and x, gamma and dy are unchanged."""
    x = LAYOUTS[layout](device)
    gamma = noise(48, device=device)[::2]
    gradients = {
        "contiguous": lambda: noise(*x.shape, seed=1, device=device),
        "expanded": lambda: noise(x.shape[-1], device=device).expand(x.shape),
        "one number": lambda: torch.ones((), device=device).expand(x.shape),
        "transposed": lambda: noise(*reversed(x.shape), device=device).permute(*reversed(range(x.dim()))),
        "column slice": lambda: noise(*x.shape[:-1], 2 * x.shape[-1], device=device)[..., : x.shape[-1]],
    }
    gradient = gradients[dy]()
    kept = [tensor.clone() for tensor in (x, gamma, gradient)]
    leaf, weights = x.detach().requires_grad_(), gamma.detach().requires_grad_()
    y = rms_norm(leaf, weights, 1e-6, "fused")
    got_dx, got_dgamma = torch.autograd.grad(y, (leaf, weights), gradient)
    want_dx, want_dgamma = reference.backward(gradient.double(), x.double(), gamma.double(), 1e-6)
    close(y.double(), reference.forward(x.double(), gamma.double(), 1e-6), atol=1e-6, rtol=1e-5)
    close(got_dx.double(), want_dx, atol=2e-5, rtol=1e-4)
    close(got_dgamma.double(), want_dgamma, atol=2e-5, rtol=1e-4)
    assert all(torch.equal(now, before) for now, before in zip((x, gamma, gradient), kept, strict=True))


@pytest.mark.parametrize(
    ("layout", "copies"),
    [("heads (B, H, T, D)", 0), ("slice of a fused projection", 0), ("transposed rows", 0), ("three strides", 1)],
)
def test_copies_are_counted(layout, copies, device):
    """Two strides or fewer are read where they lie; more cost one copy, which the counter shows."""
    x = LAYOUTS[layout](device)
    reset_counters()
    rms_norm(x, None, 1e-6, "fused")
    assert counters()["fused"]["copies"] == copies


def test_transposed_heads_come_back_as_they_lie(device):
    """Y of (B, H, T, D) heads has x's strides: its rows are walked as they lie in memory."""
    x = noise(2, 5, 3, 24, device=device).transpose(1, 2)
    assert rms_norm(x, None, 1e-6, "fused").stride() == x.stride()


def test_two_strides_and_no_more():
    """A description says how rows lie, merges what one stride serves, and gives up beyond two."""
    assert describe(torch.empty(2, 3, 4), (0, 1)) == Rows(1, 0, 4, 1)
    assert describe(torch.empty(2, 3, 8)[:, :2, :4], (0, 1)) == Rows(2, 24, 8, 1, two=True)
    assert describe(torch.empty(1, 7), (0,)) == Rows(1, 0, 7, 1)
    assert describe(torch.empty(3, 7).expand(2, 3, 7), (0, 1)) == Rows(3, 0, 7, 1, two=True)
    assert describe(torch.empty(8, 8, 8, 4)[::2, ::2, ::2], (0, 1, 2)) is None
    assert walking_order(torch.empty(2, 5, 3, 4).transpose(1, 2)) == (0, 2, 1)
    assert walking_order(torch.empty(8, 8, 8, 4)[::2, ::2, ::2]) is None


def test_alignment_is_what_holds_for_every_row():
    """Vectors are as wide as base, row stride and width allow: one of them odd, and accesses are of one element."""
    x = torch.empty(4, 64, dtype=torch.float16)
    assert alignment(64, [(x, Rows(1, 0, 64, 1))]) == 8
    assert alignment(63, [(x, Rows(1, 0, 63, 1))]) == 1
    assert alignment(64, [(x, Rows(1, 0, 68, 1))]) == 4
    shifted = torch.empty(4 * 64 + 1, dtype=torch.float16)[1:].view(4, 64)
    assert alignment(64, [(shifted, Rows(1, 0, 64, 1))]) == 1


# --- autograd and operators -------------------------------------------------------------------------------------------


def test_kernel_gradcheck_in_float64(device):
    """The kernel's first derivative, and the second by the reference formula, agree with finite differences."""
    x, gamma = noise(3, 7, dtype=torch.float64, device=device), noise(7, dtype=torch.float64, device=device)
    x.requires_grad_()
    gamma.requires_grad_()
    reset_counters()
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6, "fused"), (x, gamma))
    assert counters()["fused"]["double_backward"] == 0
    assert torch.autograd.gradgradcheck(lambda a, b: rms_norm(a, b, 1e-6, "fused"), (x, gamma))
    assert counters()["fused"]["double_backward"] > 0


def test_no_graph_without_need(device):
    """Without a gradient to come, the kernel runs alone and y has no graph."""
    x = noise(3, 8, device=device)
    assert rms_norm(x, None, 1e-6, "fused").grad_fn is None
    with torch.no_grad():
        assert rms_norm(x.requires_grad_(), None, 1e-6, "fused").grad_fn is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck itself reads it
@pytest.mark.parametrize("gamma", ["float32", None])
def test_opcheck_of_the_registered_operators(gamma, device):
    """PyTorch's own checks of a registration pass: schema, fake tensors, autograd, dynamic shapes."""
    x = noise(6, 9, device=device).requires_grad_()
    weights = None if gamma is None else noise(9, device=device).requires_grad_()
    passed = torch.library.opcheck(torch.ops.rmsnorm.fused_forward.default, (x, weights, 1e-6))
    assert set(passed.values()) == {"SUCCESS"}
    frozen = None if weights is None else weights.detach()
    _, rstd = torch.ops.rmsnorm.fused_forward(x.detach(), frozen, 1e-6)
    arguments = (noise(6, 9, device=device), x.detach(), frozen, rstd, True, weights is not None)
    assert set(torch.library.opcheck(torch.ops.rmsnorm.fused_backward.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.case("B55")
@pytest.mark.parametrize("layout", ["contiguous", "heads"])
def test_compile_without_a_graph_break(layout, device):
    """torch.compile(fullgraph=True) keeps the operator, gives eager's values, and compiles again at most once for M."""
    torch._dynamo.reset()
    norm = RMSNorm(8, impl="fused", device=device)
    first, last = torch.nn.Linear(8, 8, device=device), torch.nn.Linear(8, 8, device=device)
    graphs = []

    def backend(module, _inputs):
        graphs.append(module)
        return module.forward

    def network(x):
        x = first(x)
        return last(norm(x.transpose(0, 1) if layout == "heads" else x))

    fast = torch.compile(network, fullgraph=True, backend=backend, dynamic=None)
    for M in (8, 9, 64):
        gradients = []
        for function in (network, fast):
            x = noise(M, 3, 8, device=device).requires_grad_()
            function(x).square().sum().backward()
            gradients.append((x.grad, norm.weight.grad.clone()))
            norm.zero_grad()
        close(gradients[1], gradients[0], atol=1e-4, rtol=1e-4)
    assert 1 <= len(graphs) <= 2


@pytest.mark.case("B53")
@pytest.mark.skipif(INTERPRETED, reason="graphs, streams and autocast's kernels are a GPU's")
@pytest.mark.gpu
def test_cuda_graph_replays_on_new_values(device):
    """A captured forward and backward recompute from what the static input holds at the replay."""
    x, gamma = noise(300, 4096, device=device).requires_grad_(), noise(4096, device=device).requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        rms_norm(x, gamma, 1e-6, "fused").sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    x.grad = gamma.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(x, gamma, 1e-6, "fused")
        y.sum().backward()
    with torch.no_grad():
        x.copy_(noise(300, 4096, seed=5, device=device))
    graph.replay()
    ones = torch.ones_like(x)
    want_dx, want_dgamma = reference.backward(ones, x.detach(), gamma.detach(), 1e-6)
    close(y, reference.forward(x.detach(), gamma.detach(), 1e-6), atol=1e-5, rtol=1e-5)
    close(x.grad, want_dx, atol=1e-4, rtol=1e-4)
    close(gamma.grad, want_dgamma, atol=1e-3, rtol=1e-4)


@pytest.mark.case("B38")
@pytest.mark.gpu
def test_autocast_leaves_the_norm_to_its_inputs(device):
    """Under autocast a linear layer's bf16 meets an fp32 gamma: y is bf16, gradients have their leaves' dtypes."""
    norm, linear = RMSNorm(256, impl="fused", device=device), torch.nn.Linear(256, 256, device=device)
    x = noise(64, 256, device=device).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y = norm(linear(x))
    y.float().sum().backward()
    assert (y.dtype, norm.weight.grad.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.case("B49")
@pytest.mark.gpu2
def test_on_the_gpu_that_is_not_current():
    """Everything of a call happens on x's GPU, and the current one stays current."""
    x, gamma = noise(33, 128, device="cuda:1").requires_grad_(), noise(128, device="cuda:1").requires_grad_()
    with torch.cuda.device(0):
        y = rms_norm(x, gamma, 1e-6, "fused")
        y.sum().backward()
        assert torch.cuda.current_device() == 0
    assert {tensor.device.index for tensor in (y, x.grad, gamma.grad)} == {1}
    close(y, reference.forward(x.detach(), gamma.detach(), 1e-6), atol=1e-5, rtol=1e-5)
