"""What a training step of a Llama takes before and after the swap: `python tests/swap/step_time.py --help`.

Forward, backward and SGD in bf16, eager and with each layer compiled (one graph, which all layers share). The four
networks take turns, in an order drawn anew each round, so that a card that warms or slows does so for all; times are
CUDA events around whole steps. Before anything is timed, the counters must show that `fused` ran in every norm, forward
and backward.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator

import torch
from decoder import loss_of
from llama import llama, logits_of, swapped
from torch import nn

from rmsnorm_cli.kernels import counters, reset_counters

Step = Callable[[], None]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 2048), ("layers", 8), ("batch", 4), ("length", 1024), ("rounds", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--eager-only", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", action="store_true", help="print all times as one JSON document")
    return parser.parse_args()


def step_of(network: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], asked: argparse.Namespace) -> Step:
    """Return one training step on random tokens."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    tokens, targets = torch.randint(asked.vocabulary, (2, asked.batch, asked.length), device="cuda").unbind()

    def step() -> None:
        loss_of(forward(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(asked: argparse.Namespace) -> Iterator[tuple[str, Step]]:
    """Make a network for each column, of one random initialisation, and yield its name and step."""
    for compiling in (False,) if asked.eager_only else (False, True):
        for after in (False, True):
            torch.manual_seed(0)
            with torch.device("cuda"):
                network = llama(
                    asked.hidden, asked.layers, asked.hidden // 128, asked.hidden * 11 // 4, asked.vocabulary
                )
            network = (swapped(network) if after else network).to(torch.bfloat16)
            for layer in network.model.layers if compiling else ():
                layer.compile(fullgraph=True)
            name = f"{'compiled' if compiling else 'eager'}, {'fused' if after else 'as it was'}"
            yield name, step_of(network, logits_of(network), asked)


def warmed(name: str, step: Step, norms: int) -> float:
    """Run five steps, assert that the norms are what the name says, and return the peak memory of one in GiB."""
    for _ in range(4):
        step()
    reset_counters()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    seen = counters().get("fused", {"forward": 0, "backward": 0})
    expected = norms if name.endswith("fused") else 0
    assert (seen["forward"], seen["backward"]) == (expected, expected), f"{name}: {seen}"
    return (torch.cuda.max_memory_allocated() - held) / 2**30


def timed(step: Step) -> float:
    """Return the milliseconds of one step on the GPU's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    """Measure and print a table of medians and quartiles."""
    asked = arguments()
    found = list(steps(asked))
    memory = {name: warmed(name, step, 2 * asked.layers + 1) for name, step in found}
    times: dict[str, list[float]] = {name: [] for name, _ in found}
    order = random.Random(0)
    for _ in range(asked.rounds):
        for name, step in order.sample(found, len(found)):
            times[name].append(timed(step))
    if asked.json:
        print(json.dumps({"settings": vars(asked), "card": torch.cuda.get_device_name(), "ms": times, "GiB": memory}))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {vars(asked)}")
    for name, samples in times.items():
        low, middle, high = statistics.quantiles(samples, n=4)
        print(f"{name:22} {middle:8.3f} ms ({low:.3f} to {high:.3f}), {memory[name]:.2f} GiB more while it runs")
    for kind in ("eager", "compiled"):
        if f"{kind}, fused" in times:
            ratios = [b / a for a, b in zip(times[f"{kind}, as it was"], times[f"{kind}, fused"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{kind}: a step after the swap takes {middle:.4f} of one before ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
