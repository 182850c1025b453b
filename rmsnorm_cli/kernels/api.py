"""The library: `rms_norm`, `RMSNorm`, and the look-up of an implementation by its name."""

import difflib
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from rmsnorm_cli.kernels import fused, ops, reference, rowwise
from rmsnorm_cli.kernels.autograd import KernelPair, count, differentiable
from rmsnorm_cli.kernels.contract import (
    CallSpec,
    ContractError,
    check_call,
    eps_value,
    fused_refusal,
    operand_refusal,
    rowwise_refusal,
)
from rmsnorm_cli.kernels.lookup import UnknownImplementation, load_callable
from rmsnorm_cli.kernels.peers import PACKAGES, Compiled, Norm, Rounding, native, package_norm

ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
DEFAULT = "fused"
DEFAULT_EPS = 1e-6
BUILT_IN: tuple[str, ...] = ("reference", "rowwise", "fused", "torch", "compile", *PACKAGES)


@dataclass(frozen=True)
class Implementation:
    """A named RMSNorm and what is known of it before it runs.

    `call` is f(x, gamma, eps) -> y and works with autograd. `triton` ones need CUDA or the interpreter. `accepts` says
    why a call lies outside the contract, or None where it lies inside; without `accepts` the only way is to try.
    `rounding` is where the implementation rounds, for the oracle: `fp32` once, at the end; `llama` x · rstd to x's
    dtype, then times gamma; `gemma` times 1 + gamma, in fp32. `ours` are held to bitwise determinism,
    `deterministic` ones promise it. `isolated` ones run in a process of their own: their numbers can be judged, their
    memory and their graph cannot. `costly` ones compile anew for each shape, layout, dtype and eps.
    """

    name: str
    call: Norm
    triton: bool = False
    accepts: Callable[[CallSpec], str | None] | None = None
    rounding: Rounding = "fp32"
    ours: bool = False
    deterministic: bool = False
    isolated: bool = False
    costly: bool = False


def implementation(name: str, rounding: Rounding = "fp32") -> Implementation:
    """Find an implementation: one of BUILT_IN, `package.module:callable` or `path/file.py:callable`.

    Raises UnknownImplementation for a name or callable that is not there, and MissingPackage, with the install line,
    for another project's that is not installed. `rounding` is where a foreign callable rounds; that of the others is
    known. A foreign callable is imported into this process and called in it; `foreign.ForeignWorker` gives it its own.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding is {rounding!r}: it must be one of {', '.join(ROUNDINGS)}")
    if name == "reference":
        return Implementation(name, _reference, accepts=operand_refusal, ours=True, deterministic=True)
    if name == "rowwise":
        return from_pair(ROWWISE, rowwise_refusal)
    if name == "fused":
        return from_pair(FUSED, fused_refusal)
    if name == "torch":
        return Implementation(name, native)
    if name == "compile":
        return Implementation(name, Compiled(), costly=True)
    if name in PACKAGES:
        package = PACKAGES[name]
        return Implementation(name, package_norm(name), triton=package.triton, rounding=package.rounding)
    if ":" in name:
        return Implementation(name, load_callable(name), rounding=rounding)
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    known = ", ".join((*BUILT_IN, "package.module:callable", "path/file.py:callable"))
    raise UnknownImplementation(f"there is no implementation {name!r}{hint}: known are {known}")


ROWWISE = KernelPair("rowwise", rowwise.forward, rowwise.backward)
FUSED = KernelPair(
    "fused", fused.forward, fused.backward,
    contiguous_dy=False, second_derivative=True, optional_rstd=True, op=ops.rms_norm,
)  # fmt: skip


def from_pair(pair: KernelPair, accepts: Callable[[CallSpec], str | None]) -> Implementation:
    """Return the Implementation of a pair of our own Triton kernels (or of a changed copy of one)."""
    return Implementation(pair.name, differentiable(pair), triton=True, accepts=accepts, ours=True, deterministic=True)


def _reference(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    y = reference.forward(x, gamma, check_call(x, gamma, eps))
    if torch.compiler.is_compiling():  # a graph of plain operations: nothing here would be called when it runs
        return y
    count("reference", "forward")
    if y.requires_grad:
        y.register_hook(lambda _: count("reference", "backward"))  # type: ignore[no-untyped-call]
    return y


_looked_up: dict[str, Implementation] = {}


def _resolved(impl: str | Implementation) -> Implementation:
    if isinstance(impl, Implementation):
        return impl
    if not isinstance(impl, str):
        raise UnknownImplementation(
            f"impl is a {type(impl).__name__}: it must be the name of an implementation, such as 'fused', "
            "or an Implementation, which holds a callable"
        )
    if impl not in _looked_up:
        _looked_up[impl] = implementation(impl)
    return _looked_up[impl]


def rms_norm(
    x: Tensor, gamma: Tensor | None = None, eps: float = DEFAULT_EPS, impl: str | Implementation = DEFAULT
) -> Tensor:
    """Normalise the last dimension of x by its root mean square and scale it by gamma.

    x is (..., N), gamma (N,) or None; what else is taken depends on the implementation, see `contract.py`. Returns y
    with x's shape and dtype; differentiable in x and gamma. Raises ContractError for an input outside the contract,
    UnknownImplementation and MissingPackage for `impl`.
    """
    return _resolved(impl).call(x, gamma, eps)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` that runs one of our implementations: the same arguments, attributes and `state_dict`.

    The one difference: eps=None means 1e-6, whatever the dtype. Several normalised dimensions are flattened to one,
    which is a view of x, or a copy (counted as `copies`) for implementations that read any layout.
    Raises ContractError where x does not end in `normalized_shape`, and what `rms_norm` raises.
    Source: torch.nn.RMSNorm, https://docs.pytorch.org/docs/stable/generated/torch.nn.RMSNorm.html
    """

    eps: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str | Implementation = DEFAULT,
    ) -> None:
        _resolved(impl)  # an unknown name is refused here, not at the first forward
        eps = DEFAULT_EPS if eps is None else eps_value(eps)
        one = isinstance(normalized_shape, numbers.Integral)  # NumPy's too
        shape = [int(normalized_shape)] if one else list(normalized_shape)  # type: ignore[arg-type]
        if not shape:
            raise ContractError("normalized_shape is (): it must name at least one dimension, such as RMSNorm(4096)")
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self.impl = impl

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x, of x's shape and dtype."""
        normalised = len(self.normalized_shape)
        if tuple(x.shape[-normalised:]) != tuple(self.normalized_shape):
            raise ContractError(f"x has shape {tuple(x.shape)}: it must end in {tuple(self.normalized_shape)}")
        if normalised == 1:
            return rms_norm(x, self.weight, self.eps, self.impl)
        gamma = None if self.weight is None else self.weight.flatten()
        return rms_norm(self._rows(x, gamma), gamma, self.eps, self.impl).reshape(x.shape)

    def _rows(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        """Flatten the normalised dimensions into one; refuse where that is a copy and the contract allows none."""
        shape = (*x.shape[: -len(self.normalized_shape)], math.prod(self.normalized_shape))
        try:
            return x.view(shape)
        except RuntimeError:  # its strides do not allow a view
            impl = _resolved(self.impl)
        spec = CallSpec(shape, x.dtype, None if gamma is None else gamma.dtype, False, self.eps, x.device.type)
        reason = None if impl.accepts is None else impl.accepts(spec)
        if reason is not None:
            raise ContractError(reason)
        count(impl.name, "copies")
        return x.reshape(shape)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows between the brackets."""
        name = self.impl if isinstance(self.impl, str) else self.impl.name
        return f"{super().extra_repr()}, impl={name!r}"
