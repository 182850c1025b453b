"""Launches that may begin while the kernel before them still runs: what they read and overwrite is that kernel's.

A kernel that lets its successors start at once, waits, and only then reads or writes shows whether they wait for it.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer

from rmsnorm_cli.kernels import backplan, frontplan, rms_norm
from rmsnorm_cli.kernels.program import Program
from rmsnorm_cli.kernels.rowlayout import walking_order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="no kernel is launched early before Hopper",
    ),
]

SHAPES = [
    (4096, 128, "bfloat16"),
    (1024, 4096, "bfloat16"),
    (128, 257, "float32"),
    (512, 769, "float16"),
    (512, 4099, "float16"),
    (256, 16384, "bfloat16"),
    (64, 40960, "bfloat16"),
    (32, 131072, "bfloat16"),
]


@triton.jit
def late_kernel(source_ptr, target_ptr, size, NANOSECONDS: tl.constexpr, BLOCK: tl.constexpr):
    """Let successors start, wait, then copy."""
    gdc_launch_dependents()
    begun = globaltimer()
    while globaltimer() - begun < NANOSECONDS:
        pass
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        here = first + tl.arange(0, BLOCK)
        tl.store(target_ptr + here, tl.load(source_ptr + here, mask=here < size), mask=here < size)


def copy_late(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy half a millisecond from now: meanwhile the host goes on, and so may the card."""
    late_kernel[(16,)](source, target, source.numel(), NANOSECONDS=500_000, BLOCK=1024, num_warps=4)


def in_time() -> None:
    """Fail where what was launched behind a late copy came too late to run beside it: nothing was shown then."""
    assert not torch.cuda.current_stream().query(), "the host was slower than the late copy"


@pytest.fixture(autouse=True)
def compiled():
    """Compile the late copy for every dtype."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        one = torch.ones(32, device="cuda", dtype=dtype)
        copy_late(one, one.clone())
    torch.cuda.synchronize()


def drawn(M: int, N: int, dtype: str) -> Any:
    """Draw x, gamma and dy."""
    kind = getattr(torch, dtype)
    x, dy = (torch.randn(M, N, device="cuda").to(kind) for _ in range(2))
    return x.requires_grad_(), torch.randn(N, device="cuda").to(kind).requires_grad_(), dy


@pytest.mark.parametrize(("M", "N", "dtype"), SHAPES)
def test_what_the_kernel_before_writes_last_is_read(M, N, dtype):
    """A late x is waited for by a forward, a late dy by a backward: the bits are those of x and dy that were there."""
    x, gamma, dy = drawn(M, N, dtype)
    y = rms_norm(x, gamma)
    want = torch.autograd.grad(y, (x, gamma), dy, retain_graph=True)
    late_x, late_dy, weights = (
        torch.full_like(x.detach(), float("nan")),
        torch.full_like(dy, float("nan")),
        gamma.detach(),
    )
    assert rms_norm(late_x, weights).isnan().all()
    torch.cuda.synchronize()
    copy_late(x.detach(), late_x)
    late_y = rms_norm(late_x, weights)
    in_time()
    torch.cuda.synchronize()
    copy_late(dy, late_dy)
    got = torch.autograd.grad(y, (x, gamma), late_dy)
    in_time()
    assert torch.equal(late_y, y)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("M", "N", "dtype"), SHAPES)
def test_what_the_kernel_before_reads_last_is_still_there(M, N, dtype):
    """Memory that is freed while a kernel has yet to read it is handed to y, which is written only after."""
    x, gamma, _ = (tensor.detach() for tensor in drawn(M, N, dtype))
    rms_norm(x, gamma)
    before = torch.empty_like(x)
    before.normal_()
    kept, read, address = before.clone(), torch.empty_like(before), before.data_ptr()
    torch.cuda.synchronize()
    copy_late(before, read)
    del before
    y = rms_norm(x, gamma)
    in_time()
    assert y.data_ptr() == address
    assert torch.equal(read, kept)


def test_a_launch_that_does_not_wait_is_seen():
    """The same launch, early but without its waiting, reads what is not there yet: the tests above can fail."""
    x, gamma, _ = (tensor.detach() for tensor in drawn(1024, 4096, "bfloat16"))
    late, built = torch.full_like(x, float("nan")), Program.__init__

    def hasty(self: Program, kernel: Any, constants: dict[str, Any], warps: int, **more: Any) -> None:
        built(self, kernel, constants | {"DEPENDENT": False}, warps, **more)
        self.options["launch_pdl"] = True

    with mock.patch.object(Program, "__init__", hasty):
        plan = frontplan.ForwardPlan(x, gamma)
    plan.run(x, gamma, 1e-6)
    torch.cuda.synchronize()
    copy_late(x, late)
    y, _, _ = plan.run(late, gamma, 1e-6)
    in_time()
    assert y.isnan().any()


def test_early_launches_are_captured():
    """In a graph: as its first node, after zeros, and after two streams have met."""
    x, gamma, dy = drawn(1024, 4096, "bfloat16")
    want = rms_norm(x, gamma)
    grads = torch.autograd.grad(want, (x, gamma), dy)
    x, gamma = x.detach(), gamma.detach()
    forward = frontplan.ForwardPlan(x, gamma)
    backward = backplan.BackwardPlan(dy, x, gamma, walking_order(x), True, True)
    _, rstd, _ = forward.run(x, gamma, 1e-6)
    backward.run(dy, x, gamma, rstd)
    seen: list[tuple[torch.Tensor, ...]] = []

    def both() -> None:
        y, saved, _ = forward.run(x, gamma, 1e-6)
        dx, dgamma, _ = backward.run(dy, x, gamma, saved)
        seen.append((y, dx, dgamma))

    beside = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
        zeros = torch.zeros(1024, device="cuda")
        both()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            twice = x * 2
        torch.cuda.current_stream().wait_stream(beside)
        both()
    for _ in range(3):
        for tensor in (zeros, twice, *(tensor for each in seen for tensor in each)):
            tensor.fill_(float("nan"))
        graph.replay()
        for each in seen:
            assert all(torch.equal(a, b) for a, b in zip(each, (want, *grads), strict=True))
        assert torch.equal(twice, x * 2)
        assert not zeros.any()
