"""Every refusal of `rowwise`: it names argument, value and limit, and comes before any allocation or launch."""

import os
import subprocess
import sys

import numpy
import pytest
import torch

from rmsnorm_cli.kernels import CallSpec, ContractError, counters, reset_counters, rms_norm, rowwise
from rmsnorm_cli.kernels.contract import check_gradient, check_rowwise, eps_value, rowwise_refusal


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def negative(*shape: int, device: str) -> torch.Tensor:
    """Return a contiguous real tensor whose sign is a flag on the view."""
    parts = torch.zeros(*shape, dtype=torch.complex64, device=device)
    return parts.conj().imag


REFUSALS = {
    "1-D": (lambda d: (ones(8, device=d), ones(8, device=d)), ["x has shape (8,)", "2 dimensions"]),
    "3-D": (lambda d: (ones(2, 3, 8, device=d), ones(8, device=d)), ["x has shape (2, 3, 8)", "2 dimensions"]),
    "0-d": (lambda d: (torch.tensor(1.0, device=d), ones(1, device=d)), ["x has 0 dimensions", "at least 1"]),
    "no columns": (lambda d: (ones(3, 0, device=d), ones(0, device=d)), ["x has shape (3, 0)", "at least 1"]),
    "transposed": (lambda d: (ones(4, 3, device=d).t(), ones(4, device=d)), ["x is not contiguous"]),
    "sliced": (lambda d: (ones(4, 6, device=d)[:, :4], ones(4, device=d)), ["x is not contiguous"]),
    "expanded": (lambda d: (ones(1, 4, device=d).expand(3, 4), ones(4, device=d)), ["x is not contiguous"]),
    "bfloat16": (
        lambda d: (ones(2, 4, dtype=torch.bfloat16, device=d), ones(4, device=d)),
        ["x has dtype torch.bfloat16"],
    ),
    "float64": (
        lambda d: (ones(2, 4, dtype=torch.float64, device=d), ones(4, device=d)),
        ["x has dtype torch.float64"],
    ),
    "integer": (lambda d: (ones(2, 4, dtype=torch.int32, device=d), ones(4, device=d)), ["x has dtype torch.int32"]),
    "complex": (lambda d: (ones(2, 4, dtype=torch.complex64, device=d), ones(4, device=d)), ["torch.complex64"]),
    "boolean": (lambda d: (ones(2, 4, dtype=torch.bool, device=d), ones(4, device=d)), ["x has dtype torch.bool"]),
    "two dtypes": (
        lambda d: (ones(2, 4, dtype=torch.float16, device=d), ones(4, device=d)),
        ["gamma has dtype torch.float32", "torch.float16"],
    ),
    "integer gamma": (
        lambda d: (ones(2, 4, device=d), ones(4, dtype=torch.int64, device=d)),
        ["gamma has dtype torch.int64"],
    ),
    "no gamma": (lambda d: (ones(2, 4, device=d), None), ["gamma is None", "rowwise"]),
    "short gamma": (lambda d: (ones(2, 4, device=d), ones(3, device=d)), ["gamma has shape (3,)", "(4,)"]),
    "gamma of one": (lambda d: (ones(2, 4, device=d), ones(1, device=d)), ["gamma has shape (1,)", "(4,)"]),
    "gamma of rows": (lambda d: (ones(2, 4, device=d), ones(2, 4, device=d)), ["gamma has shape (2, 4)", "(4,)"]),
    "strided gamma": (lambda d: (ones(2, 4, device=d), ones(8, device=d)[::2]), ["gamma has stride 2", "stride 1"]),
    "gamma elsewhere": (lambda d: (ones(2, 4, device=d), ones(4, device="meta")), ["gamma is on meta", "{device}"]),
    "x elsewhere": (lambda d: (ones(2, 4, device="meta"), ones(4, device="meta")), ["x is on meta", "CUDA"]),
    "sparse": (lambda d: (ones(2, 4, device=d).to_sparse(), ones(4, device=d)), ["x has layout torch.sparse_coo"]),
    "a list": (lambda d: ([[1.0, 2.0]], ones(2, device=d)), ["x is a list", "torch.Tensor"]),
    "an array": (lambda d: (ones(2, 4, device=d), numpy.ones(4)), ["gamma is a ndarray", "torch.Tensor"]),
    "negative view": (lambda d: (negative(1, 1, device=d), ones(1, device=d)), ["x is a negative view", "resolve_neg"]),
    "too wide": (lambda d: (ones(1, 4097, device=d), ones(4097, device=d)), ["x has 4097 columns", "4096"]),
    "too large": (
        lambda d: (torch.empty(4097, 4096, device=d), ones(4096, device=d)),
        ["x has shape (4097, 4096)", "67,125,248", "67,108,864"],
    ),
}


@pytest.mark.parametrize("why", REFUSALS)
@pytest.mark.parametrize("gradient", [False, True], ids=["no_grad", "grad"])
def test_refusal_names_argument_value_and_limit_before_anything_happens(why, gradient, device, monkeypatch):
    """Nothing is allocated, nothing launched, nothing counted, gradient or not, and the message is one line."""
    make, words = REFUSALS[why]
    x, gamma = make(device)
    for tensor in (x, gamma):
        if gradient and isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.is_leaf:
            tensor.requires_grad_()
    reset_counters()

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("allocated before the refusal")

    with monkeypatch.context() as patch:
        for name in ("empty", "empty_like", "zeros", "zeros_like"):
            patch.setattr(torch, name, forbidden)
        with pytest.raises(ContractError) as refusal:
            rms_norm(x, gamma, 1e-6, impl="rowwise")
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word.format(device=device) in message
    assert counters() == {}


@pytest.mark.case("B11")
@pytest.mark.parametrize("shape", [(4096, 4096), (16384, 1024), (0, 4096), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_limits_themselves_are_inside(shape, dtype, device):
    """4096 × 4096 is exactly 64 MiB of partials and is taken; so are empty and smallest inputs."""
    x, gamma = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape[-1], dtype=dtype, device=device)
    assert check_rowwise(x, gamma, 1e-6) == 1e-6


def test_the_same_verdict_without_tensors():
    """`accepts` speaks about a plan: the shapes of a case are enough to know that it will be refused, and why."""
    spec = CallSpec((4096, 4096), torch.float32, torch.float32, True, 1e-6, "cuda")
    assert rowwise_refusal(spec) is None
    too_large = rowwise_refusal(CallSpec((4097, 4096), torch.float32, torch.float32, True, 1e-6, "cuda"))
    assert too_large is not None
    assert "67,125,248" in too_large
    assert CallSpec.of(ones(2, 6)[:, ::2], None, 1.0) == CallSpec((2, 3), torch.float32, None, False, 1.0, "cpu")


@pytest.mark.case("B58")
@pytest.mark.parametrize(
    "eps", [1, 1.0, numpy.float32(1), numpy.float64(1), numpy.int64(1), torch.tensor(1.0), torch.tensor(1.0).double()]
)
def test_every_kind_of_number_becomes_the_same_float(eps):
    """An integer eps must not reach Triton, which would compile it in as an integer."""
    value = eps_value(eps)
    assert type(value) is float
    assert value == 1.0


@pytest.mark.parametrize(
    "eps",
    [
        *(10**400, 0, 0.0, -1, -1e-6, float("nan"), float("inf"), True, "1e-6", None, 1j, numpy.bool_(True)),
        torch.tensor([1e-6]),
        torch.tensor(1),
        torch.tensor(1e-6, requires_grad=True),
        torch.tensor(1e-6, device="meta"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("impl", ["reference", "rowwise"])
def test_what_is_no_positive_finite_number_is_no_eps(eps, impl, device):
    """A bool, a text, a tensor with a shape or a gradient, 0, below 0 and not finite are refused by name."""
    with pytest.raises(ContractError, match=r"^eps is "):
        rms_norm(ones(1, 2, device=device), ones(2, device=device), eps, impl=impl)


@pytest.mark.parametrize("impl", ["reference", "rowwise", "fused"])
@pytest.mark.parametrize("eps", [1e-46, 1e-39, 1e39])
def test_eps_that_float32_cannot_hold_is_refused_where_float32_adds_it(eps, impl, device):
    """1e-46 would be 0 when it is added and turn a row of zeros into NaN; float64 arithmetic takes it."""
    with pytest.raises(ContractError, match=r"eps is .*float32.*1\.18e-38"):
        rms_norm(ones(1, 2, device=device), ones(2, device=device), eps, impl=impl)
    y = rms_norm(torch.zeros(1, 2, dtype=torch.float64), None, eps, impl="reference")
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize(
    ("dy", "says"),
    [
        (ones(2, 3), r"dy has shape \(2, 3\).*\(2, 4\)"),
        (ones(2, 1), r"dy has shape \(2, 1\).*\(2, 4\)"),
        (ones(2, 4, dtype=torch.float16), "dy has dtype torch.float16.*torch.float32"),
        (ones(2, 4, device="meta"), "dy has device meta.*cpu"),
        (ones(4, 2).t(), r"dy has strides \(1, 2\).*contiguous"),
        (ones(1).expand(2, 4), r"dy has strides \(0, 0\).*contiguous"),
    ],
)
def test_a_gradient_that_does_not_match_x_is_refused(dy, says):
    """The backward launcher checks shape, dtype, device and layout of dy against x."""
    with pytest.raises(ContractError, match=says):
        check_gradient(dy, ones(2, 4))


def test_the_backward_launcher_asks_the_contract(device):
    """A dy of the wrong shape never reaches the kernel."""
    x, gamma = ones(2, 4, device=device), ones(4, device=device)
    _, rstd = rowwise.forward(x, gamma, 1e-6)
    with pytest.raises(ContractError, match="dy has shape"):
        rowwise.backward(ones(2, 1, device=device), x, gamma, rstd)


def test_cpu_tensors_without_the_interpreter_are_refused_with_the_way_out():
    """A fresh process that did not ask for the interpreter gets one sentence that says how, and no pointer error."""
    program = (
        "import torch; from rmsnorm_cli.kernels import rms_norm, ContractError\n"
        "try: rms_norm(torch.ones(2, 4), torch.ones(4), impl='rowwise')\n"
        "except ContractError as refusal: print(refusal)\n"
        "print(rms_norm(torch.ones(2, 4), impl='reference').shape)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    refusal, shape = done.stdout.splitlines()
    assert "x is on cpu" in refusal
    assert "TRITON_INTERPRET=1" in refusal
    assert shape == "torch.Size([2, 4])"
