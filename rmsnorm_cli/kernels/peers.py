"""Other people's RMSNorm, each as f(x, gamma, eps) -> y; a package is imported when its name is asked for."""

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rmsnorm_cli.kernels import reference

Norm = Callable[[Tensor, Tensor | None, float], Tensor]


class MissingPackage(ImportError):
    """A package that an implementation needs is not installed; the message has the line that installs it."""


def native(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """PyTorch's own `torch.nn.functional.rms_norm` over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), gamma, eps)


class Compiled:
    """`torch.compile` of the reference, in one full graph, compiled afresh for every shape and dtype.

    Dynamo is reset, for the whole process, when shape, dtype, device or eps change: otherwise it counts recompiles and
    at its limit runs the function eagerly, under the name of the compiled one. With fullgraph=True that limit raises.
    """

    def __init__(self) -> None:
        self._compiled: Norm = torch.compile(reference.forward, fullgraph=True, dynamic=False)
        self._key: tuple[object, ...] | None = None

    def __call__(self, x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
        """Run the compiled reference; torch._dynamo.exc.FailOnRecompileLimitHit instead of a fall-back to eager."""
        key = (x.shape, x.dtype, x.device, None if gamma is None else gamma.dtype, eps)
        if key != self._key:
            torch._dynamo.reset()
            self._key = key
        return self._compiled(x, gamma, eps)


@dataclass(frozen=True)
class Package:
    """Where another project's function is, the version these adapters were written against, and how to call it."""

    distribution: str
    version: str
    module: str
    function: str
    triton: bool
    call: Callable[[Any, Tensor, Tensor | None, float], Tensor]


PACKAGES = {
    # Liger's defaults, which are what its users get: x_hat rounded to x's dtype before gamma (pass --rounding llama
    # for its 16-bit results), and dx written over dy (`in_place=True`).
    "liger": Package(
        "liger-kernel",
        "0.8.5",
        "liger_kernel.transformers.functional",
        "liger_rms_norm",
        True,
        lambda function, x, gamma, eps: function(x, gamma, eps),
    ),
    "quack": Package(
        "quack-kernels",
        "0.6.5",
        "quack",
        "rmsnorm",
        False,
        lambda function, x, gamma, eps: function(x, gamma, eps=eps),
    ),
    "fla": Package(
        "fla-core",
        "0.6.0",
        "fla.modules.layernorm",
        "rms_norm",
        True,
        lambda function, x, gamma, eps: function(x, gamma, None, eps=eps),
    ),
}


def package_norm(name: str) -> Norm:
    """Return the RMSNorm of liger, quack or fla.

    Raises MissingPackage, with the install line, where the package or something it imports is not installed.
    """
    package = PACKAGES[name]
    function = getattr(_imported(name, package), package.function)
    return lambda x, gamma, eps: package.call(function, x, gamma, eps)


def _imported(name: str, package: Package) -> ModuleType:
    install = f"pip install {package.distribution}=={package.version}"
    try:
        importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackage(f"{name} needs {package.distribution}, which is not installed: {install}") from None
    try:
        return importlib.import_module(package.module)
    except ImportError as problem:
        raise MissingPackage(f"{name} cannot be imported ({problem}): {install}") from problem
