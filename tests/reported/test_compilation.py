"""Reports about compilation and its caches: recompiled row counts, graphs that break, eps of another type."""

import json
import os
import subprocess
import sys

import numpy
import pytest
import torch

from rmsnorm_cli.kernels import ContractError, RMSNorm, reference, rms_norm

COUNT = """
import json, os, sys
from pathlib import Path
import torch
from rmsnorm_cli.kernels import rms_norm
def programs():
    return sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))
def call(M, N, dtype, eps):
    x = torch.randn(M, N, device="cuda", dtype=dtype, requires_grad=True)
    gamma = torch.ones(N, device="cuda", dtype=dtype, requires_grad=True)
    rms_norm(x, gamma, eps, sys.argv[1]).sum().backward()
found = []
for eps in (1e-6, 1e-6, 1e-5, 1, 2.0, 16):
    for M in (1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 1000, 1024, 2049, 5000):
        call(M, 512, torch.float16, eps)
    found.append(programs())
torch.cuda.synchronize()
print(json.dumps(found))
"""


@pytest.mark.case("B52", "B58")
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rowwise", "fused"])
def test_row_counts_and_values_of_eps_compile_nothing_new(name, tmp_path):
    """Programs in a fresh cache: a handful after fourteen row counts, no more in later rounds or with another eps."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, name],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 2 <= found[0] <= 16
    assert set(found[1:3]) == {found[0]}
    assert found[-1] <= found[0] + 3  # rowwise: an integer eps is a float by then; alignment may add a variant


@pytest.mark.case("B53")
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rowwise", "fused"])
@pytest.mark.parametrize("shape", [(1, 2), (300, 257), (64, 4096)], ids=str)
def test_a_captured_graph_computes_from_the_new_content(name, shape, device, same):
    """Warmed up on a side stream, captured forward and backward, replayed twice on other numbers."""
    M, N = shape
    static = torch.ones(M, N, device=device, requires_grad=True)
    gamma = torch.linspace(0.5, 1.5, N, device=device).requires_grad_()
    dy = torch.linspace(-1, 1, M * N, device=device).view(M, N)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(rms_norm(static, gamma, impl=name), (static, gamma), dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(static, gamma, impl=name)
        dx, dgamma = torch.autograd.grad(y, (static, gamma), dy)
    for seed in (1, 2):
        fresh = torch.randn(M, N, generator=torch.Generator().manual_seed(seed)).to(device)
        if N == 2:
            fresh = torch.tensor([[5.0, 12.0]], device=device)
        with torch.no_grad():
            static.copy_(fresh)
        graph.replay()
        want = reference.backward(dy.double(), fresh.double(), gamma.detach().double(), 1e-6)
        torch.testing.assert_close(
            y.double(), reference.forward(fresh.double(), gamma.detach().double(), 1e-6), atol=1e-6, rtol=1e-5
        )
        torch.testing.assert_close(dx.double(), want[0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(dgamma.double(), want[1], atol=1e-4, rtol=1e-4)
    if N == 2:
        same(y / gamma.detach(), [[0.54392829, 1.30542790]])


COLD = """
import sys
import torch
from rmsnorm_cli.kernels import rms_norm
x = torch.full((3, 64), 2.0, device="cuda", requires_grad=True)
gamma = torch.ones(64, device="cuda", requires_grad=True)
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        y = rms_norm(x, gamma, impl=sys.argv[1])
        dx, dgamma = torch.autograd.grad(y, (x, gamma), torch.ones_like(x))
    graph.replay()
    torch.cuda.synchronize()
    print("replayed", bool((y - 1).abs().max() < 1e-5), float(dgamma.sum()))
except RuntimeError as refused:
    print("refused", str(refused).splitlines()[0])
    torch.cuda.synchronize()
print("after", float(rms_norm(x, gamma, impl=sys.argv[1]).sum()))
"""


@pytest.mark.case("B53")
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rowwise", "fused"])
def test_a_cold_capture_works_or_says_so_and_spoils_nothing(name, tmp_path):
    """The first launch of a process inside a capture: the right numbers or an error, and the next call is right."""
    done = subprocess.run(
        [sys.executable, "-c", COLD, name],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("refused") or first.startswith("replayed True"), done.stdout + done.stderr
    assert float(last.split()[1]) == pytest.approx(192, rel=1e-5)


@pytest.mark.case("B55")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for it, and hides the warning
@pytest.mark.parametrize("name", ["rowwise", "fused"])
def test_a_compiled_network_equals_the_eager_one_at_every_row_count(name, device):
    """Linear, norm, linear: fused stays in the one graph, rowwise breaks it and goes on; never other numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), RMSNorm(8, impl=name), torch.nn.Linear(8, 3)).to(device)
    graphs = []

    def backend(module, _inputs):
        graphs.append(module)
        return module.forward

    fast = torch.compile(network, fullgraph=name == "fused", backend=backend)
    for M in (8, 9, 64):
        x = torch.randn(M, 8, generator=torch.Generator().manual_seed(M)).to(device)
        found = []
        for function in (network, fast):
            leaf = x.clone().requires_grad_()
            network.zero_grad()
            y = function(leaf)
            y.square().sum().backward()
            found.append([y.detach(), leaf.grad, *(p.grad.clone() for p in network.parameters())])
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)
    assert len(graphs) <= 2 if name == "fused" else len(graphs) <= 8
    torch._dynamo.reset()


@pytest.mark.case("B55")
@pytest.mark.parametrize("strict", [False, True])
def test_what_can_be_exported_is_and_the_rest_says_so(strict, free, device):
    """An exporter takes no graph break: `reference` is plain operations, `fused` one operator, `rowwise` neither."""
    x = torch.arange(12.0, device=device).reshape(3, 4)
    norm = RMSNorm(4, device=device, impl=free)
    exported = torch.export.export(norm, (x,), strict=strict).module()
    torch.testing.assert_close(exported(x), norm(x), atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of prototypes and of what is deprecated
@pytest.mark.case("B55")
def test_what_no_tracer_can_record_is_refused_with_the_way_out(device):
    x = torch.ones(3, 4, device=device)
    with pytest.raises(ContractError, match=r"rowwise .*cannot be exported: use impl='fused'"):
        torch.export.export(RMSNorm(4, device=device, impl="rowwise"), (x,), strict=False)
    for name in ("rowwise", "fused"):
        with pytest.raises(ContractError, match=r"torch\.jit\.trace records .*use torch\.export or torch\.compile"):
            torch.jit.trace(RMSNorm(4, device=device, impl=name), (x,))
    traced = torch.jit.trace(RMSNorm(4, device=device, impl="reference"), (x,))
    assert torch.equal(traced(2 * x), rms_norm(2 * x, torch.ones(4, device=device), impl="reference"))


@pytest.mark.case("B56")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [2.0**-100, 1.0, 2.0**100])
def test_sixteen_bits_are_numbers_and_not_integers(scale, dtype, free, device, rounded):
    """[1, 2, 3, 4] in bf16 read as integers would be 16256 and so on; sums, products and NaN are those of numbers."""
    if dtype == torch.float16 and scale != 1:
        scale = 1.0
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64) * scale
    gamma = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    y = rms_norm(x.to(device, dtype), gamma.to(device, dtype), impl=free)
    want = reference.forward(x, gamma, 1e-6) if scale < 2.0**60 else torch.zeros(1, 4)
    rounded(y, want)
    bad = x.to(device, dtype).repeat(2, 1)
    bad[1, 2] = float("nan")
    y = rms_norm(bad, gamma.to(device, dtype), impl=free)
    assert y[1].isnan().all()
    assert y[0].isfinite().all()


@pytest.mark.case("B56")
def test_the_reported_row_in_sixteen_bits(free, device, same):
    for dtype, unit in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 2e-6)):
        y = rms_norm(torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=dtype, device=device), None, impl=free)
        same(y, [[0.365148, 0.730297, 1.095445, 1.460593]], atol=0, rtol=unit)


EPS = {
    "int": 1,
    "float": 1.0,
    "numpy float32": numpy.float32(1),
    "numpy float64": numpy.float64(1),
    "numpy int": numpy.int64(1),
    "tensor": torch.tensor(1.0),
    "float64 tensor": torch.tensor(1.0, dtype=torch.float64),
}


@pytest.mark.case("B58")
@pytest.mark.parametrize("kind", EPS)
@pytest.mark.parametrize("door", ["function", "module"])
def test_every_kind_of_number_is_the_number_it_names(door, kind, impl, tensor, same):
    """Specialised as an integer, or half-typed, it arrived as 0; alternating values must work at once."""
    x, gamma = tensor([[3.0, 4.0]]), tensor([1.0, 1.0])

    def normalised(eps):
        if door == "function":
            return rms_norm(x, gamma, eps, impl=impl)
        return RMSNorm(2, eps=eps, impl=impl, device=x.device)(x)

    same(normalised(EPS[kind]), [[0.81649658, 1.08866211]])
    same(normalised(1e-6), [[0.84852810, 1.13137080]])
    same(normalised(EPS[kind]), [[0.81649658, 1.08866211]])


@pytest.mark.case("B58")
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1, 3, 1e-12])
def test_eps_reaches_the_kernel_in_its_own_value(eps, impl, tensor):
    x = tensor([[3e-4, 4e-4], [0.3, 0.4]])
    want = reference.forward(x.detach().double(), None, float(eps))
    got = rms_norm(x, tensor([1.0, 1.0]), eps, impl)
    torch.testing.assert_close(got.double(), want, atol=0, rtol=1e-6)
