"""`fused` under DDP and FSDP2: two processes over one global batch compute what one process computes.

Two processes sum the same gradients in another order, so bits may differ. The yardstick is the float64 run of one
process: two may be twice as far from it as one, per tensor, which allows for the order of the sums and for nothing
else (the factor of tests/swap/against64.py, which notices a gradient that is one percent off).
"""

import copy
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from against64 import FLOOR, TENSOR_FACTOR, error
from decoder import NORMS, loss_of
from parallel import LR, SCENARIOS, STEPS, Kept, frozen, kept_of, network_of, part, trained

from rmsnorm_cli.kernels.contract import INTERPRETED

RANKED = Path(__file__).with_name("parallel.py")


def together(kind: str, folder: Path) -> Path:
    """Run every scenario in two processes and return the folder that holds what they left."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(RANKED), kind, str(folder)], capture_output=True, text=True, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    if not INTERPRETED:
        pytest.skip("compares on the CPU, in Triton's interpreter, and this process compiles kernels for its GPU")
    return together("cpu", tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    return together("cuda", tmp_path_factory.mktemp("nccl"))


@cache
def exact() -> Kept:
    return trained(network_of(torch.float64, "reference"), 0, 1, torch.device("cpu"))


@cache
def exact_frozen() -> Kept:
    return trained(frozen(network_of(torch.float64, "reference")), 0, 1, torch.device("cpu"))


def in_bf16(device: torch.device) -> Kept:
    """Train alone as FSDP2's mixed precision does: computed in bf16, kept and updated in fp32."""
    master = network_of().to(device)
    first = {}
    for step in range(STEPS):
        working = copy.deepcopy(master).bfloat16()
        tokens, targets = part(step, 0, 1, device)
        loss_of(working(tokens), targets).backward()
        for parameter, computed in zip(master.parameters(), working.parameters(), strict=True):
            parameter.grad = computed.grad.float()
        first = first or kept_of(master)[0]
        torch.optim.SGD(master.parameters(), lr=LR).step()
    return {"gradients": first, "parameters": kept_of(master)[1]}


@cache
def alone(device: torch.device, gammas_learn: bool = True) -> Kept:
    """Return what one process computes from the whole batch of every step."""
    network = network_of().to(device)
    return trained(network if gammas_learn else frozen(network), 0, 1, device)


def judge(name: str, folder: Path, device: torch.device) -> None:
    """Assert that both ranks hold the same, and that it lies as near to float64 as one process does."""
    first, second = (torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1))
    one = in_bf16(device) if name == "fsdp mixed" else alone(device, name != "ddp frozen")
    right = exact_frozen() if name == "ddp frozen" else exact()
    start = {key: parameter.detach() for key, parameter in network_of().named_parameters()}
    for what in ("gradients", "parameters"):
        assert first[what].keys() == second[what].keys() == right[what].keys()
        for key, got in first[what].items():
            assert torch.equal(got, second[what][key]), f"the ranks differ in {what} {key}"
            before = start[key].double() if what == "parameters" else torch.zeros(())
            if torch.equal(right[what][key], before):  # frozen
                assert torch.equal(got.double(), before)
                continue
            moved, alone_moved, should = (kept.double() - before for kept in (got, one[what][key], right[what][key]))
            allowed = TENSOR_FACTOR * error(alone_moved, should) + FLOOR
            assert error(moved, should) <= allowed, f"{what} {key}: {error(moved, should):.2e}, allowed {allowed:.2e}"
    calls = NORMS * STEPS * SCENARIOS[name]
    assert (first["counted"]["forward"], first["counted"]["backward"]) == (calls, calls)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_compute_what_one_does(name, gloo):
    """Gradients of the first step and parameters after five, equal on both ranks: gloo, in the interpreter."""
    judge(name, gloo, torch.device("cpu"))


@pytest.mark.gpu2
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_gpus_compute_what_one_does(name, nccl):
    """The same over NCCL, one GPU a process."""
    judge(name, nccl, torch.device("cuda:0"))


def refused(folder: Path) -> None:
    for rank in (0, 1):
        said = json.loads((folder / f"refusals-{rank}.json").read_text())
        assert set(said) == {f"{impl}, {name}" for impl in ("fused", "rowwise") for name in ("x", "gamma", "dy")}
        for call, text in said.items():
            name = call.rpartition(" ")[2]
            assert text.startswith(f"{name} is a DTensor, whose numbers lie in other tensors: hand over a plain one")


def test_sharded_tensors_are_refused_by_name(gloo):
    """A DTensor looks like the plain tensor for which launches are already known, and its address is 0."""
    refused(gloo)


@pytest.mark.gpu2
def test_sharded_tensors_are_refused_by_name_on_gpus(nccl):
    """Where the kernel would otherwise read address 0, and no later call on that GPU would work."""
    refused(nccl)
