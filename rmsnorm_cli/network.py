"""The small network that `train` teaches, Linear → RMSNorm → SiLU → Linear, and the synthetic examples it learns from.

Everything is drawn on the CPU in float64 and rounded to float32, so that a seed means the same numbers on every
device. Networks that differ in nothing but the norm's implementation share one `state_dict`.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rmsnorm_cli.kernels import Implementation, RMSNorm

if TYPE_CHECKING:
    from rmsnorm_cli.config.models import Data

PARTITIONS = ("train", "validation", "test")
HIDDEN = 64  # width of the teacher
TEACHER_SEED = 20  # the teacher is fixed: another run's seed means other examples of the same function
GAMMA_SPREAD = 0.2  # gamma = 1 everywhere hides mistakes that leave gamma out, or put it in twice


@dataclass(frozen=True)
class Partition:
    """Examples to learn from, watch with or judge by: `inputs` (rows, features) and `targets` (rows, outputs), fp32."""

    inputs: Tensor
    targets: Tensor

    @property
    def sha256(self) -> str:
        """Hash dtype, shape and little-endian bytes of inputs and targets."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.targets):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().numpy().astype("<f4").tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> "Partition":
        """Return the same examples on a device, in a dtype."""
        return Partition(self.inputs.to(device, dtype), self.targets.to(device, dtype))

    def rows(self, chosen: Tensor) -> "Partition":
        """Return the examples with these numbers, in their order."""
        return Partition(self.inputs[chosen], self.targets[chosen])


def generator(seed: int | str, stream: str) -> torch.Generator:
    """Return a CPU generator for one named stream of numbers; streams of one seed are independent of each other."""
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def normal(draws: torch.Generator, *shape: int) -> Tensor:
    """Draw unit normals in float64."""
    return torch.randn(*shape, generator=draws, dtype=torch.float64)


def uniform(draws: torch.Generator, *shape: int) -> Tensor:
    """Draw from -1 to 1 in float64."""
    return 2.0 * torch.rand(*shape, generator=draws, dtype=torch.float64) - 1.0


def partitions(seed: int, data: "Data") -> dict[str, Partition]:
    """Make train, validation and test of a seed: targets = teacher(inputs) + noise; rows differ 100-fold in scale.

    The teacher sees the direction of a row alone, which is what a normalising network can learn; the spread of scales
    gives each row another rstd, without which a wrong one would hardly show.
    """
    made = {}
    for name in PARTITIONS:
        draws = generator(seed, f"examples/{name}")
        direction = normal(draws, getattr(data, name), data.inputs)
        scale = 10.0 ** uniform(draws, len(direction), 1)
        exact = teacher(direction, data.outputs)
        made[name] = Partition((direction * scale).float(), (exact + data.noise * normal(draws, *exact.shape)).float())
    return made


def teacher(direction: Tensor, outputs: int) -> Tensor:
    """Compute the fixed function to be learnt: (rows, inputs) -> (rows, outputs), float64, values of order 1."""
    inputs = direction.shape[1]
    draws = generator(TEACHER_SEED, f"teacher/{inputs}/{outputs}")
    first = normal(draws, inputs, HIDDEN) / math.sqrt(inputs)
    last = normal(draws, HIDDEN, outputs) / math.sqrt(HIDDEN)
    unit = direction / direction.square().mean(-1, keepdim=True).sqrt()
    return torch.tanh(2.0 * unit @ first) @ last


class Network(torch.nn.Module):
    """Linear (inputs -> width) → RMSNorm → SiLU → Linear (width -> outputs), with the values of `state`."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        norm: Implementation,
        eps: float,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        width, inputs = state["first.weight"].shape
        outputs = state["last.weight"].shape[0]
        # Linear draws initial values of its own; drawn on the meta device they leave every generator as it was
        self.first = torch.nn.Linear(inputs, width, device="meta", dtype=dtype).to_empty(device=device)
        self.norm = RMSNorm(width, eps, device=device, dtype=dtype, impl=norm)
        self.last = torch.nn.Linear(width, outputs, device="meta", dtype=dtype).to_empty(device=device)
        self.load_state_dict(state, strict=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute (rows, inputs) -> (rows, outputs)."""
        hidden = self.norm(self.first(inputs))  # (rows, width)
        predicted: Tensor = self.last(torch.nn.functional.silu(hidden))
        return predicted


def initial_state(seed: int | str, *, inputs: int, width: int, outputs: int) -> dict[str, Tensor]:
    """Draw the values every path starts from: PyTorch's uniform ±1/√fan_in, and gamma = 1 + 0.2·normal; float32."""
    draws = generator(seed, "initial")
    return {
        "first.weight": (uniform(draws, width, inputs) / math.sqrt(inputs)).float(),
        "first.bias": (uniform(draws, width) / math.sqrt(inputs)).float(),
        "norm.weight": (1.0 + GAMMA_SPREAD * normal(draws, width)).float(),
        "last.weight": (uniform(draws, outputs, width) / math.sqrt(width)).float(),
        "last.bias": (uniform(draws, outputs) / math.sqrt(width)).float(),
    }


def mean_squared_error(network: Network, examples: Partition) -> float:
    """Return the mean of (prediction - target)² over all elements, without gradients, summed in float64."""
    with torch.no_grad():
        difference = network(examples.inputs).double() - examples.targets.double()
    return float(difference.square().mean())
