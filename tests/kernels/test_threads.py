"""The fused kernels from wherever they are called: other threads and streams, a GPU that is not the current one.

Each test compares with the same call made alone, bit for bit: where a call comes from decides nothing about its result.
"""

import threading
from types import SimpleNamespace

import pytest
import torch

from rmsnorm_cli.kernels import ContractError, fused, rms_norm
from rmsnorm_cli.kernels.program import Program

SHAPES = [(300, 257), (300, 4096), (64, 16384), (40, 65536), (20, 131072)]
"""One for each kind of launch: tiles of rows, pipelined rows, rows read twice, rows shared by programs."""


def operands(M, N, device, seed=0):
    """Return x, gamma and dy in bf16, the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed + M + N)
    shapes = ((M, N), (N,), (M, N))
    return [torch.randn(*shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]


def results(x, gamma, dy):
    """Return y, dx and dgamma of one call through autograd."""
    x, gamma = x.detach().requires_grad_(), gamma.detach().requires_grad_()
    y = rms_norm(x, gamma, impl="fused")
    y.backward(dy)
    return y.detach(), x.grad, gamma.grad


def same(got, want):
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))


def in_threads(*calls):
    """Start all calls at once, wait for all, and raise what the first of them raised."""
    barrier, problems = threading.Barrier(len(calls)), []

    def guarded(call):
        try:
            barrier.wait()
            call()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def test_a_program_can_be_launched_only_once_it_is_whole(monkeypatch):
    """What a second thread looks at to see that a kernel is compiled is set after all that the launch needs."""
    seen = []

    class Watched(Program):
        def __setattr__(self, name, value):
            if name == "_call" and value is not None:
                seen.append(bool(self._middle))
            super().__setattr__(name, value)

    launcher = SimpleNamespace(
        launch=len, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0, profile_scratch_size=0
    )
    compiled = SimpleNamespace(run=launcher, function=1, packed_metadata=())
    for version in ("3.6.0", "9.9.9"):
        monkeypatch.setattr("triton.__version__", version)
        Watched(None, {}, 4)._prepare(compiled)
    assert seen == [True, True]


def test_many_threads_make_the_same_first_call(device):
    """Eight threads that meet in a call nobody made before get its bits, each for itself."""
    x, gamma, dy = operands(20, 130, device)
    want = results(x, gamma, dy)
    fused._forward_plans.clear()
    fused._backward_plans.clear()
    found = [None] * 8

    def call(i):
        found[i] = results(x, gamma, dy)

    in_threads(*(lambda i=i: call(i) for i in range(8)))
    assert all(same(got, want) for got in found)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N"), SHAPES)
def test_on_a_side_stream(M, N, device):
    """Launches go to the stream that is current: a side stream that still fills x is waited for by its order alone."""
    x, gamma, dy = operands(M, N, device)
    want = results(x, gamma, dy)
    stream = torch.cuda.Stream()
    late = torch.empty_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms, in which a launch on the wrong stream would read what is not there
        late.copy_(x)
        got = results(late, gamma, dy)
    stream.synchronize()
    assert same(got, want)


@pytest.mark.gpu
def test_two_streams_at_once(device):
    """Rows shared by programs that wait for one another, on two streams at once: neither launch blocks the other."""
    first, second = operands(400, 65536, device), operands(400, 65536, device, seed=1)
    wanted = [results(*first), results(*second)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(20):
        for i, (stream, given) in enumerate(zip(streams, (first, second), strict=True)):
            with torch.cuda.stream(stream):
                found[i].append(results(*given))
    torch.cuda.synchronize()
    for i in (0, 1):
        assert all(same(got, wanted[i]) for got in found[i])


@pytest.mark.gpu2
@pytest.mark.parametrize(("M", "N"), SHAPES)
def test_on_the_gpu_that_is_not_current(M, N):
    """X on cuda:1 while cuda:0 is current: the bits of cuda:0, all of it on cuda:1, nothing allocated on cuda:0."""
    want = results(*operands(M, N, "cuda:0"))
    x, gamma, dy = operands(M, N, "cuda:1")
    torch.cuda.synchronize(0)
    with torch.cuda.device(0):
        held, peak = torch.cuda.memory_allocated(0), torch.cuda.reset_peak_memory_stats(0)
        got = results(x, gamma, dy)
        assert torch.cuda.current_device() == 0
        assert (torch.cuda.memory_allocated(0), torch.cuda.max_memory_allocated(0)) == (held, held), peak
    assert {tensor.device.index for tensor in got} == {1}
    assert same(got, want)


@pytest.mark.gpu2
def test_backward_from_a_thread_whose_current_gpu_is_another():
    """Autograd's engine and a thread of the user's own have current devices of their own."""
    want = results(*operands(300, 4096, "cuda:0"))
    x, gamma, dy = operands(300, 4096, "cuda:1")
    x.requires_grad_()
    gamma.requires_grad_()
    y = rms_norm(x, gamma, impl="fused")
    in_threads(lambda: y.backward(dy))
    assert same((y.detach(), x.grad, gamma.grad), want)


@pytest.mark.gpu2
def test_two_gpus_in_two_threads():
    """A thread for each GPU, a hundred calls of every kind, first calls included: the same bits on both."""
    wanted = {(M, N): results(*operands(M, N, "cuda:0")) for M, N in SHAPES}
    fused._forward_plans.clear()
    fused._backward_plans.clear()
    wrong = []

    def work(device):
        torch.cuda.set_device(device)
        given = {(M, N): operands(M, N, device) for M, N in SHAPES}
        for _ in range(25):
            wrong.extend((device, shape) for shape in SHAPES if not same(results(*given[shape]), wanted[shape]))

    in_threads(lambda: work("cuda:0"), lambda: work("cuda:1"))
    assert wrong == []


@pytest.mark.gpu2
def test_operands_on_two_gpus_are_refused_by_name():
    x, gamma, _ = operands(4, 64, "cuda:1")
    with pytest.raises(ContractError, match=r"gamma is on cuda:0: it must be where x is, on cuda:1"):
        rms_norm(x, gamma.to("cuda:0"), impl="fused")
    results(*operands(4, 64, "cuda:1"))  # and the next call works
