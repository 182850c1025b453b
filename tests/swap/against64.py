"""How a swap is judged: by the network in float64, and by what the network as it was loses against that.

A fused norm rounds once where model code may round twice, so bits must differ and neither is the right answer. What
must hold: every gradient and the logits lie about as near to the float64 run of the same weights as they did before.
A tensor may be off twice as far, since two roundings of one network draw their errors anew; the shared tendency of all
gradients to be too large or too small, which rounding does not have, may be a quarter of the typical error.
"""

from collections.abc import Callable
from statistics import fmean, median

from torch import Tensor, nn

TENSOR_FACTOR = 2.0
TENDENCY_FACTOR = 0.25
FLOOR = 8 * 2.0**-24
"""What fp32's own arithmetic may always lose, relative to the norm of a tensor."""

Results = dict[str, Tensor]
Forward = Callable[[Tensor], Tensor]


def results_of(network: nn.Module, logits: Tensor, scale: float = 1.0) -> Results:
    """Return logits and gradients by name, in float64 on the CPU, after a backward of `scale` times the loss."""
    found = {"logits": logits.detach().double().cpu()}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.double().cpu() / scale
    return found


def error(got: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference as a share of the norm of what is right."""
    return float((got - exact).norm() / exact.norm())


def tendency(got: Results, exact: Results) -> float:
    """Return by which share gradients are too long in the direction of the right ones, the mean over all tensors."""
    return fmean(
        float((gradient * exact[name]).sum() / exact[name].square().sum()) - 1
        for name, gradient in got.items()
        if name != "logits"
    )


def complaints(swapped: Results, before: Results, exact: Results) -> list[str]:
    """Say where the swapped network is further from float64 than the network before it explains; empty is good."""
    assert swapped.keys() == before.keys() == exact.keys()
    errors = {name: (error(swapped[name], exact[name]), error(before[name], exact[name])) for name in exact}
    found = [
        f"{name}: {mine:.2e} from float64, {theirs:.2e} before the swap"
        for name, (mine, theirs) in errors.items()
        if not mine <= TENSOR_FACTOR * theirs + FLOOR
    ]
    allowed = TENDENCY_FACTOR * median(theirs for _, theirs in errors.values()) + FLOOR
    leaning = tendency(swapped, exact)
    if not abs(leaning) <= allowed:
        found.append(f"gradients lean by {leaning:+.2e}, {allowed:.2e} is rounding")
    return found
