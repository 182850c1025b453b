"""The right answer in float64, from inputs that are already rounded to the tested dtype.

For implementations that round inside (`--rounding`), the oracle follows where *they* say they round:
`fp32`: once, at the store. `llama`: x·rstd to x's dtype, then times gamma.
`gemma`: times (1 + gamma), once, at the store.
"""

from dataclasses import dataclass

from torch import Tensor

from rmsnorm_cli.inputs.layouts import Inputs


@dataclass(frozen=True)
class Oracle:
    """y and dx (..., N), dgamma (N,) or None, rstd (..., 1): float64, on the inputs' device."""

    y: Tensor
    dx: Tensor
    dgamma: Tensor | None
    rstd: Tensor


def answer(inputs: Inputs, eps: float, rounding: str = "fp32") -> Oracle:
    """Return the float64 answer for x, gamma, dy of any dtype; `rounding` is fp32, llama or gemma."""
    from rmsnorm_cli.kernels import reference  # not at import: TRITON_INTERPRET must be set before kernels load

    x, dy = inputs.x.detach().double(), inputs.dy.detach().double()
    gamma = None if inputs.gamma is None else inputs.gamma.detach().double()
    if rounding == "gemma" and gamma is not None:
        gamma = 1 + gamma
    rstd = reference.statistics(x, eps)
    y = reference.forward(x, gamma, eps)
    dx, dgamma = reference.backward(dy, x, gamma, eps)
    if rounding == "llama" and gamma is not None:
        xhat = (x * rstd).to(inputs.x.dtype).double()
        y = xhat * gamma
        dgamma = (dy * xhat).reshape(-1, x.shape[-1]).sum(0)
    return Oracle(y, dx, dgamma, rstd)
