"""Claims: what may not be read or written is said so, by name, and is not taken for damaged, missing or empty."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from rmsnorm_cli import checkpoint, config, network
from rmsnorm_cli.commands import audit, train
from rmsnorm_cli.console import Console
from rmsnorm_cli.environment import Device
from rmsnorm_cli.errors import EnvironmentProblem
from rmsnorm_cli.results import Outcome
from rmsnorm_cli.rundir import history
from rmsnorm_cli.rundir.run import open_run, reopen
from rmsnorm_cli.training.lineage import lineage

CPU = Device("interpreter", "interpreter", "cpu", "CPU")
NOBODY = 65534


@pytest.fixture
def folder():
    """Return a runs folder that every user reaches."""
    made = Path(tempfile.mkdtemp(prefix="rmsnorm-test-"))
    yield made
    shutil.rmtree(made)


@contextmanager
def bound_by_modes(folder):
    """Be a user for whom modes hold, which they do not for root; what is there is that user's."""
    root = os.geteuid() == 0
    for path in (folder, *folder.rglob("*")) if root else ():
        os.chown(path, NOBODY, -1, follow_symlinks=False)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, *folder.glob("2*"), *folder.glob("2*/checkpoints")):
            path.chmod(0o700)


def settings(folder):
    return config.load("train", options={"run.dir": str(folder)})


@pytest.fixture
def run(folder):
    """Return the directory of a finished run with a record and a checkpoint."""
    with open_run(settings(folder), ["rmsnorm", "train"], CPU, {}) as made:
        made.record({"step": 1})
        own = lineage(made.settings, "fused", 1, network.partitions(made.settings.run.seed, made.settings.data))
        state = {"identity": own.identity, "data": own.data, "phases": {}}
        checkpoint.save(made.checkpoints, 1, state, keep=1)
        made.finish(Outcome("passed", "interpreter", {"passed": 1}))
    config.load("train", file=made.dir / "config.toml")  # a codec that is loaded late may lie where root alone reads
    return made.dir


def resume(directory):
    with reopen(directory, settings(directory.parent), ["rmsnorm"], CPU, {}, refuse=train.refuse_unusable):
        pytest.fail("must be refused")


def audited(directory):
    audit.audit(str(directory), directory.parent, Console(quiet=True))


def refused(ask, directory):
    """Return what is said to a user for whom modes hold."""
    with bound_by_modes(directory.parent), pytest.raises(EnvironmentProblem) as problem:
        ask(directory)
    return str(problem.value)


CLOSED = {
    "": "run.json",
    "run.json": "run.json",
    "metrics.jsonl": "",
    "checkpoints": "",
    "checkpoints/step-00000001.pt": "",
}


@pytest.mark.parametrize("ask", [resume, audited])
@pytest.mark.parametrize("closed", CLOSED)
def test_what_may_not_be_read_is_named(run, ask, closed):
    (run / closed).chmod(0)
    name = CLOSED[closed] or closed
    assert refused(ask, run) == f"{run / name} cannot be read (Permission denied); make it readable"


@pytest.mark.parametrize("closed", ["env.json", "SHA256SUMS"])
def test_an_audit_names_each_file_that_it_may_not_read(run, closed):
    (run / closed).chmod(0)
    assert refused(audited, run).startswith(f"{run / closed} cannot be read")


def test_a_run_in_which_no_file_can_be_made_is_not_resumed_in_part(run):
    """Its log could be written, and its hashes would no longer hold."""
    run.chmod(0o555)
    before = history.checksums(run)
    assert refused(resume, run) == f"{run} cannot be written (Permission denied); make it writable"
    assert history.checksums(run) == before


def test_a_runs_folder_that_may_not_be_written_is_named_itself(run):
    """Not the directory in it that was not made."""

    def start(directory):
        with open_run(settings(directory.parent), ["rmsnorm"], CPU, {}):
            pytest.fail("must be refused")

    run.parent.chmod(0o555)
    assert refused(start, run).startswith(f"{run.parent} cannot be written (Permission denied); make it writable, or ")
