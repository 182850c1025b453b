"""What torchrun starts for the tests of data-parallel training: `ranked.py SCENARIO FOLDER`, in every process."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rmsnorm_cli import config, environment
from rmsnorm_cli.commands import train
from rmsnorm_cli.console import Console
from rmsnorm_cli.environment import Device
from rmsnorm_cli.kernels import implementation
from rmsnorm_cli.rundir import run
from rmsnorm_cli.training import loop, ranks

CPU = Device("interpreter", "interpreter", "cpu", "CPU")


def trained(folder: Path, options: dict[str, Any], **override: Any) -> None:
    """Train with options, on the device they name, and leave the outcome of each rank beside the runs."""
    settings = config.load("train", options=options | {"run.dir": str(folder)} | override)
    on_gpu = settings.run.device == "cuda"
    device = environment.choose_device("cuda", folder) if on_gpu else CPU
    norm = implementation(config.DEFAULT_IMPL["train"][0] if on_gpu else "torch")
    with run.open_run(settings, ["train"], device, {}) as opened:
        outcome = train.run(settings, opened, Console(quiet=True), device, norm)
        opened.finish(outcome)
    name = settings.run.name or "plain"
    report = {"status": outcome.status, "failed": [r.detail for r in outcome.results if r.status == "failed"]}
    (folder / f"{name}-{run.rank()}.json").write_text(json.dumps(report))


def gradients(folder: Path) -> None:
    """Give each rank its own row, and then rank 0 both and rank 1 none, through DDP; write gamma's gradients."""
    given = {"equal": ([[3.0, 4.0]], [[6.0, 8.0]]), "empty": ([[3.0, 4.0], [6.0, 8.0]], [])}
    scales = {"equal": ([1.0], [3.0]), "empty": ([1.0, 3.0], [])}
    found = {}
    with ranks.joined(torch.device("cpu")) as here:
        for name, rows in given.items():
            module = torch.nn.RMSNorm(2, eps=1e-6)
            wrapped = here.wrapped(module)
            x = torch.tensor(rows[here.rank]).reshape(-1, 2)
            dy = torch.tensor(scales[name][here.rank]).reshape(-1, 1)
            # the loss of `advance`: a sum over own rows, times ranks over all rows
            ((wrapped(x) * dy).sum() * (here.world / 2)).backward()
            found[name] = module.weight.grad.tolist()
    (folder / f"gradients-{run.rank()}.json").write_text(json.dumps(found))


def lost(folder: Path, options: dict[str, Any]) -> None:
    """Let rank 1 die before a step that rank 0 begins."""
    advance = loop.Training.advance

    def dying(training: loop.Training) -> dict[str, float]:
        if training.ground.ranks.rank == 1 and training.phase.kind == "implementation" and training.step == 5:
            os._exit(9)
        return advance(training)

    loop.Training.advance = dying  # type: ignore[method-assign]
    trained(folder, options)


def main() -> None:
    """Do what the command line says."""
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    options = json.loads((folder / "options.json").read_text())
    if scenario == "lost":
        lost(folder, options)
        return
    if scenario == "plain":
        trained(folder, options)
        return
    dist.init_process_group("gloo")
    gradients(folder)
    trained(folder, options)
    trained(folder, options, **{"run.name": "single", "train.batch": 1, "train.steps": 4})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
