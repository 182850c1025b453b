"""What a checkpoint was made of, and whether a run of these settings may continue it bit for bit."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rmsnorm_cli.config import Settings
from rmsnorm_cli.network import Partition, initial_state
from rmsnorm_cli.training import plan
from rmsnorm_cli.training.plan import Phase


@dataclass(frozen=True)
class Lineage:
    """The settings, the hashes of examples and initial values, and the phases that a checkpoint must be of."""

    identity: Mapping[str, Any]
    data: Mapping[str, str]
    phases: tuple[Phase, ...]

    def refusal(self, state: Mapping[str, Any]) -> str | None:
        """Say why a sound checkpoint cannot be continued by this run, or return None where it can."""
        try:
            return self.mismatch(state)
        except (TypeError, AttributeError, KeyError, ValueError):  # values of other kinds than this tool saves
            return "its content is not what this tool saves"

    def mismatch(self, state: Mapping[str, Any]) -> str | None:
        """Compare a checkpoint's content with this run; raises for content of another kind."""
        if set(state) != {"identity", "data", "phases"}:
            return "it is not a checkpoint of a training run"
        held: Mapping[str, Any] = state["identity"]
        differing = [key for key, value in self.identity.items() if held.get(key) != value]
        if differing:
            said = ", ".join(f"{key} was {held.get(key)!r} and is {self.identity[key]!r}" for key in differing)
            return f"it belongs to another run ({said})"
        if state["data"] != self.data:
            return "it was made from other examples or initial values (their hashes differ)"
        known = {phase.key for phase in self.phases}
        if not set(state["phases"]) <= known:
            return "it holds phases that this run does not have"
        for saved in state["phases"].values():
            int(saved["step"]), saved["history"].tolist()
        return None


def lineage(
    settings: Settings, name: str, world: int, data: Mapping[str, Partition], execution: str | None = None
) -> Lineage:
    """Return what this run's checkpoints are of, `name` being its implementation.

    Without `execution` it holds no word on what executes that: nobody knows before the implementation is loaded.
    """
    identity = plan.identity(settings, name, execution or "", world)
    if execution is None:
        del identity["execution"]
    phases = plan.phases(settings, name)
    hashes = {key: part.sha256 for key, part in data.items()} | {"initial": initial_hash(settings, phases[0])}
    return Lineage(identity, hashes, phases)


def initial(settings: Settings, phase: Phase) -> dict[str, Tensor]:
    """Return the values a phase starts from."""
    data, width = settings.data, settings.train.width
    return initial_state(plan.origin(settings, phase), inputs=data.inputs, width=width, outputs=data.outputs)


def initial_hash(settings: Settings, phase: Phase) -> str:
    """Return the sha256 of the values a phase starts from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(initial(settings, phase).items()):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode() + tensor.numpy().astype("<f4").tobytes())
    return digest.hexdigest()
