"""`rmsnorm train`: one network taught through the reference and through the implementation, which must not matter.

The protocol is in `rmsnorm_cli.training`. Under `torchrun --nproc-per-node=K -m rmsnorm_cli train` it is data-parallel;
rank 0 owns the run directory.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.results import Outcome, strict_json

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.console import Console
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.kernels import Implementation
    from rmsnorm_cli.rundir.run import Run
    from rmsnorm_cli.training.ranks import Ranks


def run(
    settings: "Settings",
    run: "Run",
    console: "Console",
    device: "Device",
    implementation: "Implementation | None" = None,
) -> Outcome:
    """Train, save, judge; continue where `run.resumed` says so.

    `implementation` replaces the one that the settings name. Raises Interrupted after a signal, with all whole steps
    saved; CheckpointError where nothing saved can be continued; ContractError where the implementation does not take
    this width; ProcessLost where another rank is gone.
    """
    import torch

    from rmsnorm_cli import environment, kernels, network
    from rmsnorm_cli.console import Console
    from rmsnorm_cli.training import protocol, ranks, summary
    from rmsnorm_cli.training.loop import Ground
    from rmsnorm_cli.training.verdict import Verdicts

    place = torch.device(device.torch_device)
    with ranks.joined(place) as here, protocol.deterministic(place), ExitStack() as stack:
        settings = agreed(settings, here)
        taught = implementation or chosen(settings, run, device, stack)
        refuse_outside(taught, settings, device)
        data = {name: part.to(place) for name, part in network.partitions(settings.run.seed, settings.data).items()}
        ground = Ground(settings, data, kernels.implementation("reference"), taught, place, here)
        run.write("declared/train.json", strict_json(summary.limits(settings.train.twin_factor)) + "\n")
        execution = environment.executes_on(taught, device)
        course = protocol.Protocol(ground, run, console if here.leads else Console(quiet=True), execution)
        if run.resumed:
            course.restore()
        course.go()
        return summary.outcome(Verdicts(course, execution), settings.train.fault)


def plan(settings: "Settings") -> list[str]:
    """Say what would be trained, without training it."""
    train = settings.train
    paths = f"reference, {train.fault or settings.run.impl[0]}, {train.twins} twins, {train.seed_noise_runs} seeds"
    return [
        f"would train {paths} by {' and by '.join(train.optimizers)} on device {settings.run.device}",
        f"{train.steps} steps of {train.batch} examples each, width {train.width}; a checkpoint every "
        f"{train.checkpoint_every} steps, of which {train.keep} are kept",
    ]


def check(settings: "Settings") -> None:
    """Raise ConfigError for an unknown mistake, and where this process has no place in a data-parallel run."""
    from rmsnorm_cli import faults
    from rmsnorm_cli.training.place import place

    if settings.train.fault:
        faults.find(settings.train.fault)
    place()


def refuse_unusable(directory: "Path", settings: "Settings") -> None:
    """Refuse, before anything is changed, what leads out of its directory or cannot be continued.

    Raises ConfigError; EnvironmentProblem where files cannot be read or made; CheckpointError where no checkpoint can
    be read, or none is this run's, or none is left of a run that has recorded steps.
    """
    from rmsnorm_cli import checkpoint, network
    from rmsnorm_cli.rundir import history
    from rmsnorm_cli.training.lineage import lineage
    from rmsnorm_cli.training.place import place

    history.refuse_links(directory)
    history.refuse_unwritable(directory)
    _, world = place()
    own = lineage(settings, named(settings), world, network.partitions(settings.run.seed, settings.data))
    folder = directory / "checkpoints"
    # The one of step 0 is saved before the first record is made.
    if not checkpoint.newest(folder, own.refusal) and history.read_records(directory):
        raise checkpoint.CheckpointError(
            f"{folder} holds no checkpoint although metrics.jsonl records steps, which need one to be continued; put "
            f"the checkpoints back, or train anew: rmsnorm train --config {directory / 'config.toml'}"
        )


def named(settings: "Settings") -> str:
    """Return the name of the implementation that will be taught, before it is loaded."""
    return settings.train.fault or settings.run.impl[0]


def agreed(settings: "Settings", here: "Ranks") -> "Settings":
    """Return rank 0's settings, whose seed may be drawn at random; ConfigError where this rank's differ otherwise."""
    from rmsnorm_cli.training import plan

    def counted(of: "Settings") -> dict[str, Any]:
        return {"train.steps": of.train.steps} | plan.identity(of, named(of), "", here.world) | {"seed": 0}

    first = here.from_leader(settings)
    own, expected = counted(settings), counted(first)
    differing = [
        f"{key} is {value!r} and not {expected[key]!r}" for key, value in own.items() if value != expected[key]
    ]
    if differing:
        raise ConfigError(
            f"rank {here.rank} was started with other settings than rank 0 ({', '.join(differing)}); start all alike"
        )
    return first


def chosen(settings: "Settings", run: "Run", device: "Device", stack: ExitStack) -> "Implementation":
    """Return the implementation that the settings name: a mistake of the catalogue, ours, or another's in a process."""
    if settings.train.fault:
        from rmsnorm_cli import faults

        return faults.implementation(settings.train.fault, run.dir)
    from rmsnorm_cli.kernels.foreign import opened

    rounding = settings.run.rounding
    found = stack.enter_context(opened(settings.run.impl[0], device.torch_device, rounding, keep=run.write))
    return around_one(found) if found.isolated and rounding == "gemma" else found


def around_one(found: "Implementation") -> "Implementation":
    """Adapt an implementation that multiplies by 1 + weight to a network whose weight is gamma itself."""

    def call(x: "Tensor", gamma: "Tensor | None", eps: float) -> "Tensor":
        return found.call(x, None if gamma is None else gamma - 1.0, eps)

    return replace(found, call=call)


def refuse_outside(taught: "Implementation", settings: "Settings", device: "Device") -> None:
    """Raise ContractError, before any work, where the implementation does not take the network's rows."""
    import torch

    from rmsnorm_cli.kernels import CallSpec, ContractError

    kind = torch.device(device.torch_device).type
    rows = max(settings.train.batch, settings.data.validation, settings.data.test)
    shape = (rows, settings.train.width)
    spec = CallSpec(shape, torch.float32, torch.float32, True, settings.operator.eps, kind)
    reason = taught.accepts(spec) if taught.accepts else None
    if reason:
        raise ContractError(f"{taught.name} cannot train this network: {reason}")
