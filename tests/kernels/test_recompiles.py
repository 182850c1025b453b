"""Row counts that change from call to call: neither torch.compile nor Triton compiles anew for each of them.

What Dynamo and AOTAutograd make is counted, and run as it is; on a GPU one test has Inductor compile it as well.
"""

from collections import Counter

import pytest
import torch
import triton
from torch._dynamo.testing import CompileCounterWithBackend

from rmsnorm_cli.kernels import RMSNorm, counters, reset_counters, rms_norm
from rmsnorm_cli.kernels.contract import INTERPRETED

N = 24
MANY = (5, 8, 17, 64, 33, 300, 6)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    reset_counters()
    yield
    torch._dynamo.reset()


@pytest.fixture
def network(device):
    """Return linear → norm → linear, the same every time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(N, N), RMSNorm(N, impl="fused"), torch.nn.Linear(N, N)).to(device)


def gradients(function, network, x, mark=False):
    """Return y and all gradients of one call."""
    network.zero_grad()
    x = x.detach().requires_grad_()
    if mark:
        torch._dynamo.mark_dynamic(x, 0)
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in network.parameters())]


def compare(fast, network, M, device, mark=False):
    """Assert that the compiled network gives at M rows what the eager one gives."""
    x = torch.randn(M, N, generator=torch.Generator().manual_seed(M)).to(device)
    got, want = gradients(fast, network, x, mark), gradients(network, network, x)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("default")  # Dynamo's and Inductor's own are not judged here
def test_changing_rows_make_two_graphs(network, device):
    """One for the first number of rows, one for any number: the operator's shapes are symbols in it."""
    backend = CompileCounterWithBackend("aot_eager" if INTERPRETED else "inductor")
    fast = torch.compile(network, fullgraph=True, backend=backend)
    for M in MANY:
        compare(fast, network, M, device)
    assert backend.frame_count == 2
    assert counters()["fused"]["forward"] == 2 * len(MANY)


@pytest.mark.filterwarnings("default")
def test_rows_marked_dynamic_make_one_graph(network, device):
    """mark_dynamic raises where something in the graph fixes the number of rows: nothing of ours does."""
    backend = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(network, fullgraph=True, backend=backend)
    for M in MANY:
        compare(fast, network, M, device, mark=True)
    assert backend.frame_count == 1


@pytest.mark.filterwarnings("default")
def test_no_rows_and_one_row_are_graphs_of_their_own_at_most(network, device):
    """PyTorch fixes 0 and 1 where it meets them: four graphs in all, and right results from each."""
    backend = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(network, fullgraph=True, backend=backend)
    for M in (3, 1, 0, 4, 1, 0, 5):
        compare(fast, network, M, device)
    assert backend.frame_count <= 4


@pytest.mark.filterwarnings("default")
def test_eps_as_another_number_is_one_more_graph_and_the_right_one(device):
    """A constant of the graph; alternating between two gives each its own result."""
    backend = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(lambda x, eps: rms_norm(x, None, eps, "fused"), fullgraph=True, backend=backend, dynamic=False)
    x = torch.full((3, N), 1e-3, device=device)
    for eps in (1e-6, 1e-5, 1e-6, 1e-5):
        torch.testing.assert_close(fast(x, eps), rms_norm(x, None, eps, "fused"), atol=0, rtol=0)
    assert backend.frame_count <= 2


@pytest.mark.gpu
def test_new_row_counts_do_not_reach_the_compiler(device, monkeypatch):
    """Triton compiles a few variants of each kernel for all row counts, and none the second time they come."""
    compiled: Counter[str] = Counter()
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.update([what["fn"].name])
    )
    gamma = torch.randn(500, device=device, requires_grad=True)

    def all_rows():
        for M in (1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 1000, 1024, 2049, 5000):
            rms_norm(torch.randn(M, 500, device=device), gamma, impl="fused").sum().backward()

    all_rows()
    assert compiled, "nothing was compiled: the hook saw nothing"
    assert max(compiled.values()) <= 4, compiled
    compiled.clear()
    all_rows()
    assert not compiled
