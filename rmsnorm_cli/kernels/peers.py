"""Other people's RMSNorm, each as f(x, gamma, eps) -> y; a package is imported when its name is asked for."""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rmsnorm_cli.kernels import reference

Norm = Callable[[Tensor, Tensor | None, float], Tensor]
Rounding = Literal["fp32", "llama", "gemma"]


class MissingPackage(ImportError):
    """A package that an implementation needs is not installed; the message has the line that installs it."""


def native(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """PyTorch's own `torch.nn.functional.rms_norm` over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), gamma, eps)


class Compiled:
    """`torch.compile` of the reference, in one full graph, compiled afresh for every shape, layout and dtype.

    Dynamo is reset, for the whole process, when one of them changes: it counts recompiles, and at its limit it would
    run the function eagerly under the name of the compiled one. With fullgraph=True it raises there instead.
    """

    def __init__(self) -> None:
        self._compiled: Norm = torch.compile(reference.forward, fullgraph=True, dynamic=False)
        self._key: tuple[object, ...] | None = None

    def __call__(self, x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
        """Run the compiled reference; raise RuntimeError rather than fall back to eager."""
        layouts = [(t.shape, t.stride(), t.dtype, t.device) for t in (x, gamma) if t is not None]
        key = (*layouts, eps)
        if key != self._key:
            torch._dynamo.reset()
            self._key = key
        try:
            return self._compiled(x, gamma, eps)
        except torch._dynamo.exc.FailOnRecompileLimitHit as problem:
            raise RuntimeError(
                f"compile: the recompile limit ({torch._dynamo.config.recompile_limit}) was reached for x of shape "
                f"{tuple(x.shape)}; PyTorch would run it eagerly from here on, which is not what was asked for"
            ) from problem


@dataclass(frozen=True)
class Package:
    """Where another project's function is, the version these adapters were written against, and how to call it."""

    distribution: str
    version: str
    module: str
    function: str
    call: Callable[[Any, Tensor, Tensor | None, float], Tensor]
    triton: bool = True
    rounding: Rounding = "fp32"


PACKAGES = {
    # Liger's defaults, which are what its users get: x_hat rounded to x's dtype before it meets gamma
    # (casting_mode="llama"), and dx written over dy (in_place=True).
    "liger": Package(
        "liger-kernel",
        "0.8.5",
        "liger_kernel.transformers.functional",
        "liger_rms_norm",
        lambda function, x, gamma, eps: function(x, gamma, eps),
        rounding="llama",
    ),
    "quack": Package(
        "quack-kernels",
        "0.6.5",
        "quack",
        "rmsnorm",
        lambda function, x, gamma, eps: function(x, gamma, eps=eps),
        triton=False,  # CuTe, which has no interpreter
    ),
    "fla": Package(
        "fla-core",
        "0.6.0",
        "fla.modules.layernorm",
        "rms_norm",
        lambda function, x, gamma, eps: function(x, gamma, None, eps=eps),
    ),
}


def refuse_missing(names: Iterable[str]) -> None:
    """Raise MissingPackage, with the install line, for the first of these names whose package is not installed."""
    for name in names:
        if name in PACKAGES:
            _installed(name, PACKAGES[name])


def package_norm(name: str) -> Norm:
    """Return the RMSNorm of liger, quack or fla.

    Raises MissingPackage, with the install line, where the package or something it imports is not installed.
    """
    package = PACKAGES[name]
    function = getattr(_imported(name, package), package.function)
    return lambda x, gamma, eps: package.call(function, x, gamma, eps)


def _imported(name: str, package: Package) -> ModuleType:
    install = _installed(name, package)
    try:
        return importlib.import_module(package.module)
    except ImportError as problem:
        raise MissingPackage(f"{name} cannot be imported ({problem}): {install}") from problem


def _installed(name: str, package: Package) -> str:
    """Return the install line of a package that is there."""
    install = f"pip install {package.distribution}=={package.version}"
    try:
        importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackage(f"{name} needs {package.distribution}, which is not installed: {install}") from None
    return install
