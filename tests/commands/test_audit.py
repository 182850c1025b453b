"""`rmsnorm audit`: a run directory as it was left passes, and each way of changing it is named."""

import json
import shutil

import pytest

from rmsnorm_cli import checkpoint, config
from rmsnorm_cli.commands import train
from rmsnorm_cli.commands.audit import audit
from rmsnorm_cli.console import Console
from rmsnorm_cli.environment import Device
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.kernels import implementation
from rmsnorm_cli.rundir import atomic, history
from rmsnorm_cli.rundir.run import open_run

CPU = Device("interpreter", "interpreter", "cpu", "CPU")
OPTIONS = {
    "data.train": 24,
    "data.validation": 6,
    "data.test": 6,
    "train.width": 19,
    "train.steps": 5,
    "train.batch": 5,
    "train.twins": 1,
    "train.seed_noise_runs": 0,
    "train.optimizers": ["sgd"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a finished run of `train`."""
    folder = tmp_path_factory.mktemp("runs")
    settings = config.load("train", options=OPTIONS | {"run.dir": str(folder)})
    with open_run(settings, ["rmsnorm", "train"], CPU, {}) as opened:
        opened.finish(train.run(settings, opened, Console(quiet=True), CPU, implementation("torch")))
    return opened.dir


@pytest.fixture
def directory(trained, tmp_path):
    """Return a copy of it that may be changed."""
    return shutil.copytree(trained, tmp_path / "runs" / trained.name)


def audited(directory):
    return audit(run=directory.name, runs_dir=directory.parent, console=Console(quiet=True))


def wrong(directory):
    """Return what fails: (check, what) pairs."""
    return {(result.gate, result.case) for result in audited(directory).results if result.status != "passed"}


def rehash(directory):
    """Make SHA256SUMS agree again, as someone would who changes a run and means to hide it."""
    atomic.write(directory / "SHA256SUMS", history.checksums(directory))


def change(directory, spoil):
    """Change the newest checkpoint, seal it again and make the sums agree."""
    path = checkpoint.listing(directory / "checkpoints")[-1]
    step, state = checkpoint.load(path)
    spoil(state)
    checkpoint.save(path.parent, step, state, keep=9)
    rehash(directory)
    return path.name


def test_a_run_as_it_was_left_passes(directory):
    outcome = audited(directory)
    assert outcome.status == "passed"
    gates = {result.gate for result in outcome.results}
    assert gates == {"hashes", "configuration", "checkpoint", "examples", "test error", "report", "metrics"}


def test_figures_and_reports_may_come_later(directory):
    (directory / "figures").mkdir()
    (directory / "figures" / "loss.svg").write_text("<svg/>")
    (directory / "report.html").write_text("<html/>")
    assert wrong(directory) == set()


def test_a_changed_a_missing_and_an_added_file_are_named(directory):
    with open(directory / "metrics.jsonl", "a") as file:
        file.write("{}\n")
    (directory / "env.json").unlink()
    (directory / "extra.txt").write_text("new")
    hashes = {("hashes", "metrics.jsonl"), ("hashes", "env.json"), ("hashes", "extra.txt")}
    assert wrong(directory) == hashes | {("metrics", "metrics.jsonl")}


@pytest.mark.parametrize(
    ("name", "add", "said"),
    [
        ("extra", lambda path: path.symlink_to("/etc/hostname"), "a link to /etc/hostname"),
        ("inner", lambda path: path.symlink_to("declared"), "a link to declared"),
        ("declared/gone", lambda path: path.symlink_to("nowhere"), "a link to nowhere"),
        ("figures", lambda path: path.symlink_to("/tmp"), "a link to /tmp"),
        ("printed", lambda path: path.mkdir(), "an empty folder"),
        ("declared/more/inside", lambda path: path.mkdir(parents=True), "an empty folder"),
    ],
)
def test_what_no_list_of_hashes_can_hold_is_named_where_it_was_added(directory, name, add, said):
    add(directory / name)
    (found,) = [result for result in audited(directory).results if result.status != "passed"]
    assert (found.case, found.detail) == (name, f"{said}, which no run of this tool leaves")


def test_a_run_that_wrote_nothing_into_a_folder_does_not_leave_it(tmp_path):
    """A save that was cut short leaves no trace that an audit would have to call added."""
    settings = config.load("verify", options={"run.dir": str(tmp_path)})
    with open_run(settings, ["rmsnorm", "verify"], CPU, {}) as opened:
        (opened.checkpoints / "deeper").mkdir()
        opened.finish(train.Outcome("passed", "cpu", {"passed": 1}))
    assert not (opened.dir / "checkpoints").exists()
    assert wrong(opened.dir) == set()


def better(line):
    return json.dumps(json.loads(line) | {"loss": json.loads(line)["loss"] * 0.99})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: [*lines[:3], better(lines[3]), *lines[4:]],
        lambda lines: lines[:-1],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: lines[5:],
    ],
    ids=["a loss", "one less", "one twice", "two swapped", "a phase less"],
)
def test_losses_that_are_not_the_checkpoints_are_noticed_though_the_sums_agree(directory, spoil):
    path = directory / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in spoil(path.read_text().splitlines())))
    rehash(directory)
    assert wrong(directory) == {("metrics", "metrics.jsonl")}


def test_steps_after_the_last_checkpoint_are_those_of_a_run_cut_short(directory):
    """A killed run may have recorded more than it saved, and never other than it saved."""
    facts = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps(facts | {"status": "error"}))
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"optimizer": "sgd", "path": "twin-1", "step": 6}\n')
    rehash(directory)
    assert wrong(directory) == set()


def test_without_sums_nothing_is_proved(directory):
    (directory / "SHA256SUMS").unlink()
    assert ("hashes", "SHA256SUMS") in wrong(directory)
    assert audited(directory).exit_code == 1


def test_a_sum_of_a_file_elsewhere_is_not_read(directory):
    (directory.parent / "outside.txt").write_text("x")
    with open(directory / "SHA256SUMS", "a") as file:
        file.write(f"{'0' * 64}  ../outside.txt\n")
    assert wrong(directory) == {("hashes", "../outside.txt")}


def test_a_weight_changed_by_one_in_a_million_does_not_reproduce_the_test_error(directory):
    def spoil(state):
        state["phases"]["sgd/torch"]["model"]["first.weight"] *= 1.0 + 1e-6

    name = change(directory, spoil)
    assert wrong(directory) == {("test error", f"{name} sgd/torch")}


def test_a_recorded_error_that_was_improved_is_noticed_in_checkpoint_and_report(directory):
    def spoil(state):
        state["phases"]["sgd/reference"]["errors"]["test"] *= 0.9

    name = change(directory, spoil)
    assert wrong(directory) == {("test error", f"{name} sgd/reference"), ("report", "run.json")}


def test_a_report_that_was_improved_is_noticed(directory):
    facts = json.loads((directory / "run.json").read_text())
    facts["summary"]["test_mse"]["sgd"]["torch"] *= 0.9
    (directory / "run.json").write_text(json.dumps(facts))
    rehash(directory)
    assert wrong(directory) == {("report", "run.json")}


def test_other_examples_than_the_seeds_are_noticed(directory):
    text = (directory / "config.toml").read_text()
    assert "noise = 0.05" in text
    (directory / "config.toml").write_text(text.replace("noise = 0.05", "noise = 0.06"))
    rehash(directory)
    gates = {gate for gate, _ in wrong(directory)}
    assert gates == {"examples", "test error"}


@pytest.mark.parametrize(
    ("old", "new"), [("steps = 5", "steps = -5"), ("steps = 5", "stepz = 5"), ("seed = 0", "seed = 1")]
)
def test_a_configuration_that_does_not_load_or_is_another_ones_is_noticed(directory, old, new):
    text = (directory / "config.toml").read_text()
    assert old in text
    (directory / "config.toml").write_text(text.replace(old, new))
    rehash(directory)
    assert ("configuration", "config.toml") in wrong(directory)


def test_torn_and_hostile_checkpoints_are_refused_by_name(directory):
    path = checkpoint.listing(directory / "checkpoints")[-1]
    path.write_bytes(path.read_bytes()[:-300])
    rehash(directory)
    assert wrong(directory) == {("checkpoint", path.name)}
    (directory / "checkpoints" / "step-99999999.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    rehash(directory)
    assert wrong(directory) == {("checkpoint", path.name), ("checkpoint", "step-99999999.pt")}


def test_a_sound_checkpoint_of_something_else_is_refused(directory):
    name = change(directory, lambda state: state.pop("phases"))
    assert wrong(directory) == {("checkpoint", name)}


def test_a_run_without_checkpoints_is_not_one_of_train(directory):
    shutil.rmtree(directory / "checkpoints")
    rehash(directory)
    assert wrong(directory) == {("checkpoint", "checkpoints")}


def test_what_is_no_run_and_what_still_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        audit(run="nowhere", runs_dir=tmp_path, console=Console(quiet=True))
    settings = config.load("train", options=OPTIONS | {"run.dir": str(tmp_path)})
    with open_run(settings, ["rmsnorm", "train"], CPU, {}) as opened:
        with pytest.raises(ConfigError, match="still working"):
            audited(opened.dir)
        opened.finish(train.Outcome("passed", "cpu", {"passed": 1}))


def test_runs_of_other_commands_are_audited_by_hashes_and_configuration(tmp_path):
    settings = config.load("verify", options={"run.dir": str(tmp_path)})
    with open_run(settings, ["rmsnorm", "verify"], CPU, {}) as opened:
        opened.finish(train.Outcome("passed", "cpu", {"passed": 1}))
    outcome = audited(opened.dir)
    assert outcome.status == "passed"
    assert {result.gate for result in outcome.results} == {"hashes", "configuration"}
