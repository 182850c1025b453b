"""What each of our implementations accepts; every refusal is spoken here, before anything is allocated or written."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ROWWISE_MAX_COLUMNS = 4096
"""The widest row that one program of `rowwise` holds in registers."""

ROWWISE_MAX_PARTIAL_BYTES = 64 * 2**20
"""The largest M × N fp32 partial of dgamma that `rowwise` may allocate: exactly 4096 × 4096 numbers."""

FUSED_MAX_COLUMNS = 2**30
"""The widest row whose columns `fused` counts without overflow."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""What x and gamma may be made of; float8, integers, booleans and complex numbers are no operands of a norm."""

FP32_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
FP32_LARGEST = torch.finfo(torch.float32).max

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels of this process were decorated for Triton's interpreter (read once, as Triton does)."""


class ContractError(ValueError):
    """An input that an implementation does not take: the message names the argument, its value and the limit."""


@dataclass(frozen=True)
class CallSpec:
    """What a refusal can depend on without a tensor in hand, so that a plan can be made before inputs exist.

    `shape` is x's, `contiguous` is x's, `gamma_dtype` is None where there is no gamma.
    """

    shape: tuple[int, ...]
    x_dtype: torch.dtype
    gamma_dtype: torch.dtype | None
    contiguous: bool
    eps: float
    device_type: str

    @classmethod
    def of(cls, x: Tensor, gamma: Tensor | None, eps: float) -> CallSpec:
        """Describe a call by its tensors."""
        gamma_dtype = None if gamma is None else gamma.dtype
        return cls(tuple(x.shape), x.dtype, gamma_dtype, x.is_contiguous(), eps, x.device.type)


def eps_value(eps: object) -> float:
    """Return eps as a Python float, so that no kernel ever sees an integer, a NumPy type or a tensor.

    Takes int, float, a NumPy real number, or a 0-d floating CPU tensor without gradient.
    Raises ContractError for a bool, text, any other tensor, and a value that is not finite and above zero.
    """
    if type(eps) is float and 0 < eps < math.inf:  # nearly every call
        return eps
    if isinstance(eps, Tensor):
        if eps.dim() or eps.device.type != "cpu" or not eps.is_floating_point() or eps.requires_grad:
            raise ContractError(
                f"eps is a tensor of shape {tuple(eps.shape)}, {eps.dtype}, on {eps.device}: "
                "pass a number, or a 0-d floating CPU tensor that needs no gradient"
            )
        value = float(eps.item())
    elif isinstance(eps, numbers.Real) and not isinstance(eps, bool):
        try:
            value = float(eps)
        except OverflowError:  # an integer or a fraction beyond the largest float
            value = math.inf
    else:
        raise ContractError(f"eps is {eps!r} of type {type(eps).__name__}: it must be a number above 0")
    if not math.isfinite(value) or value <= 0:
        raise ContractError(f"eps is {value!r}: it must be finite and above 0")
    return value


def operand_refusal(spec: CallSpec) -> str | None:
    """Say why every implementation of ours refuses such a call, or return None: all that `reference` refuses."""
    for name, dtype in (("x", spec.x_dtype), ("gamma", spec.gamma_dtype)):
        if dtype is not None and dtype not in DTYPES:
            return f"{name} has dtype {dtype}: it must be torch.float32, float16, bfloat16 or float64"
    if not spec.shape:
        return "x has 0 dimensions: it needs at least 1, the row to normalise"
    if spec.shape[-1] == 0:
        return f"x has shape {spec.shape}: a row needs at least 1 column, since the mean of none is undefined"
    if not math.isfinite(spec.eps) or spec.eps <= 0:
        return f"eps is {spec.eps!r}: it must be finite and above 0"
    if spec.x_dtype != torch.float64 and not FP32_SMALLEST_NORMAL <= spec.eps <= FP32_LARGEST:
        # Below, it is 0 by the time it is added, and a row of zeros becomes 0 / 0.
        limits = f"[{FP32_SMALLEST_NORMAL:.3g}, {FP32_LARGEST:.3g}]"
        return f"eps is {spec.eps!r}: beside {spec.x_dtype} it is added in float32, where it must lie in {limits}"
    return None


def triton_refusal(device_type: str) -> str | None:
    """Say why a Triton kernel cannot run on this device, or return None where it can."""
    if device_type == "cuda" or (device_type == "cpu" and INTERPRETED):
        return None
    if device_type == "cpu":
        return (
            "x is on cpu: a Triton kernel needs a CUDA tensor, or Triton's interpreter, "
            "which TRITON_INTERPRET=1 in the environment turns on before rmsnorm_cli.kernels is imported"
        )
    return f"x is on {device_type}: a Triton kernel needs a CUDA tensor, or a CPU tensor in Triton's interpreter"


def rowwise_refusal(spec: CallSpec) -> str | None:
    """Say why `rowwise` refuses such a call, or return None where it takes it."""
    reason = operand_refusal(spec)
    if reason is not None:
        return reason
    if len(spec.shape) != 2:
        return f"x has shape {spec.shape}: rowwise takes 2 dimensions; reshape x to (rows, columns) first"
    M, N = spec.shape
    if spec.x_dtype not in (torch.float32, torch.float16):
        return f"x has dtype {spec.x_dtype}: rowwise takes torch.float32 and torch.float16"
    if spec.gamma_dtype is None:
        return "gamma is None: rowwise needs a gamma of length N; torch.ones(N) changes nothing"
    if spec.gamma_dtype != spec.x_dtype:
        return f"gamma has dtype {spec.gamma_dtype}: rowwise takes gamma in the dtype of x, {spec.x_dtype}"
    if not spec.contiguous:
        return "x is not contiguous: rowwise reads rows that lie one behind the other; call x.contiguous() first"
    if N > ROWWISE_MAX_COLUMNS:
        return f"x has {N} columns: rowwise takes at most {ROWWISE_MAX_COLUMNS}"
    partial_bytes = M * N * 4
    if partial_bytes > ROWWISE_MAX_PARTIAL_BYTES:
        return (
            f"x has shape {spec.shape}, whose partial sums of dgamma take {partial_bytes:,} bytes: "
            f"rowwise takes at most {ROWWISE_MAX_PARTIAL_BYTES:,}"
        )
    return triton_refusal(spec.device_type)


def fused_refusal(spec: CallSpec) -> str | None:
    """Say why `fused` refuses such a call, or return None where it takes it."""
    reason = operand_refusal(spec)
    if reason is not None:
        return reason
    half = spec.x_dtype in (torch.float16, torch.bfloat16)
    if spec.gamma_dtype not in (None, spec.x_dtype, torch.float32 if half else None):
        beside = f"{spec.x_dtype} or torch.float32" if half else f"{spec.x_dtype}"
        return f"gamma has dtype {spec.gamma_dtype} beside x in {spec.x_dtype}: fused takes gamma in {beside}"
    if spec.shape[-1] > FUSED_MAX_COLUMNS:
        return f"x has {spec.shape[-1]} columns: fused, which counts in 32 bits, takes at most {FUSED_MAX_COLUMNS:,}"
    return triton_refusal(spec.device_type)


def check_call(
    x: Tensor, gamma: Tensor | None, eps: object, refusal: Callable[[CallSpec], str | None] = operand_refusal
) -> float:
    """Return eps as a float if `refusal` has nothing against this call, and gamma fits x; raise ContractError else."""
    _check_tensor("x", x)
    if gamma is not None:
        _check_tensor("gamma", gamma)
        if x.dim() and tuple(gamma.shape) != (x.shape[-1],):
            raise ContractError(
                f"gamma has shape {tuple(gamma.shape)}: it must be ({x.shape[-1]},), the last size of x"
            )
        if gamma.device != x.device:
            raise ContractError(f"gamma is on {gamma.device}: it must be where x is, on {x.device}")
    value = eps_value(eps)
    reason = refusal(CallSpec.of(x, gamma, value))
    if reason is not None:
        raise ContractError(reason)
    return value


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise ContractError(f"{name} is a {type(tensor).__name__}: it must be a torch.Tensor")
    if tensor.is_nested and tensor.layout == torch.strided:  # it has no shape to speak of
        raise ContractError(
            f"{name} is a nested tensor, of rows that differ in length: hand over its parts one by one, "
            "or torch.nested.to_padded_tensor of it"
        )
    if tensor.layout != torch.strided:
        raise ContractError(f"{name} has layout {tensor.layout}: it must be a dense tensor, torch.strided")


def check_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor without memory of its own: its address is 0, where a kernel would read.

    One that stands for others, as a sharded one does, one whose memory was freed, and one of torch.jit's tracer, which
    records operations of PyTorch and knows of no kernel.
    """
    if torch._C._get_tracing_state() is not None:
        raise ContractError(
            "torch.jit.trace records PyTorch's own operations and no Triton kernel: use torch.export or torch.compile, "
            "or impl='reference'"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise ContractError(
            f"{name} is a {type(tensor).__name__}, whose numbers lie in other tensors: hand over a plain one; of a "
            f"DTensor that is {name}.full_tensor(), or {name}.to_local() where the part here holds whole rows"
        )
    if tensor.numel() and not _address(tensor):
        raise ContractError(
            f"{name} is a {type(tensor).__name__} without memory: it was freed, as FSDP does with weights between "
            "its forwards, or its numbers lie elsewhere; hand over a plain tensor that holds them"
        )


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a fake tensor
        return 0


def check_rowwise(x: Tensor, gamma: Tensor | None, eps: object) -> float:
    """Return eps as a float if `rowwise` takes this call; raise ContractError before anything is allocated."""
    value = check_call(x, gamma, eps, rowwise_refusal)
    assert gamma is not None  # rowwise_refusal saw to it
    if not gamma.is_contiguous():
        raise ContractError(
            f"gamma has stride {gamma.stride(0)}: rowwise reads it with stride 1; call gamma.contiguous() first"
        )
    for name, tensor in (("x", x), ("gamma", gamma)):
        check_memory(name, tensor)
        if tensor.is_neg():  # the sign is a flag on the view, and the kernel sees only its memory
            raise ContractError(f"{name} is a negative view of a complex tensor: call {name}.resolve_neg() first")
    return value


def check_fused(x: Tensor, gamma: Tensor | None, eps: object) -> float:
    """Return eps as a float if `fused` takes this call; raise ContractError before anything is allocated."""
    value = check_call(x, gamma, eps, fused_refusal)
    check_memory("x", x)
    if gamma is not None:
        check_memory("gamma", gamma)
    return value


def check_gradient(dy: Tensor, x: Tensor) -> None:
    """Refuse a dy that does not match x in shape, dtype or device, or that is not contiguous."""
    for what, got, expected in (
        ("shape", tuple(dy.shape), tuple(x.shape)),
        ("dtype", dy.dtype, x.dtype),
        ("device", dy.device, x.device),
    ):
        if got != expected:
            raise ContractError(f"dy has {what} {got}: it must have the {what} of x, {expected}")
    check_memory("dy", dy)
    if dy.is_neg():
        raise ContractError("dy is a negative view of a complex tensor: call dy.resolve_neg() first")
    if not dy.is_contiguous():
        raise ContractError(f"dy has strides {dy.stride()}: the kernel reads it contiguous; call dy.contiguous() first")
