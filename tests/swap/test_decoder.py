"""`RMSNorm(impl="fused")` inside a small decoder: in every dtype and wiring as near to float64 as the norm it replaced.

Runs in the interpreter as well as on a GPU; what only a GPU has (Inductor's kernels, graphs) is marked.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from against64 import Results, complaints
from decoder import NORMS, Decoder, LlamaNorm, randomised
from stepping import AUTOBF16, FP32, auto16, autobf16, bf16, compiled, fp32, replayed, step
from torch import nn

from rmsnorm_cli.kernels import Implementation, RMSNorm, counters, reset_counters
from rmsnorm_cli.kernels.api import FUSED
from rmsnorm_cli.kernels.autograd import KernelPair, differentiable


def fused(width: int) -> nn.Module:
    return RMSNorm(width, impl="fused")


def made(norm: Callable[[int], nn.Module], dtype: torch.dtype, device: str, width: int = 192) -> Decoder:
    return randomised(Decoder(norm, width)).to(device, dtype)


@cache
def exact(device: str, width: int = 192, seed: int = 2) -> Results:
    """Return the float64 run, whose norms are the readable reference."""
    network = made(lambda width: RMSNorm(width, impl="reference"), torch.float64, device, width)
    return step(network, network, seed=seed)


@cache
def before(device: str, dtype: torch.dtype, autocast: torch.dtype | None, width: int = 192, seed: int = 2) -> Results:
    """Return the run of the network as it was, with the norm that model code writes out."""
    network = made(LlamaNorm, dtype, device, width)
    return step(network, network, autocast, seed)


@cache
def after(device: str, dtype: torch.dtype, autocast: torch.dtype | None) -> tuple[Results, dict[str, int]]:
    """Return the run of the swapped network without further wiring, and what was counted in it."""
    reset_counters()
    network = made(fused, dtype, device)
    return step(network, network, autocast), counters()["fused"]


@pytest.fixture(autouse=True)
def _fresh():
    reset_counters()
    torch._dynamo.reset()


def ran() -> tuple[int, int]:
    events = counters()["fused"]
    return events["forward"], events["backward"]


@pytest.mark.parametrize(("dtype", "autocast"), [fp32, bf16, auto16, autobf16])
def test_as_near_to_float64_as_before(dtype, autocast, device):
    """Logits and all gradients, every norm having run once forward and once backward."""
    found, counted = after(device, dtype, autocast)
    assert complaints(found, before(device, dtype, autocast), exact(device)) == []
    assert (counted["forward"], counted["backward"]) == (NORMS, NORMS)
    assert counted["copies"] == 0, "heads of a fused projection are read where they lie"


def test_odd_width(device):
    """Rows of 195 and heads of 65 numbers, no power of two and no vector, are as good."""
    network = made(fused, torch.float32, device, 195)
    found = step(network, network)
    assert complaints(found, before(device, *FP32, 195), exact(device, 195)) == []


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize(("dtype", "autocast"), [fp32, autobf16])
def test_activation_checkpointing_gives_the_same_bits(dtype, autocast, reentrant, device):
    """Each block's forward runs again in the backward, in the autocast that was in force, and nothing else changes."""
    plain, _ = after(device, dtype, autocast)
    reset_counters()
    network = made(fused, dtype, device)
    network.reentrant = reentrant
    found = step(network, network, autocast)
    assert complaints(found, before(device, dtype, autocast), exact(device)) == []
    assert ran() == (2 * NORMS - 1, NORMS)
    if device == "cpu":  # a GPU's attention adds its gradients in no fixed order
        assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.filterwarnings("default")  # Dynamo's and Inductor's own are not judged here
@pytest.mark.parametrize(("dtype", "autocast"), [fp32, autobf16])
def test_compiled_in_one_graph(dtype, autocast, device):
    """fullgraph=True traces the network with its norms, which run as the operators that they are."""
    network = made(fused, dtype, device)
    found = step(network, compiled(network), autocast)
    assert complaints(found, before(device, dtype, autocast), exact(device)) == []
    assert ran() == (NORMS, NORMS)


@pytest.mark.filterwarnings("default")
def test_compiled_with_checkpointing_under_autocast(device):
    """All three at once: the recomputation is part of the compiled backward."""
    network = made(fused, torch.float32, device)
    network.reentrant = False
    found = step(network, compiled(network), torch.bfloat16)
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


@pytest.mark.parametrize(("dtype", "autocast"), [fp32, bf16])
@pytest.mark.parametrize("fault", [scaled, stale, without_gamma_in_the_mean], ids=lambda fault: fault.__name__)
def test_a_broken_norm_is_noticed(fault, dtype, autocast, device):
    """A backward that is wrong in one term fails the judge in fp32, and in bf16 where rounding is loud."""
    pair = KernelPair("broken", FUSED.forward, fault, contiguous_dy=False)
    broken = Implementation("broken", differentiable(pair), triton=True)
    network = made(lambda width: RMSNorm(width, impl=broken), dtype, device)
    found = step(network, network, autocast)
    assert complaints(found, before(device, dtype, autocast), exact(device)) != []


# --- what only a GPU has ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # PyTorch's own, about streams in a capture, are not judged here
@pytest.mark.parametrize(("dtype", "autocast"), [fp32, autobf16])
def test_captured_in_a_graph_and_replayed_on_new_data(dtype, autocast, device):
    """Forward, loss and backward captured on one batch compute another's results when its tokens are copied in."""
    network = made(fused, dtype, device)
    seeds = [3, 4]
    for seed, found in zip(seeds, replayed(network, network, autocast, seeds), strict=True):
        assert complaints(found, before(device, dtype, autocast, seed=seed), exact(device, seed=seed)) == []
