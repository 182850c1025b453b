"""The teaching kernel: exact where the algebra is exact, within the declared tolerance of float64 elsewhere."""

import functools
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rmsnorm_cli.kernels import reference, rowwise

close = torch.testing.assert_close
DTYPES = [torch.float32, torch.float16]
TOLERANCES = {torch.float32: {"atol": 1e-5, "rtol": 1e-4}, torch.float16: {"atol": 3e-3, "rtol": 3e-3}}
COLUMNS = [1, 2, 3, 31, 33, 127, 256, 257, 1000, 1025, 4096]


def draw(M: int, N: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x with rows of rms 1e-2 to 30, gamma of both signs, and dy of a mean loss, rounded to dtype."""
    generator = torch.Generator().manual_seed(1000 * M + N)
    scales = torch.logspace(-2, 1.5, M, dtype=torch.float64)[torch.randperm(M, generator=generator)]
    x = scales[:, None] * torch.randn(M, N, generator=generator, dtype=torch.float64)
    gamma = torch.randn(N, generator=generator, dtype=torch.float64)
    dy = torch.randn(M, N, generator=generator, dtype=torch.float64) / M**0.5
    return x.to(device, dtype), gamma.to(device, dtype), dy.to(device, dtype)


def run(x, gamma, dy, eps=1e-6, kernels=rowwise):
    """Return y, dx, dgamma and rstd of the kernels."""
    y, rstd = kernels.forward(x, gamma, eps)
    return y, *kernels.backward(dy, x, gamma, rstd), rstd


def oracle(x, gamma, dy, eps=1e-6):
    """Return the float64 results for the same rounded inputs."""
    x, gamma, dy = x.double(), gamma.double(), dy.double()
    y = reference.forward(x, gamma, eps)
    return y, *reference.backward(dy, x, gamma, eps), reference.statistics(x, eps).flatten()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", COLUMNS)
@pytest.mark.parametrize("M", [1, 17])
def test_within_the_declared_tolerance_of_float64(M, N, dtype, device):
    """y, dgamma and rstd raw, dx in units of its row's rstd: rows of very different scale are all looked at."""
    x, gamma, dy = draw(M, N, dtype, device)
    y, dx, dgamma, rstd = run(x, gamma, dy)
    want_y, want_dx, want_dgamma, want_rstd = oracle(x, gamma, dy)
    limit = TOLERANCES[dtype]
    assert (y.dtype, dx.dtype, dgamma.dtype, rstd.dtype) == (dtype, dtype, dtype, torch.float32)
    assert (y.shape, dx.shape, dgamma.shape, rstd.shape) == (x.shape, x.shape, gamma.shape, (M,))
    close(y.double(), want_y, **limit)
    close(dgamma.double(), want_dgamma, **limit)
    close(rstd.double(), want_rstd, atol=0, rtol=1e-6)
    close(dx.double() / want_rstd[:, None], want_dx / want_rstd[:, None], **limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N"), [(1, 1), (3, 2), (2, 3), (17, 31), (5, 256), (67, 257), (2, 1000)])
def test_exact_class_is_exact(M, N, dtype, device):
    """Inputs of ±1 and eps = 3 make rstd = mean(u · x_hat) = ½: all results are small multiples of 1/8, unrounded."""
    generator = torch.Generator().manual_seed(M * N)
    sign = lambda *size: torch.randint(0, 2, size, generator=generator) * 2.0 - 1  # noqa: E731
    x, gamma = sign(M, N), sign(N) * torch.randint(1, 3, (N,), generator=generator)
    pairs = 1 + 2 * torch.stack([swing := sign(M, N // 2), -swing], dim=2).reshape(M, -1)  # u · x: 3 beside -1
    ux = torch.cat([pairs, torch.ones(M, N % 2)], dim=1)
    dy = ux / (x * gamma)  # a multiple of ½, exact in every dtype
    x, gamma, dy = (tensor.to(device, dtype) for tensor in (x, gamma, dy))
    y, dx, dgamma, rstd = run(x, gamma, dy, eps=3.0)
    wanted = oracle(x, gamma, dy, eps=3.0)
    assert torch.equal(rstd, torch.full_like(rstd, 0.5))
    for got, want in zip((y, dx, dgamma), wanted, strict=False):
        assert torch.equal(got.double(), want)


def test_dividing_by_the_padded_block_shows_at_257_and_not_at_256(device, tmp_path):
    """257 ones give 0.9999995; the mistake gives 1.411458 there, and the right answer at 256."""
    faulty = changed_copy(tmp_path, "tl.sum(x * x, axis=0) / N", "tl.sum(x * x, axis=0) / BLOCK")
    for N, right, wrong in ((257, 0.9999995, 1.411458), (256, 0.9999995, 0.9999995)):
        x, gamma = torch.ones(1, N, device=device), torch.ones(N, device=device)
        close(rowwise.forward(x, gamma, 1e-6)[0], torch.full_like(x, right), atol=1e-7, rtol=0)
        close(faulty.forward(x, gamma, 1e-6)[0], torch.full_like(x, wrong), atol=1e-6, rtol=0)


def changed_copy(folder: Path, old: str, new: str):
    """Load rowwise.py from elsewhere, with one expression replaced, as the exercises do."""
    source = inspect.getsource(rowwise)
    assert source.count(old) == 1
    path = folder / "changed.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("changed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_each_time_and_in_every_batch(dtype, device):
    """Repeated runs agree bit for bit; a row's y and dx do not depend on the rows beside it."""
    x, gamma, dy = draw(7, 257, dtype, device)
    first, second = run(x, gamma, dy), run(x, gamma, dy)
    for got, again in zip(first, second, strict=True):
        assert torch.equal(got, again)
    for row in (0, 3, 6):
        y, dx, _, _ = run(x[row : row + 1].contiguous(), gamma, dy[row : row + 1].contiguous())
        assert torch.equal(y[0], first[0][row])
        assert torch.equal(dx[0], first[1][row])


GUARD = 4096  # numbers on either side of an allocation; no block is wider


@pytest.mark.case("B08", "B14")
@pytest.mark.parametrize(("M", "N"), [(1, 3), (65, 257)])
def test_every_element_is_written_and_nothing_else(M, N, device, monkeypatch):
    """Allocations full of a poison, with guards around them, come out right everywhere and untouched outside."""
    inputs = draw(M, N, torch.float32, device)
    before = [tensor.clone() for tensor in inputs]
    clean = run(*inputs)
    for poison in (float("nan"), 1e4):
        arenas: list[torch.Tensor] = []

        def carve(allocate, *size, arenas=arenas, poison=poison, **options):
            plain = allocate(*size, **options)
            arena = torch.full((plain.numel() + 2 * GUARD,), poison, dtype=plain.dtype, device=plain.device)
            arenas.append(arena)
            return arena[GUARD:-GUARD].view(plain.shape)

        with monkeypatch.context() as patch:
            for name in ("empty", "empty_like"):
                patch.setattr(torch, name, functools.partial(carve, getattr(torch, name)))
            poisoned = run(*inputs)
        assert len(arenas) == 4  # y, rstd, dx, partial
        for arena in arenas:
            guards = torch.cat([arena[:GUARD], arena[-GUARD:]])
            close(guards, torch.full_like(guards, poison), atol=0, rtol=0, equal_nan=True)
        for got, want in zip(poisoned, clean, strict=True):
            assert torch.equal(got, want)
    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(tensor, copy)


def test_padding_behind_the_inputs_is_not_read(device):
    """NaN right behind the last element of x, gamma and dy reaches no result."""
    inputs = draw(3, 257, torch.float32, device)
    clean = run(*inputs)
    trailed = []
    for tensor in inputs:
        arena = torch.full((tensor.numel() + 512,), float("nan"), device=device)
        arena[: tensor.numel()] = tensor.flatten()
        trailed.append(arena[: tensor.numel()].view(tensor.shape))
    for got, want in zip(run(*trailed), clean, strict=True):
        assert torch.equal(got, want)


@pytest.mark.case("B46")
def test_what_is_not_needed_is_neither_allocated_nor_different(device, monkeypatch):
    """A frozen gamma costs no partial, a frozen x no dx, and the other gradient keeps its bits."""
    x, gamma, dy = draw(5, 257, torch.float32, device)
    _, rstd = rowwise.forward(x, gamma, 1e-6)
    dx, dgamma = rowwise.backward(dy, x, gamma, rstd)
    shapes: list[object] = []
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(rowwise.torch, "empty", lambda size, **k: shapes.append(tuple(size)) or empty(size, **k))
    monkeypatch.setattr(rowwise.torch, "empty_like", lambda t: shapes.append(tuple(t.shape)) or empty_like(t))
    assert rowwise.backward(dy, x, gamma, rstd, need_dx=False, need_dgamma=False) == (None, None)
    assert shapes == []
    only_dx, nothing = rowwise.backward(dy, x, gamma, rstd, need_dgamma=False)
    assert nothing is None
    assert torch.equal(only_dx, dx)
    assert shapes == [(5, 257)]  # dx itself, no partial
    nothing, only_dgamma = rowwise.backward(dy, x, gamma, rstd, need_dx=False)
    assert nothing is None
    assert torch.equal(only_dgamma, dgamma)
    assert shapes == [(5, 257)] * 2  # the partial, no dx


def test_no_rows_launch_nothing(device, monkeypatch):
    """M = 0 gives empty y and dx and a dgamma of zeros, without an empty grid, and the next call is right."""
    x, gamma = torch.empty(0, 8, device=device), torch.arange(1.0, 9, device=device)
    with monkeypatch.context() as patch:
        for kernel in ("forward_kernel", "backward_kernel", "column_sum_kernel"):
            patch.setattr(rowwise, kernel, None)
        y, dx, dgamma, rstd = run(x, gamma, x)
    assert (y.shape, dx.shape, rstd.shape) == ((0, 8), (0, 8), (0,))
    assert torch.equal(dgamma, torch.zeros(8, device=device))
    x = torch.ones(1, 8, device=device)
    close(run(x, gamma, x)[0], 0.9999995 * gamma[None])


def test_eps_is_a_float32_in_the_kernel(device):
    """At rms 1e-3 eps decides: 1e-6 and 2e-6 give 1/sqrt(2) and 1/sqrt(3), and a change of eps works at once."""
    x, gamma = torch.full((1, 4), 1e-3, device=device), torch.ones(4, device=device)
    for eps, want in ((1e-6, 2**-0.5), (2e-6, 3**-0.5), (1e-6, 2**-0.5)):
        close(rowwise.forward(x, gamma, eps)[0], torch.full_like(x, want), atol=2e-7, rtol=0)
    assert rowwise.forward(x, gamma, 1e-6)[1].dtype == torch.float32


def test_infinities_are_results_and_not_warnings(device):
    """An fp16 overflow of dx is inf, never NaN, and raises no warning (warnings are errors here)."""
    x, gamma = torch.zeros(1, 4, dtype=torch.float16, device=device), torch.ones(4, dtype=torch.float16, device=device)
    y, dx, dgamma, rstd = run(x, gamma, torch.ones_like(x), eps=1e-12)
    assert torch.equal(y, x)
    assert torch.equal(dgamma, torch.zeros_like(gamma))
    assert torch.isposinf(dx).all()
    assert torch.isfinite(rstd).all()


def test_compiles_for_a_gpu_without_atomics():
    """The three kernels compile for sm_90, with no GPU in the machine, and no dgamma is summed by atomics."""
    program = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rmsnorm_cli.kernels import rowwise as r

def ptx(kernel, numbers, pointers, **constants):
    names = kernel.arg_names
    kinds = {name: pointers for name in names if name.endswith("_ptr")} | {"rstd_ptr": "*fp32", "partial_ptr": "*fp32"}
    signature = {name: kinds.get(name) or numbers.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

texts = [
    ptx(r.forward_kernel, {"N": "i32", "eps": "fp32"}, "*fp16", BLOCK=64),
    ptx(r.backward_kernel, {"N": "i32"}, "*fp16", BLOCK=64, NEED_DX=True, NEED_DGAMMA=True),
    ptx(r.column_sum_kernel, {"M": "i32", "N": "i32"}, "*fp16", BLOCK_M=16, BLOCK_N=16),
]
print(all(".visible .entry" in text for text in texts), any(re.search(r"\\b(atom|red)\\.", text) for text in texts))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N"), [(65537, 33), (4096, 4096), (16384, 1023), (1, 4096)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_inputs_on_a_gpu(M, N, dtype):
    """Grids past 65,535 rows and the largest partial agree with float64, and repeat bit for bit."""
    inputs = draw(M, N, dtype, "cuda:0")
    first, second = run(*inputs), run(*inputs)
    wanted = oracle(*inputs)
    for got, again, want in zip(first[:3:2], second[:3:2], wanted[:3:2], strict=True):
        assert torch.equal(got, again)
        close(got.double(), want, **TOLERANCES[dtype])


@pytest.mark.case("B49")
@pytest.mark.gpu2
def test_a_gpu_that_is_not_the_current_one():
    """Tensors on the second GPU are computed there, and the current device stays what it was."""
    x, gamma, dy = draw(5, 257, torch.float32, "cuda:1")
    with torch.cuda.device(0):
        got = run(x, gamma, dy)
        assert torch.cuda.current_device() == 0
    for result, want in zip(got[:3], oracle(x, gamma, dy), strict=False):
        assert result.device == x.device
        close(result.double(), want, atol=1e-3, rtol=1e-3)
