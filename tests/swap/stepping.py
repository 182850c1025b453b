"""One step of a network, in each dtype and wiring that is tried: forward, loss, backward, and what came of it."""

from collections.abc import Callable

import pytest
import torch
from against64 import Results, results_of
from decoder import batch, loss_of
from torch import Tensor, nn

from rmsnorm_cli.kernels.contract import INTERPRETED

SHAPE = (2, 9) if INTERPRETED else (5, 65)
"""Sequences and tokens of each: on a GPU enough rows that programs walk over several tiles."""

FP32, BF16 = (torch.float32, None), (torch.bfloat16, None)
AUTO16, AUTOBF16 = (torch.float32, torch.float16), (torch.float32, torch.bfloat16)

# Each of its bf16 stores is 0.28 % short on average, which adds up over a network's norms and shows in the gradients.
rounds_bf16 = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter cuts bf16 stores off instead of rounding")

fp32 = pytest.param(*FP32, id="fp32")
bf16 = pytest.param(*BF16, id="bf16", marks=rounds_bf16)
auto16, autobf16 = pytest.param(*AUTO16, id="fp16 autocast"), pytest.param(*AUTOBF16, id="bf16 autocast")

Forward = Callable[[Tensor], Tensor]


def scale_for(autocast: torch.dtype | None) -> float:
    """Return the loss scale: fp16's small gradients would vanish without one."""
    return 1024.0 if autocast == torch.float16 else 1.0


def step(network: nn.Module, forward: Forward, autocast: torch.dtype | None = None, seed: int = 2) -> Results:
    """Run tokens -> logits and the loss's backward, and return logits and gradients."""
    device = next(network.parameters()).device
    tokens, targets = (tensor.to(device) for tensor in batch(seed, *SHAPE))
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        logits = forward(tokens)
    (loss_of(logits, targets) * scale_for(autocast)).backward()
    return results_of(network, logits, scale_for(autocast))


def compiled(forward: Forward) -> Forward:
    """Compile without a graph break: Inductor on a GPU; its graphs, run as they are, where there is none."""
    return torch.compile(forward, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor")


def replayed(network: nn.Module, forward: Forward, autocast: torch.dtype | None, seeds: list[int]) -> list[Results]:
    """Capture forward, loss and backward on one batch in a CUDA graph, and replay it on the batches of `seeds`."""
    tokens, targets = (tensor.cuda() for tensor in batch(2, *SHAPE))

    def run() -> Tensor:
        with torch.autocast("cuda", autocast, enabled=autocast is not None, cache_enabled=False):
            logits = forward(tokens)
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
    found = []
    for seed in seeds:
        for static, new in zip((tokens, targets), batch(seed, *SHAPE), strict=True):
            static.copy_(new)
        graph.replay()
        found.append(results_of(network, logits))
    return found
