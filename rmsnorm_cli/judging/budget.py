"""What rounding alone can do to a right result: componentwise bounds against float64, and their constants.

One rounding at the store costs `unit` = the output dtype's unit roundoff. Inside, values and sums are float32: sums of
products err by a small multiple (`kappa`) of u32 times the sum of the absolute products, whatever the order, as long as
the order is a tree or many lanes. The constants were read off right kernels (interpreter and one NVIDIA H200,
2026-11-29): y up to 3.6 ULP, dx kappa up to 5.8, dgamma kappa up to 1.2 (2 with plain eager sums).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.numerics import unit_roundoff
from rmsnorm_cli.judging.oracle import Oracle

U32 = 2.0**-24
KAPPA_Y = 16.0
KAPPA_DX = 16.0
KAPPA_DGAMMA = 32.0


@dataclass(frozen=True)
class Budget:
    """Largest errors that rounding explains: y and dx (..., N), dgamma (N,) or None, in float64."""

    y: Tensor
    dx: Tensor
    dgamma: Tensor | None


def budget(inputs: Inputs, want: Oracle, rounding: str = "fp32") -> Budget:
    """Return the bounds for inputs of any dtype; the llama convention rounds x̂ and gamma·dy as well."""
    dtype = inputs.x.dtype
    inner = 2.0**-53 if dtype == torch.float64 else U32
    once = unit_roundoff(dtype)
    inside = once if rounding == "llama" else 0.0
    floor = smallest(dtype) / 2
    x, dy = inputs.x.double(), inputs.dy.double()
    gamma = torch.ones_like(x[..., :1]) if inputs.gamma is None else inputs.gamma.double()
    if rounding == "gemma" and inputs.gamma is not None:
        gamma = 1 + gamma
    xhat, u = (x * want.rstd).abs(), (gamma * dy).abs()
    second = xhat * (u * xhat).mean(-1, keepdim=True)
    y = (once + inside + KAPPA_Y * inner) * want.y.abs() + floor
    dx = once * want.dx.abs() + (inside + KAPPA_DX * inner) * want.rstd * (u + second) + floor
    if want.dgamma is None or inputs.gamma is None:
        return Budget(y, dx, None)
    own = inputs.gamma.dtype
    products = (dy.abs() * xhat).reshape(-1, x.shape[-1]).sum(0)
    dgamma = unit_roundoff(own) * want.dgamma.abs() + (inside + KAPPA_DGAMMA * inner) * products + smallest(own) / 2
    return Budget(y, dx, dgamma)


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest number above zero of a dtype, a subnormal."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps
