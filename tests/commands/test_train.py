"""`rmsnorm train` as a user meets it: the JSON document, a signal, --resume in a new process, what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
import torch

from rmsnorm_cli import checkpoint, cli, config, network
from rmsnorm_cli.commands import train
from rmsnorm_cli.environment import Device
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.kernels import ContractError, Implementation, implementation
from rmsnorm_cli.results import Outcome
from rmsnorm_cli.rundir.run import open_run
from rmsnorm_cli.training.lineage import lineage
from rmsnorm_cli.training.plan import phases
from rmsnorm_cli.training.ranks import Ranks

SMALL = """
[run]
seed = 3
[data]
train = 24
validation = 4
test = 4
[train]
width = 19
steps = 40
batch = 5
twins = 1
seed_noise_runs = 0
checkpoint_every = 1
"""


@pytest.fixture
def tool(tmp_path):
    """Return what starts the tool in a folder of its own, with a small configuration there."""
    (tmp_path / "small.toml").write_text(SMALL)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RMSNORM_", "GITHUB_", "TRITON_"))}

    def start(*arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "rmsnorm_cli", "train", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.mark.case("B73", "B77")
def test_a_kernel_learns_is_stopped_by_sigterm_and_goes_on_in_a_new_process(tool, tmp_path):
    """Exit 143 with the step that was saved; then --resume --json is a pass, with the kernel's own counts."""
    first = tool("--config", "small.toml")
    end = time.monotonic() + 120
    while not any(path.stat().st_size for path in tmp_path.glob("runs/2*/metrics.jsonl")):
        assert time.monotonic() < end
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=120)
    assert first.returncode == 143, said
    assert "SIGTERM: stopped and saved after step" in said
    assert "Traceback" not in said
    second = tool("--resume", "latest-train", "--json")
    out, said = second.communicate(timeout=300)
    assert second.returncode == 0, said
    document = json.loads(out)
    assert document["status"] == "passed"
    assert document["command"] == "train"
    assert document["counts"]["failed"] == 0 < document["counts"]["passed"]
    steps = {"forward": 40, "backward": 40}
    name = document["implementation"]
    for optimizer in ("adam", "sgd"):
        (own,) = document["calls"][f"{optimizer}/{name}"]
        assert {event: own[name][event] for event in steps} == own["layer"] == steps
        assert set(document["calls"][f"{optimizer}/reference"][0]) == {"reference", "layer"}
        assert document["reloaded"][f"{optimizer}/{name}"]["difference"] == 0.0
        assert document["test_mse"][optimizer][name] == pytest.approx(document["test_mse"][optimizer]["reference"])
    assert set(document["data"]) == {"train", "validation", "test", "initial"}
    (directory,) = tmp_path.glob("runs/2*")
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, 41)) * 6


# --- pieces of the command --------------------------------------------------------------------------------------------


def settings(**options):
    return config.load("train", options={key.replace("__", "."): value for key, value in options.items()})


CPU = Device("interpreter", "interpreter", "cpu", "CPU")


def test_the_plan_says_what_would_run():
    said = " ".join(train.plan(settings(train__steps=7, train__width=19)))
    assert "7 steps of 32 examples" in said
    assert "width 19" in said


def test_the_default_is_a_hundred_steps_by_both_optimizers_at_a_width_that_is_no_power_of_two():
    table = settings().train
    assert (table.steps, table.batch, table.width, table.optimizers) == (100, 32, 257, ("adam", "sgd"))
    assert len(phases(settings(), "rowwise")) == 2 * (2 + table.twins + table.seed_noise_runs)


def test_a_width_outside_the_contract_is_refused_before_any_work():
    taught = Implementation(
        "narrow", implementation("reference").call, accepts=lambda spec: f"x has {spec.shape[1]} columns"
    )
    with pytest.raises(ContractError, match="narrow cannot train this network: x has 257 columns"):
        train.refuse_outside(taught, settings(), CPU)


def test_rows_are_refused_for_the_largest_partition_as_well():
    """Batches of 32 may be inside a contract that 512 test examples are not."""
    taught = Implementation(
        "few", implementation("reference").call, accepts=lambda spec: "rows" * (spec.shape[0] > 100)
    )
    with pytest.raises(ContractError):
        train.refuse_outside(taught, settings(), CPU)


def test_a_gemma_norm_learns_as_one_plus_weight():
    """It is given gamma - 1, so that the network's gamma and its gradient mean the same in both paths."""
    norm = implementation("reference").call
    gemma = train.around_one(Implementation("gemma", lambda x, weight, eps: norm(x, 1.0 + weight, eps)))
    x, dy = torch.randn(2, 3, 7).double()
    found = []
    for call in (norm, gemma.call):
        gamma = torch.full((7,), 1.25, dtype=torch.float64, requires_grad=True)
        y = call(x, gamma, 1e-6)
        y.backward(dy)
        found.append((y.detach(), gamma.grad))
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_a_fault_of_the_catalogue_is_what_is_trained(tmp_path):
    """Its changed source lies in the run directory."""
    chosen = settings(train__fault="divide-by-block", run__dir=str(tmp_path))
    with open_run(chosen, ["rmsnorm", "train"], CPU, {}) as opened, ExitStack() as stack:
        found = train.chosen(chosen, opened, CPU, stack)
        assert found.name == "divide-by-block"
        assert (opened.dir / "faults" / "divide-by-block" / "rowwise.py").is_file()


def test_a_foreign_norm_is_taught_in_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def norm(x, gamma, eps):\n    import os\n    os._exit(7)\n")
    monkeypatch.chdir(tmp_path)
    chosen = settings(run__impl=["mine.py:norm"], run__dir=str(tmp_path))
    with open_run(chosen, ["rmsnorm", "train"], CPU, {}) as opened, ExitStack() as stack:
        found = train.chosen(chosen, opened, CPU, stack)
        with pytest.raises(RuntimeError, match="exited with code 7"):
            found.call(torch.ones(2, 3), torch.ones(3), 1e-6)


def torn(made, settings):
    for step in (1, 2):
        (made.checkpoints / f"step-0000000{step}.pt").write_bytes(b"torn")


def anothers(made, settings):
    """Leave sound checkpoints that a run with another learning rate, or of two processes, has saved."""
    own = lineage(settings, settings.run.impl[0], 1, network.partitions(settings.run.seed, settings.data))
    for step, other in ((1, {"train.lr": {"adam": 0.5, "sgd": 0.5}}), (2, {"processes": 2})):
        state = {"identity": {**own.identity, **other}, "data": own.data, "phases": {}}
        checkpoint.save(made.checkpoints, step, state, keep=9)


def gone(made, settings):
    made.record({"optimizer": "adam", "path": "reference", "step": 1, "loss": 1.0})


@pytest.mark.case("B74")
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (torn, ("step-00000001.pt is refused: it is cut short", "step-00000002.pt is refused: it is cut short")),
        (anothers, ("belongs to another run (train.lr was", "belongs to another run (processes was 2 and is 1)")),
        (gone, ("holds no checkpoint although metrics.jsonl records steps", "config.toml")),
    ],
    ids=["torn", "another's", "gone"],
)
def test_a_run_that_cannot_be_continued_is_refused_and_left_as_it_was(tool, tmp_path, device, spoil, expected):
    """What is told before anything is changed can be told again: the record of how the run ended stays."""
    settings = config.load("train", options={"run.dir": str(tmp_path / "runs")})
    here = Device("auto", "interpreter" if device == "cpu" else "cuda", device, "here")
    with open_run(settings, ["rmsnorm", "train"], here, {}) as made:
        spoil(made, settings)
        made.finish(Outcome("passed", here.execution, {"passed": 1}))
    before = {path: path.read_bytes() for path in made.dir.rglob("*") if path.is_file()}
    again = tool("--resume", made.dir.name)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 2
    assert all(part in said for part in expected), said
    assert {path: path.read_bytes() for path in made.dir.rglob("*") if path.is_file()} == before


@pytest.mark.case("B59")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", None, "WORLD_SIZE is 2 without RANK; start with torchrun"),
        ("RANK", "2", "RANK=2 of WORLD_SIZE=2 is no place among processes"),
        ("MASTER_ADDR", None, "WORLD_SIZE is 2 without MASTER_ADDR"),
        ("MASTER_PORT", None, "WORLD_SIZE is 2 without MASTER_PORT"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http', expected a number up to 65535"),
        ("MASTER_PORT", "65536", "MASTER_PORT is '65536', expected"),
    ],
)
def test_half_a_torchrun_environment_is_refused_before_anything_is_made(monkeypatch, name, value, said):
    for each, right in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(each, right)
    train.check(settings())
    monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=said):
        train.check(settings())


def test_a_mistake_that_is_not_in_the_catalogue_is_refused_before_anything_is_made():
    with pytest.raises(ConfigError, match="'padded-blok' is not in the catalogue"):
        train.check(settings(train__fault="padded-blok"))


@pytest.mark.parametrize("command", ["verify", "gradcheck", "bench", "exercise"])
def test_what_one_process_does_is_not_done_silently_by_another_rank(monkeypatch, capsys, command):
    """Of ranks other than the first nothing is printed or kept, so only what they do together is done there."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        cli.main([command])
    assert ended.value.code == 2
    assert f"RANK is 1, and {command} is one process's work" in capsys.readouterr().err


@pytest.mark.case("B59")
def test_ranks_that_were_started_with_other_settings_are_refused_by_name():
    """What one of them was asked for would be dropped in silence; a seed drawn at random is the first rank's."""

    class Second(Ranks):
        def from_leader(self, value):
            return settings(run__seed=9)

    second = Second(1, 2)
    assert train.agreed(settings(run__seed=4), second).run.seed == 9
    for options, said in (
        ({"train__steps": 7}, "train.steps is 7 and not 100"),
        ({"run__impl": ["torch"]}, "implementation is 'torch' and not 'fused'"),
        ({"train__batch": 3, "operator__eps": 0.5}, "eps is 0.5 and not 1e-06, train.batch is 3 and not 32"),
    ):
        with pytest.raises(ConfigError, match=f"rank 1 was started with other settings than rank 0 .{said}"):
            train.agreed(settings(**options), second)
