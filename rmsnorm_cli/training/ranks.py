"""The processes of one data-parallel training: one alone, or the ranks that torchrun started.

Rows of a batch are shared out without padding, losses are weighted by rows, and small agreements (a loss, a signal)
travel over gloo even beside NCCL: a socket notices at once that its other end has died, a GPU collective waits.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rmsnorm_cli.errors import EnvironmentProblem, flat
from rmsnorm_cli.training.place import place

TIMEOUT = timedelta(seconds=120)
LOST = re.compile(r"gloo|nccl|connection|peer|timed out|timeout|process ?group", re.IGNORECASE)

Value = TypeVar("Value")


class ProcessLost(EnvironmentProblem):
    """Another process of a data-parallel run has died or stopped answering."""


class Ranks:
    """The place of this process among `world` processes; the only one by default, when every method is trivial."""

    def __init__(self, rank: int = 0, world: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.world = rank, world
        self.device = device or torch.device("cpu")

    @property
    def leads(self) -> bool:
        """Tell whether this process owns the run directory."""
        return self.rank == 0

    def share(self, rows: int) -> slice:
        """Return this rank's part of `rows` rows; parts differ by one row at most, and rank 0's is not empty."""
        start, end = (-(-rows * rank // self.world) for rank in (self.rank, self.rank + 1))
        return slice(start, end)

    def wrapped(self, network: torch.nn.Module) -> torch.nn.Module:
        """Return the network, through DistributedDataParallel where there are several ranks."""
        if self.world == 1:
            return network
        index = [self.device.index] if self.device.type == "cuda" else None
        with self.watched():
            return torch.nn.parallel.DistributedDataParallel(network, device_ids=index)

    def total(self, value: float) -> float:
        """Return the sum of a number over the ranks, in float64."""
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        with self.watched():
            dist.all_reduce(tensor)
        return float(tensor)

    def largest(self, value: int) -> int:
        """Return the largest of a number over the ranks."""
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        with self.watched():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def gathered(self, value: Value) -> list[Value]:
        """Return every rank's plain value, by rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        with self.watched():
            dist.all_gather_object(found, value)
        return found

    def from_leader(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        if self.world == 1:
            return value
        held: list[Any] = [value]
        with self.watched():
            dist.broadcast_object_list(held, src=0)
        found: Value = held[0]
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn what a collective raises when another rank is gone into ProcessLost."""
        try:
            yield
        except RuntimeError as problem:
            if self.world == 1 or not LOST.search(f"{type(problem).__name__} {problem}"):
                raise
            first = flat(problem)[:200]
            raise ProcessLost(
                f"another of the {self.world} processes of this run has died or no longer answers (rank {self.rank} "
                f"saw: {first}); the newest checkpoint stands, and the same torchrun with --resume continues from it"
            ) from problem


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the other processes that torchrun started, over gloo on CPUs and NCCL on GPUs, for the block.

    A process group that is there already is used and left alone: a torchrun makes one only, since a second would find
    the addresses of the first.
    Raises ConfigError for a torchrun environment that is not whole, ProcessLost where the others do not come.
    """
    rank, world = place()
    if world == 1:
        yield Ranks(device=device)
        return
    ranks = Ranks(rank, world, device)
    own = not dist.is_initialized()
    if own:
        with ranks.watched():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    yield ranks  # an error leaves the group as it is: to take it down would wait for the very rank that is gone
    with ranks.watched():
        ranks.largest(0)  # nobody leaves while another still needs an answer
    if own:
        dist.destroy_process_group()
