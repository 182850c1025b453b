"""RMSNorm for PyTorch: a readable reference, Triton kernels and their wiring, on top of torch and triton alone."""

from rmsnorm_cli.kernels.api import (
    BUILT_IN,
    DEFAULT,
    DEFAULT_EPS,
    Implementation,
    RMSNorm,
    from_pair,
    implementation,
    rms_norm,
)
from rmsnorm_cli.kernels.autograd import KernelPair, counters, differentiable, reset_counters
from rmsnorm_cli.kernels.contract import CallSpec, ContractError
from rmsnorm_cli.kernels.lookup import UnknownImplementation
from rmsnorm_cli.kernels.peers import MissingPackage

__all__ = [
    "BUILT_IN",
    "DEFAULT",
    "DEFAULT_EPS",
    "CallSpec",
    "ContractError",
    "Implementation",
    "KernelPair",
    "MissingPackage",
    "RMSNorm",
    "UnknownImplementation",
    "counters",
    "differentiable",
    "from_pair",
    "implementation",
    "reset_counters",
    "rms_norm",
]
