"""`RMSNorm(impl="fused")` inside a small decoder: in every dtype and wiring as near to float64 as the norm it replaced.

Runs in the interpreter as well as on a GPU; what only a GPU has (Inductor's kernels, graphs) is marked.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from against64 import Results, complaints, results_of
from decoder import NORMS, Decoder, LlamaNorm, batch, loss_of, randomised
from torch import Tensor, nn

from rmsnorm_cli.kernels import Implementation, RMSNorm, counters, reset_counters
from rmsnorm_cli.kernels.api import FUSED
from rmsnorm_cli.kernels.autograd import KernelPair, differentiable
from rmsnorm_cli.kernels.contract import INTERPRETED

SHAPE = (2, 9) if INTERPRETED else (5, 65)  # on a GPU enough rows that programs walk over several tiles

FP32, BF16 = (torch.float32, None), (torch.bfloat16, None)
AUTO16, AUTOBF16 = (torch.float32, torch.float16), (torch.float32, torch.bfloat16)
DTYPES = [FP32, BF16, AUTO16, AUTOBF16]
NAMES = ["fp32", "bf16", "fp16 autocast", "bf16 autocast"]

Wiring = Callable[[nn.Module], Callable[[Tensor], Tensor]]


def fused(width: int) -> nn.Module:
    return RMSNorm(width, impl="fused")


def scale_for(autocast: torch.dtype | None) -> float:
    """Return the loss scale: fp16's small gradients would vanish without one."""
    return 1024.0 if autocast == torch.float16 else 1.0


def made(norm: Callable[[int], nn.Module], dtype: torch.dtype, device: str, width: int = 192) -> Decoder:
    return randomised(Decoder(norm, width)).to(device, dtype)


def step(
    network: nn.Module, autocast: torch.dtype | None = None, wiring: Wiring = lambda network: network, seed: int = 2
) -> Results:
    """Run one forward and backward and return logits and gradients."""
    device = next(network.parameters()).device
    tokens, targets = (tensor.to(device) for tensor in batch(seed, *SHAPE))
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        logits = wiring(network)(tokens)
    (loss_of(logits, targets) * scale_for(autocast)).backward()
    return results_of(network, logits, scale_for(autocast))


@cache
def exact(device: str, width: int = 192, seed: int = 2) -> Results:
    """Return the float64 run, whose norms are the readable reference."""
    reference = made(lambda width: RMSNorm(width, impl="reference"), torch.float64, device, width)
    return step(reference, seed=seed)


@cache
def before(device: str, dtype: torch.dtype, autocast: torch.dtype | None, width: int = 192, seed: int = 2) -> Results:
    """Return the run of the network as it was, with the norm that model code writes out."""
    return step(made(LlamaNorm, dtype, device, width), autocast, seed=seed)


@cache
def after(device: str, dtype: torch.dtype, autocast: torch.dtype | None) -> tuple[Results, dict[str, int]]:
    """Return the run of the swapped network without further wiring, and what was counted in it."""
    reset_counters()
    return step(made(fused, dtype, device), autocast), counters()["fused"]


@pytest.fixture(autouse=True)
def _fresh():
    reset_counters()
    torch._dynamo.reset()


def ran() -> tuple[int, int]:
    events = counters()["fused"]
    return events["forward"], events["backward"]


@pytest.mark.parametrize(("dtype", "autocast"), DTYPES, ids=NAMES)
def test_as_near_to_float64_as_before(dtype, autocast, device):
    """Logits and all gradients, every norm having run once forward and once backward."""
    found, counted = after(device, dtype, autocast)
    assert complaints(found, before(device, dtype, autocast), exact(device)) == []
    assert (counted["forward"], counted["backward"]) == (NORMS, NORMS)
    assert counted["copies"] == 0, "heads of a fused projection are read where they lie"


def test_odd_width(device):
    """Rows of 195 and heads of 65 numbers, no power of two and no vector, are as good."""
    found = step(made(fused, torch.float32, device, 195))
    assert complaints(found, before(device, *FP32, 195), exact(device, 195)) == []


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize(("dtype", "autocast"), [FP32, AUTOBF16], ids=["fp32", "bf16 autocast"])
def test_activation_checkpointing_gives_the_same_bits(dtype, autocast, reentrant, device):
    """Each block's forward runs again in the backward, in the autocast that was in force, and nothing else changes."""
    plain, _ = after(device, dtype, autocast)
    reset_counters()
    network = made(fused, dtype, device)
    network.reentrant = reentrant
    found = step(network, autocast)
    assert complaints(found, before(device, dtype, autocast), exact(device)) == []
    assert ran() == (2 * NORMS - 1, NORMS)
    if device == "cpu":  # a GPU's attention adds its gradients in no fixed order
        assert all(torch.equal(found[name], plain[name]) for name in plain)


def compiled(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """Compile without a graph break: Inductor on a GPU; its graphs, run as they are, where there is none."""
    return torch.compile(network, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor")


@pytest.mark.filterwarnings("default")  # Dynamo's and Inductor's own are not judged here
@pytest.mark.parametrize(("dtype", "autocast"), [FP32, AUTOBF16], ids=["fp32", "bf16 autocast"])
def test_compiled_in_one_graph(dtype, autocast, device):
    """fullgraph=True traces the network with its norms, which run as the operators that they are."""
    found = step(made(fused, dtype, device), autocast, compiled)
    assert complaints(found, before(device, dtype, autocast), exact(device)) == []
    assert ran() == (NORMS, NORMS)


@pytest.mark.filterwarnings("default")
def test_compiled_with_checkpointing_under_autocast(device):
    """All three at once: the recomputation is part of the compiled backward."""
    network = made(fused, torch.float32, device)
    network.reentrant = False
    found = step(network, torch.bfloat16, compiled)
    assert complaints(found, before(device, *AUTOBF16), exact(device)) == []
    forwards, backwards = ran()
    assert NORMS <= forwards <= 2 * NORMS - 1, "Inductor chooses what it recomputes"
    assert backwards == NORMS


# --- the judge itself -------------------------------------------------------------------------------------------------


def scaled(dy, x, gamma, rstd, **needs):
    """Dx one percent too long."""
    dx, dgamma = FUSED.backward(dy, x, gamma, rstd, **needs)
    return dx * 1.01, dgamma


def stale(dy, x, gamma, rstd, **needs):
    """Rstd of the row before."""
    return FUSED.backward(dy, x, gamma, rstd.roll(1), **needs)


def without_gamma_in_the_mean(dy, x, gamma, rstd, **needs):
    """mean(dy · x) where mean(dy · gamma · x) belongs."""
    dx, dgamma = FUSED.backward(dy, x, gamma, rstd, **needs)
    X, D, G = x.float(), dy.float(), gamma.float()
    wrong = X * rstd.view(*X.shape[:-1], 1) ** 3
    return (dx.float() + wrong * ((D * G * X).mean(-1, keepdim=True) - (D * X).mean(-1, keepdim=True))).to(dx), dgamma


@pytest.mark.parametrize(("dtype", "autocast"), [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fault", [scaled, stale, without_gamma_in_the_mean], ids=lambda fault: fault.__name__)
def test_a_broken_norm_is_noticed(fault, dtype, autocast, device):
    """A backward that is wrong in one term fails the judge in fp32, and in bf16 where rounding is loud."""
    pair = KernelPair("broken", FUSED.forward, fault, contiguous_dy=False)
    broken = Implementation("broken", differentiable(pair), triton=True)
    found = step(made(lambda width: RMSNorm(width, impl=broken), dtype, device), autocast)
    assert complaints(found, before(device, dtype, autocast), exact(device)) != []


# --- what only a GPU has ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "autocast"), [FP32, AUTOBF16], ids=["fp32", "bf16 autocast"])
def test_captured_in_a_graph_and_replayed_on_new_data(dtype, autocast, device):
    """Forward, loss and backward captured on one batch compute another's results when its tokens are copied in."""
    network = made(fused, dtype, device)
    tokens, targets = (tensor.to(device) for tensor in batch(2, *SHAPE))

    def run() -> Tensor:
        with torch.autocast("cuda", autocast, enabled=autocast is not None, cache_enabled=False):
            logits = network(tokens)
        loss_of(logits, targets).backward()
        return logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    network.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    for seed in (3, 4):
        for static, new in zip((tokens, targets), batch(seed, *SHAPE), strict=True):
            static.copy_(new)
        for parameter in network.parameters():
            parameter.grad.zero_()
        graph.replay()
        found = results_of(network, logits)
        assert complaints(found, before(device, dtype, autocast, seed=seed), exact(device, seed=seed)) == []
