"""The recipe of docs/swap.md on `transformers`' own Llama, with random weights and nothing downloaded.

Needs the package transformers, which is no dependency of ours: skipped, and said so, without it.
"""

import warnings
from functools import cache
from types import ModuleType

import pytest
import torch
from against64 import Results, complaints
from stepping import auto16, autobf16, bf16, compiled, fp32, replayed, step

from rmsnorm_cli.kernels import counters, reset_counters

NORMS = 7

pytestmark = pytest.mark.filterwarnings("default")  # what transformers and Dynamo warn of is not judged here


@pytest.fixture(scope="module", autouse=True)
def _installed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers", reason="the package transformers is not installed")


def models() -> ModuleType:
    import llama  # stands on transformers

    return llama


@cache
def exact(device: str, seed: int = 2) -> Results:
    """Return the float64 run; Llama's own norm computes in fp32 always, so the reference stands in for it."""
    network = models().swapped(models().small(), "reference").to(device, torch.float64)
    return step(network, models().logits_of(network), seed=seed)


@cache
def before(device: str, dtype: torch.dtype, autocast: torch.dtype | None, seed: int = 2) -> Results:
    network = models().small().to(device, dtype)
    return step(network, models().logits_of(network), autocast, seed)


def after(dtype: torch.dtype, device: str) -> torch.nn.Module:
    reset_counters()
    return models().swapped(models().small()).to(device, dtype)


def ran() -> tuple[int, int]:
    events = counters()["fused"]
    return events["forward"], events["backward"]


def test_the_recipe_keeps_every_weight():
    """The same parameter objects under the same names, the same eps: a state_dict goes both ways."""
    network = models().small()
    kept = dict(network.named_parameters())
    eps = network.model.norm.variance_epsilon
    models().swapped(network)
    assert all(parameter is kept[name] for name, parameter in network.named_parameters())
    assert network.state_dict().keys() == models().small().state_dict().keys()
    assert network.model.norm.eps == eps


@pytest.mark.parametrize(("dtype", "autocast"), [fp32, bf16, auto16, autobf16])
def test_as_near_to_float64_as_before(dtype, autocast, device):
    """Logits and all gradients, every norm having run once forward and once backward."""
    network = after(dtype, device)
    found = step(network, models().logits_of(network), autocast)
    assert complaints(found, before(device, dtype, autocast), exact(device)) == []
    assert ran() == (NORMS, NORMS)


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpoint", "reentrant checkpoint"])
def test_its_own_gradient_checkpointing(reentrant, device):
    """gradient_checkpointing_enable of either kind runs each block's norms again, and gradients stay."""
    network = after(torch.float32, device)
    network.gradient_checkpointing_enable({"use_reentrant": reentrant})
    network.train()
    found = step(network, models().logits_of(network), torch.bfloat16)
    assert complaints(found, before(device, torch.float32, torch.bfloat16), exact(device)) == []
    assert ran() == (2 * NORMS - 1, NORMS)


def test_compiled_in_one_graph_under_autocast(device):
    """fullgraph=True: the swap leaves nothing that Dynamo cannot follow."""
    torch._dynamo.reset()
    network = after(torch.float32, device)
    found = step(network, compiled(models().logits_of(network)), torch.bfloat16)
    assert complaints(found, before(device, torch.float32, torch.bfloat16), exact(device)) == []
    assert ran() == (NORMS, NORMS)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "autocast"), [fp32, autobf16])
def test_captured_in_a_graph_and_replayed_on_new_data(dtype, autocast, device):
    """Forward, loss and backward captured on one batch compute another's results when its tokens are copied in."""
    network = after(dtype, device)
    seeds = [3, 4]
    for seed, found in zip(seeds, replayed(network, models().logits_of(network), autocast, seeds), strict=True):
        assert complaints(found, before(device, dtype, autocast, seed), exact(device, seed)) == []
