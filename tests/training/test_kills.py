"""SIGKILL at random moments of real processes: the newest checkpoint always loads, --resume always continues.

KILLS=50 python -m pytest tests/training/test_kills.py is the long form; the suite does a few.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from rmsnorm_cli import checkpoint, config
from rmsnorm_cli.kernels import implementation

KILLS = int(os.environ.get("KILLS", "2"))
PATIENCE = 120.0  # seconds in which a process must show progress, on a machine that does much else


def process(folder, *arguments):
    """Start the tool as a user does."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RMSNORM_", "TRITON_"))}
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rmsnorm_cli",
            "train",
            "--device",
            "interpreter",
            "--runs-dir",
            str(folder),
            *arguments,
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def progress(folder):
    """Return how much a run has written since it was begun: records, bytes of the newest files of its checkpoints."""
    records = [path.stat().st_size for path in folder.glob("2*/metrics.jsonl")]
    saved = sorted(path.name for path in folder.glob("2*/checkpoints/*"))
    return records, saved


def kill_at_a_random_moment(started, folder, dice):
    """Kill a process after a random number of further records; False if it had finished by then."""
    before, wanted, end = progress(folder), dice.randrange(1, 40), time.monotonic() + PATIENCE
    while wanted and started.poll() is None:
        assert time.monotonic() < end, "no progress"
        time.sleep(dice.random() * 0.004)
        if progress(folder) != before:
            before, wanted = progress(folder), wanted - 1
    time.sleep(dice.random() * 0.01)
    started.kill()
    started.communicate()
    return started.returncode == -signal.SIGKILL


@pytest.mark.case("B74", "B73")
@pytest.mark.interpreter
def test_runs_killed_at_random_moments_end_with_the_bits_of_one_that_was_not(trainer, left, differing, tmp_path):
    """Each kill leaves a newest checkpoint that loads; the final state equals an uninterrupted run's."""
    options = {
        "train__checkpoint_every": 1,
        "train__steps": 20 + KILLS // 2,
        "train__twins": 1,
        "run__impl": ["reference"],
    }
    straight, _ = trainer.start(implementation("reference"), **options)
    dice = random.Random(20261129)
    folder = tmp_path / "killed"
    settings = tmp_path / "settings.toml"
    settings.write_text(config.to_toml(trainer.settings(**options, run__dir=str(folder))))
    kills, numbers = 0, []
    started = process(folder, "--config", str(settings))
    while kills < KILLS and kill_at_a_random_moment(started, folder, dice):
        kills += 1
        (directory,) = folder.glob("2*")
        found = checkpoint.newest(directory / "checkpoints")
        assert found is None or found.refused == ()
        numbers.append(found.step if found else None)
        started = process(folder, "--resume", directory.name)
    said = started.communicate()[0]
    assert kills == KILLS, f"the run was over after {kills} kills, at {numbers}: {said}"
    assert started.returncode == 0, said
    (directory,) = folder.glob("2*")
    assert differing(left(directory), left(straight)) is None
    assert not [path for path in (directory / "checkpoints").iterdir() if path.name.startswith(".")]
    print(f"{kills} kills, newest checkpoints {numbers}")
