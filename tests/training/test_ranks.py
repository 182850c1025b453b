"""Data-parallel training: processes over one global batch learn what one process learns, and a dead one is noticed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rmsnorm_cli import checkpoint, config
from rmsnorm_cli.environment import Device
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.kernels import implementation
from rmsnorm_cli.training.ranks import Ranks, joined

RANKED = Path(__file__).with_name("ranked.py")


def torchrun(folder, scenario, options, processes=2):
    """Start a scenario of ranked.py in several processes."""
    (folder / "options.json").write_text(json.dumps(options))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    return subprocess.run(
        [*command, str(RANKED), scenario, str(folder)], capture_output=True, text=True, env=environment, timeout=300
    )


def read(folder, pattern):
    (found,) = folder.glob(pattern)
    return [json.loads(line) for line in found.read_text().splitlines()]


@pytest.fixture(scope="module")
def two(tmp_path_factory, small):
    """Return the folder that two processes over gloo left."""
    folder = tmp_path_factory.mktemp("two")
    done = torchrun(folder, "train", small)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_two_processes_learn_what_one_learns_but_for_rounding(two, trainer):
    """Every loss and every gradient norm of every path, from the same global batches."""
    directory, _ = trainer.start(implementation("torch"))
    alone = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    together = read(two, "2*-train/metrics.jsonl")
    assert [(r["optimizer"], r["path"], r["step"]) for r in together] == [
        (r["optimizer"], r["path"], r["step"]) for r in alone
    ]
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(together, alone, strict=True)) < 1e-5
    assert (
        max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in zip(together, alone, strict=True)) < 1e-4
    )


def test_one_directory_one_verdict_and_the_calls_of_every_rank(two):
    """Rank 0 alone writes; both ranks ran the norm in every step and come to the same verdict."""
    (directory,) = two.glob("2*-train")
    facts = json.loads((directory / "run.json").read_text())
    assert facts["status"] == "passed"
    assert facts["summary"]["processes"] == 2
    calls = facts["summary"]["calls"]["sgd/torch"]
    assert [own["layer"] for own in calls] == [{"forward": 12, "backward": 12}] * 2
    assert {json.loads((two / f"plain-{rank}.json").read_text())["status"] for rank in (0, 1)} == {"passed"}


@pytest.mark.case("B59")
def test_a_rank_without_rows_contributes_zeros(two, trainer):
    """A batch of one example over two ranks: losses equal those of one process."""
    directory, _ = trainer.start(implementation("torch"), train__batch=1, train__steps=4)
    alone = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    together = read(two, "2*-train-single/metrics.jsonl")
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(together, alone, strict=True)) < 1e-5
    for rank in (0, 1):
        assert json.loads((two / f"single-{rank}.json").read_text())["failed"] == []


@pytest.mark.case("B59")
@pytest.mark.parametrize("name", ["equal", "empty"])
def test_gammas_gradient_is_the_mean_over_all_rows_on_every_rank(two, name):
    """Rows [3, 4] with dy 1 and [6, 8] with dy 3, wherever they lie: [1.69705625, 2.26274166]."""
    for rank in (0, 1):
        found = json.loads((two / f"gradients-{rank}.json").read_text())[name]
        assert found == pytest.approx([1.69705625, 2.26274166], rel=1e-6)


def test_a_rank_that_dies_ends_the_run_with_a_clear_status(tmp_path, small):
    done = torchrun(tmp_path, "lost", small | {"train.optimizers": ["adam"]})
    assert done.returncode != 0
    (directory,) = tmp_path.glob("2*-train")
    facts = json.loads((directory / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("error", 4)
    assert facts["message"].startswith("another of the 2 processes of this run has died")
    found = checkpoint.newest(directory / "checkpoints")
    assert found.state["phases"]["adam/torch"]["step"] == 4, "the last good checkpoint stands"


def test_one_process_joins_nobody():
    with joined(torch.device("cpu")) as here:
        assert (here.rank, here.world, here.leads) == (0, 1, True)
        assert here.total(2.5) == 2.5
        assert here.largest(3) == 3
        assert here.gathered("x") == ["x"]


@pytest.mark.parametrize(
    "environment",
    [{"WORLD_SIZE": "2", "RANK": "2"}, {"WORLD_SIZE": "2", "RANK": "x"}, {"WORLD_SIZE": "2", "RANK": "0"}],
    ids=["rank beyond", "no number", "no address"],
)
def test_half_a_torchrun_environment_is_refused(monkeypatch, environment):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun"), joined(torch.device("cpu")):
        pass


def test_an_error_of_our_own_is_not_taken_for_a_lost_process():
    with pytest.raises(RuntimeError, match="shapes"), Ranks(0, 2).watched():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_kernel_on_the_gpu_learns_and_resumes_to_the_same_bits(trainer, left, differing):
    trainer.device = Device("cuda", "cuda", "cuda:0", torch.cuda.get_device_name(0))
    norm = implementation(config.DEFAULT_IMPL["train"][0])
    straight, outcome = trainer.start(norm)
    assert outcome.status == "passed", outcome.notes
    directory = trainer.killed(f"adam/{norm.name}", 7, norm)
    trainer.resume(directory, norm)
    assert differing(left(directory), left(straight)) is None


@pytest.mark.gpu2
def test_two_gpus_over_nccl_learn_what_one_learns_but_for_rounding(tmp_path, trainer, small):
    done = torchrun(tmp_path, "plain", small | {"run.device": "cuda"})
    assert done.returncode == 0, done.stderr[-3000:]
    trainer.device = Device("cuda", "cuda", "cuda:0", torch.cuda.get_device_name(0))
    directory, _ = trainer.start(implementation(config.DEFAULT_IMPL["train"][0]), run__dir=str(tmp_path / "alone"))
    alone = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    together = read(tmp_path, "2*-train/metrics.jsonl")
    assert len(together) == len(alone)
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(together, alone, strict=True)) < 1e-5


@pytest.mark.gpu2
def test_a_gpu_rank_that_dies_ends_the_run_with_a_clear_status(tmp_path, small):
    done = torchrun(tmp_path, "lost", small | {"run.device": "cuda"})
    assert done.returncode != 0
    (directory,) = tmp_path.glob("2*-train")
    facts = json.loads((directory / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("error", 4)
