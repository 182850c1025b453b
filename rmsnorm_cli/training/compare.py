"""One point of training seen through several norms: equal weights and batch, and how output and gradients differ.

Starting every comparison from the reference's own weights takes the growth of differences out of it, so a difference
belongs to one forward and one backward. Three measures, since each is blind to something: the cosine to a scale, the
norm ratio to a direction, the relative error to neither.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rmsnorm_cli.kernels import Implementation
from rmsnorm_cli.network import Network, Partition, generator
from rmsnorm_cli.training.loop import PARAMETERS, Ground
from rmsnorm_cli.training.twin import Twin

QUANTITIES = ("output", *PARAMETERS)
# Declared limits, float32. Right norms (float64 arithmetic, another order of summation, PyTorch's own, `rowwise`; 6
# seeds, 5 points of training) reached 0.14 of the first, 1e-7 of the second, 0.003 of the third, 0.8 of the fourth;
# the mildest of the planted mistakes (eps × 10) 65 times the first, the others 9,000 times and more. 2026-11-29, CPU.
FACTOR = 10.0  # of the noise: the largest twin's relative error, or the reference's own distance from float64
FLOOR = 2.0**-22  # relative; below this no two orders of summation agree
COSINE = 1e-6  # of 1 - cosine
RATIO = 1e-4  # of the norm ratio's distance from 1
DISTANCE = 2.0  # times the reference's own distance from float64, plus FLOOR


@dataclass(frozen=True)
class Difference:
    """How the implementation's output or one gradient lies beside the reference's.

    `twin` is the largest relative error of the twins, `exact` and `reference_exact` are the relative distances of the
    implementation and of the reference from a float64 network.
    """

    quantity: str
    relative: float
    ratio: float
    cosine: float
    twin: float
    exact: float
    reference_exact: float

    @property
    def measures(self) -> dict[str, float]:
        """Return each measure as a fraction of its limit; NaN stays NaN."""
        noise = max(self.twin, self.reference_exact)  # no measure can be asked for less than rounding gives
        return {
            "relative error": self.relative / (FACTOR * noise + FLOOR),
            "cosine": (1.0 - self.cosine) / max(COSINE, (FACTOR * noise) ** 2),
            "norm ratio": abs(self.ratio - 1.0) / max(RATIO, FACTOR * noise),
            "distance from float64": self.exact / (DISTANCE * noise + FLOOR),
        }

    def record(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def differences(ground: Ground, values: Mapping[str, Tensor], rows: Tensor) -> list[Difference]:
    """Compare output and gradients of the implementation with the reference's at these weights, on these rows."""
    examples = ground.data["train"].rows(rows.to(ground.device))
    seed = ground.settings.run.seed

    def seen(norm: Implementation, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        network = Network(values, norm, ground.eps, device=ground.device, dtype=dtype)
        return gradients(network, examples.to(ground.device, dtype))

    def twin(number: int) -> Implementation:
        call = Twin(ground.reference.call, generator(seed, f"compare/{number}"))
        call.rows, call.share = len(rows), slice(None)
        return Implementation(f"twin-{number}", call)

    reference, implementation = seen(ground.reference), seen(ground.implementation)
    exact = seen(ground.reference, torch.float64)
    twins = [seen(twin(number)) for number in range(1, ground.settings.train.twins + 1)]
    found = []
    for name in QUANTITIES:
        ours, base = implementation[name], reference[name]
        found.append(
            Difference(
                name,
                relative=relative(ours, base),
                ratio=float(ours.norm() / base.norm()),
                cosine=float((ours * base).sum() / (ours.norm() * base.norm())),
                twin=max(relative(other[name], base) for other in twins),
                exact=relative(ours, exact[name]),
                reference_exact=relative(base, exact[name]),
            )
        )
    return found


def gradients(network: Network, examples: Partition) -> dict[str, Tensor]:
    """Return the network's output and every parameter's gradient of the mean squared error, as float64."""
    output = network(examples.inputs)
    (output - examples.targets).square().mean().backward()
    found = {"output": output.detach().double()}
    for name, parameter in network.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = gradient.double()
    return found


def relative(got: Tensor, base: Tensor) -> float:
    """Return ‖got − base‖ / ‖base‖, both float64."""
    return float((got - base).norm() / base.norm())
