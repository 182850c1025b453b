"""Reports about several processes and about batches: gradients that are missing on a rank, bits that depend on M."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from rmsnorm_cli.kernels import rms_norm

RANK = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rmsnorm_cli.kernels import RMSNorm
dist.init_process_group("gloo")
rank, where = dist.get_rank(), sys.argv[1]
found = {}
for impl in ("reference", "rowwise", "fused"):
    for empty in (False, True):
        norm = DistributedDataParallel(RMSNorm(2, impl=impl, device=where))
        rows = [[[3.0, 4.0]], [[6.0, 8.0]]][rank] if not (empty and rank) else []
        x = torch.tensor(rows, device=where).reshape(-1, 2)
        for _ in range(2):  # a second step is where unused parameters are found
            norm.zero_grad()
            (norm(x) * (1.0, 3.0)[rank]).sum().backward()
        found[f"{impl} {empty}"] = norm.module.weight.grad.tolist()
if rank == 0:
    print(json.dumps(found))
gathered = [None, None]
dist.all_gather_object(gathered, found)
assert gathered[0] == gathered[1]
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # the end of gloo's threads has aborted a rank that was done
"""


@pytest.fixture(scope="module")
def over_two_ranks(device):
    """Return gamma's gradient of every implementation, with a row on both ranks and with one on the first alone.

    Over gloo, which takes tensors of either kind; on a GPU both ranks share the first one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common = os.environ | shared | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, device],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    return json.loads(ended[0][0])


@pytest.mark.case("B59")
def test_gamma_has_the_mean_gradient_on_every_rank(over_two_ranks, impl):
    """[[3, 4]] · 1 and [[6, 8]] · 3 are 0.8485 and 2.5456 in the first column: 1.697 in the mean."""
    assert over_two_ranks[f"{impl} False"] == pytest.approx([1.69705625, 2.26274166], rel=1e-5)


@pytest.mark.case("B59")
def test_a_rank_without_rows_gives_zeros(over_two_ranks, impl):
    """It takes part with zeros, not with nothing: half of the other rank's gradient, and no unused parameter."""
    assert over_two_ranks[f"{impl} True"] == pytest.approx([0.42426405, 0.56568540], rel=1e-5)


@pytest.mark.case("B61")
@pytest.mark.parametrize("name", ["rowwise", "fused"])
@pytest.mark.parametrize("N", [3, 257, 1024, 4096])
def test_a_row_keeps_its_bits_in_any_batch_and_place(N, name, device, gradients):
    """Alone, and first, in the middle and last of others: y and dx bit for bit; dgamma is a sum and exempt."""
    draws = torch.Generator().manual_seed(N)
    row, dy_row, gamma = (torch.randn(*shape, generator=draws).to(device) for shape in ((1, N), (1, N), (N,)))
    y, dx, _ = gradients(row, gamma, dy_row, name)
    for M in (2, 5, 18, *((255, 257, 4096) if device != "cpu" else (64,) if N < 300 else ())):
        x, dy = torch.randn(M, N, generator=draws).to(device), torch.randn(M, N, generator=draws).to(device)
        for at in {0, M // 2, M - 1}:
            x[at], dy[at] = row[0], dy_row[0]
        batch_y, batch_dx, _ = gradients(x, gamma, dy, name)
        for at in {0, M // 2, M - 1}:
            assert torch.equal(batch_y[at], y[0])
            assert torch.equal(batch_dx[at], dx[0])


@pytest.mark.case("B61")
@pytest.mark.parametrize("impl", ["rowwise", "fused"])
def test_a_run_repeats_bit_for_bit(impl, device, gradients):
    draws = torch.Generator().manual_seed(4)
    x, gamma, dy = (torch.randn(*shape, generator=draws).to(device) for shape in ((67, 129), (129,), (67, 129)))
    first = gradients(x, gamma, dy, impl)
    for _ in range(3 if device == "cpu" else 100):
        for got, want in zip(gradients(x, gamma, dy, impl), first, strict=True):
            assert torch.equal(got, want)
    assert torch.equal(rms_norm(x, gamma, impl=impl), first[0])
