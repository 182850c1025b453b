"""Derivatives in float64 by other ways than the one that is judged: complex steps, autograd, a second time.

A probe is one shape's inputs on which no term of the formula is small.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KILLING = (1e-2, 1e-4)  # rms and eps with mean square = eps: no term of the formula is small beside another


@dataclass(frozen=True)
class Probe:
    """Float64 inputs of one shape: rows of one rms, gamma random in both signs, so that no term can hide."""

    x: Tensor  # (M, N)
    gamma: Tensor  # (N,)
    dy: Tensor  # (M, N)
    rms: float
    eps: float

    @property
    def name(self) -> str:
        """Return MxN, rms and eps."""
        return f"{self.x.shape[0]}x{self.x.shape[1]} rms {self.rms:g} eps {self.eps:g}"


def probe(rows: int, cols: int, rms: float, eps: float, seed: int, device: str = "cpu") -> Probe:
    """Draw the float64 inputs of one shape on the CPU and move them to `device`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rows * 10_007 + cols)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x = draw(rows, cols)
    x = rms * x / x.square().mean(-1, keepdim=True).sqrt()
    gamma = (0.5 + draw(cols).abs()) * torch.where(draw(cols) < 0, -1.0, 1.0)
    return Probe(x.to(device), gamma.to(device), draw(rows, cols).to(device), rms, eps)


def relative(got: Tensor, want: Tensor, term: float = 0.0) -> float:
    """Return max |got - want| over max |want|, or over `term` where that is larger; NaN stays NaN, shapes must agree.

    `term` is the size of the terms whose difference `want` is: for one column they cancel almost wholly, and what is
    left over carries their rounding, not its own.
    """
    if got.shape != want.shape:
        raise ValueError(f"shape {tuple(got.shape)} where {tuple(want.shape)} is due")
    return float((got - want).abs().max() / max(float(want.abs().max()), term))


def complex_step(p: Probe) -> tuple[Tensor, Tensor]:
    """Differentiate `<dy, y>` by complex steps, a formula of its own with no subtraction: (dx, dgamma)."""
    step = 1e-200  # its square vanishes, so the imaginary part is the derivative to the last bit

    def loss(x: Tensor, gamma: Tensor) -> Tensor:
        mean_square = (x * x).mean(-1, keepdim=True)
        return (p.dy * gamma * x / (mean_square + p.eps).sqrt()).sum()

    dx, dgamma = torch.empty_like(p.x), torch.empty_like(p.gamma)
    x, gamma = p.x.to(torch.complex128), p.gamma.to(torch.complex128)
    for index in range(p.x.numel()):
        moved = x.clone().view(-1)
        moved[index] += 1j * step
        dx.view(-1)[index] = loss(moved.view_as(x), gamma).imag / step
    for index in range(p.gamma.numel()):
        moved = gamma.clone()
        moved[index] += 1j * step
        dgamma[index] = loss(x, moved).imag / step
    return dx, dgamma


def second_derivative(backward: Callable[..., Any], p: Probe, seed: int) -> tuple[Tensor, ...]:
    """Differentiate a backward formula once more along fixed random directions: gradients for dy, x and gamma."""
    generator = torch.Generator().manual_seed(seed)
    dy, x, gamma = (t.detach().clone().requires_grad_() for t in (p.dy, p.x, p.gamma))
    dx, dgamma = backward(dy, x, gamma, p.eps)
    along_x = torch.randn(dx.shape, dtype=torch.float64, generator=generator).to(dx.device)
    along_gamma = torch.randn(dgamma.shape, dtype=torch.float64, generator=generator).to(dx.device)
    scalar = (dx * along_x).sum() + (dgamma * along_gamma).sum()
    return torch.autograd.grad(scalar, (dy, x, gamma))


def by_autograd(call: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a backward made by autograd through a forward, differentiable again."""

    def backward(dy: Any, x: Any, gamma: Any, eps: float) -> tuple[Tensor, Tensor]:
        x = x if x.requires_grad else x.detach().requires_grad_()
        gamma = gamma if gamma.requires_grad else gamma.detach().requires_grad_()
        dx, dgamma = torch.autograd.grad(call(x, gamma, eps), (x, gamma), dy, create_graph=True)
        return dx, dgamma

    return backward
