"""What torchrun starts for the tests of DDP and FSDP2: `parallel.py DEVICE FOLDER`, in every process.

The network is the decoder of tests/swap with `fused` norms. Every process draws the whole batch and takes its rows of
it. Gradients and parameters go, whole, to a file of each rank; the tests compare them with those of one process.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "swap"))

from decoder import Decoder, batch, loss_of, randomised

from rmsnorm_cli.kernels import ContractError, RMSNorm, counters, reset_counters, rms_norm

SEQUENCES, LENGTH, STEPS = 4, 9, 5
LR = 0.1
Kept = dict[str, dict[str, Tensor]]


def network_of(dtype: torch.dtype = torch.float32, impl: str = "fused") -> Decoder:
    """Return the decoder with random weights, small enough for the interpreter."""
    return randomised(Decoder(lambda width: RMSNorm(width, impl=impl), width=66, heads=2, inner=96)).to(dtype)


def frozen(network: nn.Module) -> nn.Module:
    """Freeze every gamma, as fine-tuning of the other weights does."""
    for module in network.modules():
        if isinstance(module, RMSNorm):
            module.requires_grad_(False)
    return network


def part(step: int, rank: int, world: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a rank's sequences of the global batch of a step."""
    tokens, targets = batch(seed=10 + step, rows=SEQUENCES, length=LENGTH)
    return tokens[rank::world].to(device), targets[rank::world].to(device)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, gathered if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def kept_of(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients and parameters by the names that they have without a wrapper."""
    named = {name.removeprefix("module."): parameter for name, parameter in network.named_parameters()}
    gradients = {name: whole(parameter.grad) for name, parameter in named.items() if parameter.grad is not None}
    return gradients, {name: whole(parameter) for name, parameter in named.items()}


def micro_batches(tokens: Tensor, targets: Tensor, parts: int) -> Iterator[tuple[bool, Tensor, Tensor]]:
    """Cut a batch into parts and say with each whether it is the last, after which gradients are exchanged."""
    for i, (some, right) in enumerate(zip(tokens.chunk(parts), targets.chunk(parts), strict=True)):
        yield i == parts - 1, some, right


def quiet(network: nn.Module, last: bool) -> object:
    """Return the context of a backward after which no gradients are exchanged, unless it is the last one."""
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(last)
    return network.no_sync() if isinstance(network, DistributedDataParallel) and not last else nullcontext()


def trained(network: nn.Module, rank: int, world: int, device: torch.device, parts: int = 1) -> Kept:
    """Take STEPS steps of SGD; keep the gradients of the first and the parameters after the last."""
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=LR)
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        tokens, targets = part(step, rank, world, device)
        for last, some, right in micro_batches(tokens, targets, parts):
            with quiet(network, last):
                (loss_of(network(some), right) / parts).backward()
        if step == 0:
            first, _ = kept_of(network)
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": first, "parameters": kept_of(network)[1]}


def sharded(network: Decoder, **options: object) -> nn.Module:
    """Apply fully_shard to every block and to the rest."""
    for block in network.blocks:
        fully_shard(block, **options)
    return fully_shard(network, **options)


def wrapped(name: str, device: torch.device) -> nn.Module:
    """Return the network of a scenario, ready to train."""
    if name == "fsdp":
        return sharded(network_of().to(device))
    if name == "fsdp mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return sharded(network_of().to(device), mp_policy=policy)
    network = network_of().to(device)
    if name == "ddp frozen":
        frozen(network)
    return DistributedDataParallel(network, device_ids=[device.index] if device.type == "cuda" else None)


SCENARIOS = {"ddp": 1, "ddp frozen": 1, "ddp accumulated": 2, "fsdp": 1, "fsdp accumulated": 2, "fsdp mixed": 1}
"""Scenario -> parts that a rank's batch is cut into."""


def refusals(kind: str) -> dict[str, str]:
    """Hand sharded tensors to the kernels directly, after plain ones of the same shape, and return what they say."""
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    said = {}
    for impl in ("fused", "rowwise"):
        x, gamma, dy = (torch.ones(shape, device=kind) for shape in ((4, 8), (8,), (4, 8)))
        y = rms_norm(x.requires_grad_(), gamma, impl=impl)
        y.backward(dy, retain_graph=True)  # the launches of these shapes are known now
        sharded_gamma = distribute_tensor(gamma, mesh, [Shard(0)])
        everywhere = [distribute_tensor(tensor.detach(), mesh, [Replicate()]) for tensor in (x, gamma, dy)]
        calls = {
            "gamma": lambda x=x, gamma=sharded_gamma, impl=impl: rms_norm(x, gamma, impl=impl),
            "x": lambda whole=everywhere, impl=impl: rms_norm(whole[0], whole[1], impl=impl),
            "dy": lambda y=y, whole=everywhere: y.backward(whole[2]),
        }
        for name, call in calls.items():
            try:
                call()
                said[f"{impl}, {name}"] = "taken"
            except ContractError as refusal:
                said[f"{impl}, {name}"] = str(refusal)
    return said


def main() -> None:
    """Run every scenario and leave what each rank has."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    (folder / f"refusals-{rank}.json").write_text(json.dumps(refusals(kind)))
    for name, parts in SCENARIOS.items():
        reset_counters()
        network = wrapped("fsdp" if name == "fsdp accumulated" else name, device)
        kept = trained(network, rank, world, device, parts)
        torch.save(kept | {"counted": counters()["fused"]}, folder / f"{name}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
