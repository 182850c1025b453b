"""One phase: a network, its optimizer, its data order and its generators, advanced one whole step at a time.

All that the next step depends on is in `Training.state()`; what is left out of it would show after a resume.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmsnorm_cli.errors import RmsnormError, flat
from rmsnorm_cli.kernels import CallSpec, Implementation
from rmsnorm_cli.network import Network, Partition, generator, mean_squared_error
from rmsnorm_cli.training.counting import Calls, Counted, adding
from rmsnorm_cli.training.lineage import initial
from rmsnorm_cli.training.plan import Phase, origin
from rmsnorm_cli.training.ranks import Ranks
from rmsnorm_cli.training.twin import Twin

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings

PARAMETERS = ("first.weight", "first.bias", "norm.weight", "last.weight", "last.bias")
COLUMNS = ("loss", "validation_loss", "grad_norm", *PARAMETERS)  # of a history; the parameters' are gradient norms
State = dict[str, Any]


class ImplementationRaised(RmsnormError):
    """A foreign implementation raised while the network trained through it."""

    exit_code = 1


@dataclass(frozen=True)
class Ground:
    """What all phases of a run stand on."""

    settings: "Settings"
    data: Mapping[str, Partition]  # on `device`
    reference: Implementation
    implementation: Implementation
    device: torch.device
    ranks: Ranks

    @property
    def eps(self) -> float:
        """Return eps."""
        return self.settings.operator.eps

    def norm(self, phase: Phase) -> Implementation:
        """Return what a phase's network normalises with when it is judged, without perturbation."""
        return self.implementation if phase.kind == "implementation" else self.reference


class Order:
    """The order in which examples are taken: one permutation after another, across their borders."""

    def __init__(self, rows: int, draws: torch.Generator) -> None:
        self.rows, self.draws = rows, draws
        self.permutation = torch.randperm(rows, generator=draws)
        self.position = 0

    def take(self, number: int) -> Tensor:
        """Return the numbers of the next examples."""
        taken: list[Tensor] = []
        while number:
            if self.position == self.rows:
                self.permutation, self.position = torch.randperm(self.rows, generator=self.draws), 0
            part = self.permutation[self.position : self.position + number]
            taken.append(part)
            self.position += len(part)
            number -= len(part)
        return torch.cat(taken)

    def state(self) -> State:
        """Return what continues this order."""
        return {
            "generator": self.draws.get_state(),
            "permutation": self.permutation,
            "position": self.position,
        }

    def restore(self, state: State) -> None:
        """Continue from a saved order."""
        self.draws.set_state(state["generator"])
        self.permutation, self.position = state["permutation"], state["position"]


def is_landmark(step: int) -> bool:
    """Tell whether the reference is kept as it is before the next step, to be compared from: 0, 10, 20, 50, 100, ..."""
    return step == 0 or (step >= 10 and str(step).rstrip("0") in ("1", "2", "5"))


class Training:
    """A phase under way: `advance` makes one step, `state` is all that the next step depends on."""

    def __init__(self, ground: Ground, phase: Phase, saved: State | None = None) -> None:
        self.ground, self.phase = ground, phase
        seed, ranks = origin(ground.settings, phase), ground.ranks
        self.share = ranks.share(ground.settings.train.batch)
        self.twin = Twin(ground.reference.call, generator(seed, phase.path)) if phase.kind == "twin" else None
        self.layer = Counted(self.twin or self.fitting(ground.norm(phase)).call)
        values = saved["model"] if saved else initial(ground.settings, phase)
        norm = Implementation(phase.path, self.layer)
        self.network = Network(values, norm, ground.eps, device=ground.device)
        self.module = ranks.wrapped(self.network)
        self.optimizer = optimizer(self.network, phase.optimizer, ground.settings)
        self.order = Order(len(ground.data["train"].inputs), generator(seed, "order"))
        self.step = 0
        self.history: list[list[float]] = []
        self.landmarks: dict[int, State] = {}
        self.counted: Calls = {}
        torch.manual_seed(generator(seed, f"torch/{ranks.rank}").initial_seed())
        if saved:
            self.restore(saved)

    def fitting(self, norm: Implementation) -> Implementation:
        """Return the norm, or the reference on a rank that has no rows where the norm refuses to compute nothing."""
        if self.share.start < self.share.stop:
            return norm
        width = self.ground.settings.train.width
        none = CallSpec((0, width), torch.float32, torch.float32, True, self.ground.eps, self.ground.device.type)
        return norm if norm.accepts and norm.accepts(none) is None else self.ground.reference

    def advance(self) -> dict[str, float]:
        """Make one step on the next global batch and return its row of the history."""
        ground, train = self.ground, self.ground.settings.train
        chosen = self.order.take(train.batch)
        if self.phase.kind == "reference" and is_landmark(self.step):
            self.landmarks[self.step] = {"model": values(self.network), "rows": chosen}
        examples = ground.data["train"].rows(chosen[self.share].to(ground.device))
        if self.twin:
            self.twin.rows, self.twin.share = train.batch, self.share
        self.optimizer.zero_grad(set_to_none=True)
        with adding(self.counted, self.layer), self.blamed(), ground.ranks.watched():
            difference = self.module(examples.inputs) - examples.targets
            elements = train.batch * difference.shape[1]
            squares = float(difference.detach().double().square().sum())
            # a sum over this rank's rows: DDP takes the mean over ranks, whose numbers of rows may differ
            (difference.square().sum() * (ground.ranks.world / elements)).backward()
        loss = ground.ranks.total(squares) / elements  # over sockets, before anything waits for the gradients' exchange
        norms = gradient_norms(self.network)
        self.optimizer.step()
        self.step += 1
        watched = self.step % train.validate_every == 0
        row = [loss, self.validation_error() if watched else math.nan, math.hypot(*norms), *norms]
        self.history.append(row)
        return dict(zip(COLUMNS, row, strict=True))

    def validation_error(self) -> float:
        """Return the mean squared error on the validation partition, read through the reference whatever was learnt."""
        network = Network(self.network.state_dict(), self.ground.reference, self.ground.eps, device=self.ground.device)
        return mean_squared_error(network, self.ground.data["validation"])

    def test_error(self) -> float:
        """Return the mean squared error on the test partition through the phase's own norm, without perturbation."""
        norm = self.fitting(self.ground.norm(self.phase))
        network = Network(self.network.state_dict(), norm, self.ground.eps, device=self.ground.device)
        with self.blamed():
            return mean_squared_error(network, self.ground.data["test"])

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn what a foreign implementation raises into one sentence about it; what ours raises is already one."""
        try:
            yield
        except Exception as problem:
            implementation = self.ground.implementation
            if isinstance(problem, RmsnormError) or self.phase.kind != "implementation" or implementation.ours:
                raise
            said = flat(f"{type(problem).__name__}: {problem}")[:500]
            where = f"step {self.step + 1} of {self.phase.key}"
            raise ImplementationRaised(f"{implementation.name} raised in {where}: {said}") from problem

    def state(self) -> State:
        """Return all that the next step depends on and what the steps so far have shown; every rank must ask."""
        own = {"counted": self.counted, "torch": torch.get_rng_state(), "cuda": None}
        if self.ground.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state(self.ground.device)
        return {
            "model": values(self.network),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "order": self.order.state(),
            "twin": self.twin.draws.get_state() if self.twin else None,
            "history": torch.tensor(self.history, dtype=torch.float64).reshape(-1, len(COLUMNS)),
            "landmarks": dict(self.landmarks),
            "ranks": self.ground.ranks.gathered(own),
        }

    def restore(self, saved: State) -> None:
        """Continue from a saved state, whose weights the network already has."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        self.order.restore(saved["order"])
        if self.twin:
            self.twin.draws.set_state(saved["twin"])
        self.history = saved["history"].tolist()
        if len(self.history) != self.step:
            raise ValueError(f"{len(self.history)} steps are recorded and {self.step} were made")
        self.landmarks = dict(saved["landmarks"])
        own = saved["ranks"][self.ground.ranks.rank]
        self.counted = own["counted"]
        torch.set_rng_state(own["torch"])  # no norm of ours draws from these, a foreign one may
        if own["cuda"] is not None:
            torch.cuda.set_rng_state(own["cuda"], self.ground.device)


def optimizer(network: Network, name: str, settings: "Settings") -> torch.optim.Optimizer:
    """Return the optimizer of a name: Adam, or SGD with momentum."""
    train = settings.train
    if name == "adam":
        return torch.optim.Adam(network.parameters(), lr=train.lr.adam)
    assert name == "sgd", name
    return torch.optim.SGD(network.parameters(), lr=train.lr.sgd, momentum=train.momentum)


def values(network: Network) -> dict[str, Tensor]:
    """Copy a network's values to the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()}


def gradient_norms(network: Network) -> list[float]:
    """Return the 2-norm of each parameter's gradient in the order of PARAMETERS; 0 where a norm gave gamma none."""
    gradients = [dict(network.named_parameters())[name].grad for name in PARAMETERS]
    zero = torch.zeros((), dtype=torch.float64, device=network.first.weight.device)
    norms: list[float] = torch.stack([zero if g is None else g.double().norm() for g in gradients]).tolist()
    return norms
