"""All phases of a run, one after another: advanced, recorded, saved; continued where an earlier process stopped."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rmsnorm_cli import checkpoint
from rmsnorm_cli.checkpoint import CheckpointError
from rmsnorm_cli.errors import Interrupted
from rmsnorm_cli.kernels import Implementation
from rmsnorm_cli.network import Network, Partition, mean_squared_error
from rmsnorm_cli.results import strict_json
from rmsnorm_cli.training import plan, stop
from rmsnorm_cli.training.lineage import lineage
from rmsnorm_cli.training.loop import COLUMNS, PARAMETERS, Ground, State, Training, values
from rmsnorm_cli.training.plan import Phase

if TYPE_CHECKING:
    from rmsnorm_cli.console import Console, Progress
    from rmsnorm_cli.rundir.run import Run

States = dict[str, State]  # of the phases begun so far, by key


class Protocol:
    """A run's phases and their states, of which one checkpoint holds all."""

    def __init__(self, ground: Ground, run: "Run", console: "Console", execution: str) -> None:
        self.ground, self.run, self.console = ground, run, console
        name = ground.implementation.name
        self.phases = plan.phases(ground.settings, name)
        self.lineage = lineage(ground.settings, name, ground.ranks.world, ground.data, execution)
        self.states: States = {}
        command = "rmsnorm train" if ground.ranks.world == 1 else "the same torchrun … -m rmsnorm_cli train"
        self.how_to_continue = f"continue with: {command} --resume {ground.ranks.from_leader(str(run.dir))}"

    def go(self) -> None:
        """Run every phase that is not finished, saving on the way; Interrupted, after a save, where a signal asks."""
        steps = self.ground.settings.train.steps
        left = sum(steps - self.done(phase) for phase in self.phases)
        with stop.listening() as signals, self.console.progress("train", left) as progress:
            if not self.states:
                self.save()  # a kill before the first whole step leaves something to continue from as well
            for phase in self.phases:
                if self.done(phase) < steps or "errors" not in self.states[phase.key]:
                    self.teach(phase, signals, progress)
                    self.heed(signals, f"the last step of {phase.key}")

    def done(self, phase: Phase) -> int:
        """Return how many steps a phase has behind it."""
        return self.states[phase.key]["step"] if phase.key in self.states else 0

    def teach(self, phase: Phase, signals: stop.Stop, progress: "Progress") -> None:
        """Bring one phase to its last step, judge it on the held-out partitions and save."""
        train = self.ground.settings.train
        training = self.resumed(phase)
        start, began = training.step, time.monotonic()
        while training.step < train.steps:
            row = training.advance()
            self.run.record(record(phase, training.step, row))
            rate = (training.step - start) / max(time.monotonic() - began, 1e-9)
            progress.advance(1, f"{phase.key} loss {row['loss']:.4f}, {rate:.0f} steps/s")
            if training.step % train.checkpoint_every == 0 and training.step < train.steps:
                self.keep(training)
            self.heed(signals, f"step {training.step} of {phase.key}", training)
        self.keep(training, errors=self.errors(training))

    def heed(self, signals: stop.Stop, where: str, training: Training | None = None) -> None:
        """Save and raise Interrupted where any rank has been asked to stop."""
        asked = self.ground.ranks.largest(signals.signal)
        if asked:
            if training:
                self.keep(training)
            raise Interrupted(asked, f"{stop.name(asked)}: stopped and saved after {where}; {self.how_to_continue}")

    def keep(self, training: Training, **more: Any) -> None:
        """Take a phase's state into the run's and save."""
        self.states[training.phase.key] = training.state() | more
        self.save()

    def resumed(self, phase: Phase) -> Training:
        """Return the phase as its saved state left it, or fresh."""
        saved = self.states.get(phase.key)
        try:
            return Training(self.ground, phase, saved)
        except (KeyError, TypeError, IndexError, ValueError, RuntimeError) as problem:
            if saved is None:
                raise
            raise CheckpointError(
                f"{self.run.checkpoints}: the saved state of {phase.key} does not fit this network ({problem})"
            ) from problem

    def errors(self, training: Training) -> dict[str, float]:
        """Return a finished phase's mean squared errors, and the test error in float64 that an audit reproduces."""
        ground = self.ground
        exact = test_error64(values(training.network), ground.data["test"], ground.reference, ground.eps)
        return {"validation": training.validation_error(), "test": training.test_error(), "test_float64": exact}

    def save(self) -> None:
        """Write the checkpoint of all steps so far, after the records that belong to them are on the disk."""
        if not self.ground.ranks.leads:
            return
        with open(self.run.path("metrics.jsonl"), "ab") as file:
            os.fsync(file.fileno())
        content = {"identity": self.lineage.identity, "data": self.lineage.data, "phases": self.states}
        number = sum(state["step"] for state in self.states.values())
        checkpoint.save(self.run.checkpoints, number, content, keep=self.ground.settings.train.keep)

    def restore(self) -> None:
        """Take up the newest checkpoint that belongs to this run, and bring metrics.jsonl to where it stands."""
        found = None
        if self.ground.ranks.leads:
            checkpoint.clean(self.run.checkpoints)
            found = checkpoint.newest(self.run.checkpoints, self.lineage.refusal)
            for sentence in found.refused if found else ():
                self.console.warn(sentence)
                self.run.log(sentence)
            self.states = found.state["phases"] if found else {}
            self.rewrite_metrics()
            where = (
                f"step {found.step} in all ({found.path.name})" if found else "the start: no step was saved or recorded"
            )
            self.console.note(f"continuing from {where}")
            self.run.log(f"continuing from {where}")
        self.states = self.ground.ranks.from_leader(self.states)

    def rewrite_metrics(self) -> None:
        """Write metrics.jsonl anew from the checkpoint's histories: no step twice, none missing, no line cut short."""
        lines = [strict_json(row, indent=None) + "\n" for row in records(self.phases, self.states)]
        self.run.write("metrics.jsonl", "".join(lines))


def records(phases: Sequence[Phase], states: Mapping[str, State]) -> Iterator[dict[str, Any]]:
    """Yield the lines that metrics.jsonl has for these states: phase after phase, each step once."""
    for phase in phases:
        history = states[phase.key]["history"].tolist() if phase.key in states else []
        for step, row in enumerate(history, start=1):
            yield record(phase, step, dict(zip(COLUMNS, row, strict=True)))


def record(phase: Phase, step: int, row: Mapping[str, float]) -> dict[str, Any]:
    """Return the line of metrics.jsonl for one step; `validation_loss` is there at the steps that have one."""
    watched = row["validation_loss"]
    return {
        "optimizer": phase.optimizer,
        "path": phase.path,
        "kind": phase.kind,
        "step": step,
        "loss": row["loss"],
        **({"validation_loss": watched} if watched == watched else {}),
        "grad_norm": row["grad_norm"],
        "grad_norms": {name: row[name] for name in PARAMETERS},
    }


def test_error64(
    state: Mapping[str, torch.Tensor], examples: Partition, reference: Implementation, eps: float
) -> float:
    """Return the error of these weights through the reference in float64 on the CPU, wherever they were learnt."""
    network = Network(state, reference, eps, dtype=torch.float64)
    return mean_squared_error(network, examples.to("cpu", torch.float64))


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Ask PyTorch for the same bits every time and for full fp32 products; give generators and settings back after.

    On a CPU one thread computes: the order of a sum does not depend on how many cores this machine has, and products
    as small as these are ten times slower when threads wait for each other (2 busy cores, 2026-11-29).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to repeat itself
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    gpus: Sequence[torch.device] = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.use_deterministic_algorithms(True, warn_only=True)  # a foreign norm may have no deterministic form
        torch.set_float32_matmul_precision("highest")
        if device.type == "cpu":
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.set_float32_matmul_precision(precision)
            torch.set_num_threads(threads)
