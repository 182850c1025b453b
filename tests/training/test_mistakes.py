"""The protocol accepts right norms and sees planted mistakes, each in the place where it must show."""

import dataclasses
import json

import pytest

from rmsnorm_cli.kernels import Implementation, implementation
from rmsnorm_cli.training.loop import ImplementationRaised

OPTIONS = {
    "train__steps": 15,
    "train__width": 257,
    "train__batch": 32,
    "data__train": 512,
    "train__checkpoint_every": 15,
}


def gates(outcome, optimizer):
    return outcome.summary["caught_by"][optimizer]


@pytest.mark.parametrize("name", ["right", "torch", "reference"])
def test_a_right_norm_passes_every_gate(trainer, norms, name):
    norm = norms.get(name) or implementation(name)
    directory, outcome = trainer.start(norm, **OPTIONS)
    assert outcome.status == "passed", outcome.notes
    assert outcome.counts["failed"] == outcome.counts["skipped"] == 0
    assert {result.gate for result in outcome.results} == {
        "calls", "first step", "teacher-forced", "loss curve", "test error", "reload", "exchange",
    }  # fmt: skip
    assert all(result.worst < 0.9 for result in outcome.results if result.worst is not None)
    assert json.loads((directory / "run.json").read_text())["status"] == "passed"


# name: scopes of the first step that fail, and whether the loss curve fails under (Adam, SGD)
CAUGHT = {
    "padded": ({"forward", "dx", "dgamma"}, (True, True)),
    "gamma-missing": ({"dx"}, (True, True)),
    "last-row": ({"dgamma"}, (True, True)),
    "dgamma-twice": ({"dgamma"}, (False, True)),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_a_planted_mistake_fails_where_it_must(trainer, norms, name):
    """Dgamma × 2 moves no curve under Adam, which divides by a gradient's size; SGD and the first step see it."""
    directory, outcome = trainer.start(norms[name], **OPTIONS)
    scopes, curves = CAUGHT[name]
    assert outcome.status == "failed"
    assert outcome.exit_code == 1
    assert set(gates(outcome, "first step")) == scopes
    assert ("loss curve" in gates(outcome, "adam"), "loss curve" in gates(outcome, "sgd")) == curves
    assert "teacher-forced" in gates(outcome, "sgd")
    for optimizer, visible in zip(("adam", "sgd"), curves, strict=True):
        worst = outcome.summary["curves"][optimizer]["worst"]
        assert worst > 100 if visible else worst < 1, "the margin on either side of the limit is wide"
    assert json.loads((directory / "run.json").read_text())["status"] == "failed"


def test_within_seed_noise_is_what_mistakes_hide_in(trainer, norms):
    """Why there are twins: what these mistakes do to the final error is less than the spread of seeds."""
    options = OPTIONS | {"train__seed_noise_runs": 3, "train__optimizers": ["adam"]}
    for name in ("gamma-missing", "last-row", "dgamma-twice"):
        _, outcome = trainer.start(norms[name], **options)
        errors = outcome.summary["test_mse"]["adam"]
        seeds = [errors[f"seed-{number}"] for number in (1, 2, 3)]
        assert abs(errors[name] - errors["reference"]) < (max(seeds) - min(seeds))


def test_the_hint_names_the_part_of_the_kernel(trainer, norms):
    _, outcome = trainer.start(norms["last-row"], **OPTIONS)
    hints = {result.hint for result in outcome.results if result.gate == "first step" and result.status == "failed"}
    assert len(hints) == 1
    assert "weight gradient" in hints.pop()


def test_an_implementation_that_did_not_run_is_no_proof(trainer):
    """One that computes right and leaves its backward to others: no gradient reaches it, and the calls say so."""
    call = implementation("reference").call

    def detour(x, gamma, eps):
        y = call(x, gamma, eps)
        return y.detach() + (y.sum() - y.sum().detach()) * 0

    _, outcome = trainer.start(Implementation("detour", detour))
    assert outcome.status == "failed"
    seen = next(r for r in outcome.results if r.gate == "calls" and r.case == "adam/detour")
    assert seen.status == "failed"
    assert "reference ran as well" in seen.detail


def test_a_kernel_of_ours_that_was_never_launched_is_not_proved_by_calls_of_the_layer(trainer, norms):
    silent = dataclasses.replace(norms["right"], ours=True)
    _, outcome = trainer.start(silent)
    seen = {
        result.case: result.detail for result in outcome.results if result.gate == "calls" and result.status == "failed"
    }
    assert set(seen) == {"adam/right", "sgd/right"}
    assert "right forward 0, backward 0" in seen["adam/right"]


def test_counts_are_of_the_steps_alone(trainer):
    """Validation, test and comparison call the norm too, and are not counted."""
    _, outcome = trainer.start(implementation("reference"))
    assert outcome.summary["calls"] == {
        f"{optimizer}/{path}": [
            {"reference": {"forward": 12, "backward": 12}, "layer": {"forward": 12, "backward": 12}}
        ]
        for optimizer in ("adam", "sgd")
        for path in ("reference", "reference-again")
    }


def test_a_norm_that_gives_gamma_no_gradient_fails_in_dgamma(trainer):
    call = implementation("reference").call
    _, outcome = trainer.start(Implementation("frozen", lambda x, gamma, eps: call(x, gamma.detach(), eps)))
    assert gates(outcome, "first step") == ["dgamma"]


def test_a_norm_that_learns_nothing_but_nan_fails(trainer):
    def nan(x, gamma, eps):
        return x * gamma * float("nan")

    directory, outcome = trainer.start(Implementation("nan", nan))
    assert outcome.status == "failed"
    assert "NaN" not in (directory / "metrics.jsonl").read_text()
    assert "NaN" not in (directory / "run.json").read_text()


def test_a_foreign_norm_that_raises_is_one_sentence_with_its_step(trainer):
    calls = []

    def tired(x, gamma, eps):
        calls.append(1)
        if len(calls) == 5:
            raise ValueError("no more")
        return implementation("reference").call(x, gamma, eps)

    with pytest.raises(
        ImplementationRaised, match="tired raised in step 5 of adam/tired: ValueError: no more"
    ) as raised:
        trainer.start(Implementation("tired", tired))
    assert raised.value.exit_code == 1


def test_a_reload_that_differs_in_a_bit_is_seen(trainer, monkeypatch):
    from rmsnorm_cli import checkpoint

    load = checkpoint.load

    def altered(path):
        step, state = load(path)
        state["phases"]["sgd/right"]["model"]["first.bias"][3] += 1e-6
        return step, state

    monkeypatch.setattr(checkpoint, "load", altered)
    _, outcome = trainer.start()
    assert [(r.gate, r.case) for r in outcome.results if r.status == "failed"] == [("reload", "sgd/right")]


def test_the_limits_are_on_the_disk_before_the_first_step(trainer):
    directory = trainer.killed("adam/reference", 1)
    declared = json.loads((directory / "declared" / "train.json").read_text())
    assert declared["loss_curve"]["twin_factor"] == 3.0
    assert declared["gradients"]["one_minus_cosine"] == 1e-6


def test_a_narrow_network_is_said_to_be_too_narrow_for_its_gradients(trainer):
    _, outcome = trainer.start(train__width=1)
    assert {r.status for r in outcome.results if r.gate == "first step"} == {"skipped"}
