"""What a training run will do: its phases in order, and which of its numbers decide its results."""

from dataclasses import dataclass
from typing import Any, Literal

from rmsnorm_cli.config import Settings

REFERENCE = "reference"
Kind = Literal["reference", "implementation", "twin", "seed"]


@dataclass(frozen=True)
class Phase:
    """One network taught by one optimizer: the reference, the implementation, a twin, or the reference of another seed.

    `path` is the name in every record: `reference`, the implementation's name, `twin-1`, `seed-1`.
    """

    optimizer: str
    path: str
    kind: Kind

    @property
    def key(self) -> str:
        """Return the name under which checkpoints and tables hold this phase."""
        return f"{self.optimizer}/{self.path}"


def implementation_path(name: str) -> str:
    """Return the path's name of an implementation; the reference against itself needs a name of its own."""
    return "reference-again" if name == REFERENCE else name


def phases(settings: Settings, implementation: str) -> tuple[Phase, ...]:
    """Return the phases in the order in which they run; each is finished before the next begins."""
    train = settings.train
    paths: list[tuple[str, Kind]] = [(REFERENCE, "reference"), (implementation_path(implementation), "implementation")]
    paths += [(f"twin-{number}", "twin") for number in range(1, train.twins + 1)]
    paths += [(f"seed-{number}", "seed") for number in range(1, train.seed_noise_runs + 1)]
    return tuple(Phase(optimizer, path, kind) for optimizer in train.optimizers for path, kind in paths)


def origin(settings: Settings, phase: Phase) -> str:
    """Return the seed of a phase's initial values and data order: the run's own, but for seed-noise runs."""
    return f"{settings.run.seed}/{phase.path}" if phase.kind == "seed" else str(settings.run.seed)


def identity(settings: Settings, implementation: str, execution: str, world: int) -> dict[str, Any]:
    """Return what must be equal for a checkpoint to continue bit for bit: all that decides a number but the steps."""
    train = settings.train.model_dump(mode="json")
    free = ("steps", "checkpoint_every", "keep", "twin_factor")  # these decide how long, how often, how strictly
    return {
        "seed": settings.run.seed,
        "eps": settings.operator.eps,
        "implementation": implementation,
        "rounding": settings.run.rounding,
        "execution": execution,
        "processes": world,
        "data": settings.data.model_dump(mode="json"),
        **{f"train.{key}": value for key, value in train.items() if key not in free},
    }
