"""Claims about the controls: they pass here, and a verifier that has gone blind or strict is found out."""

import weakref

import pytest
import torch

from rmsnorm_cli.errors import VerifierUntrusted
from rmsnorm_cli.gates import (
    candidates,
    controls,
    declared,
    determinism,
    exact,
    fit,
    identities,
    memory,
    rounding,
    wiring,
)
from rmsnorm_cli.gates.controls import CONTROLS, GOOD, Control
from rmsnorm_cli.judging.oracle import Oracle
from rmsnorm_cli.judging.tolerances import DECLARED, Tolerance


def only(monkeypatch, *chosen):
    monkeypatch.setattr(controls, "CONTROLS", chosen)


def test_every_control_is_judged_rightly_here(device):
    results = controls.examine("cuda" if device.startswith("cuda") else "interpreter", device, DECLARED, seed=0)
    assert len(results) == len(CONTROLS) >= 20
    assert {result.status for result in results} == {"passed"}
    assert {result.gate for result in results} == {"controls"}
    assert len({result.case for result in results}) == len(CONTROLS)


def test_there_are_good_ones_and_every_gate_has_a_bad_one():
    assert sum(control.rejected_by == GOOD for control in CONTROLS) >= 4
    assert {control.rejected_by for control in CONTROLS} == {GOOD, *controls.QUESTIONS}


def test_the_inputs_are_fresh_at_each_call(monkeypatch, device):
    only(monkeypatch, CONTROLS[0])
    seeds = {controls.examine("interpreter", device, DECLARED)[0].extra["seed"] for _ in range(2)}
    assert len(seeds) == 2


@pytest.mark.parametrize(
    "mislabelled",
    [
        Control("a right one called bad", lambda: candidates.eager, declared.NAME),
        Control("a bad one called right", candidates.PADDED.norm, GOOD),
        Control("llama judged as if it rounded once", lambda: candidates.llama, GOOD),
    ],
    ids=lambda control: control.name,
)
def test_a_mislabelled_control_ends_the_run_and_is_named(monkeypatch, device, mislabelled):
    only(monkeypatch, CONTROLS[0], mislabelled)
    for seed in range(5):
        with pytest.raises(VerifierUntrusted, match=mislabelled.name) as caught:
            controls.examine("interpreter", device, DECLARED, seed)
        assert "1 controls misjudged" in str(caught.value)
        assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "gate", [memory, exact, declared, rounding, fit, identities, wiring, determinism], ids=lambda gate: gate.NAME
)
def test_a_gate_that_has_gone_blind_is_found_out(monkeypatch, device, gate):
    honest = gate.check

    def blind(*asked):
        return [verdict if verdict.status != "failed" else _passed(verdict) for verdict in honest(*asked)]

    monkeypatch.setattr(gate, "check", blind)
    only(monkeypatch, *(control for control in CONTROLS if control.rejected_by == gate.NAME))
    with pytest.raises(VerifierUntrusted):
        controls.examine("interpreter", device, DECLARED, seed=0)


def _passed(verdict):
    from dataclasses import replace

    return replace(verdict, status="passed")


def test_a_gate_that_rejects_everything_is_found_out(device):
    strict = {dtype: Tolerance(0.0, 0.0) for dtype in DECLARED}
    with pytest.raises(VerifierUntrusted, match="eager formula"):
        controls.examine("interpreter", device, strict, seed=0)


def test_widened_tolerances_are_found_out(device):
    """The widest that a public suite was seen to use: bf16's atol of 0.2, here in float32."""
    wide = {dtype: Tolerance(0.2, 0.2) for dtype in DECLARED}
    with pytest.raises(VerifierUntrusted, match="float16 inside float32"):
        controls.examine("interpreter", device, wide, seed=0)


def test_what_else_lies_in_memory_does_not_disturb_the_control_that_looks_there():
    """A weak proxy of what is gone raises when it is asked what it is."""
    gone = type("Gone", (), {})()
    proxy = weakref.proxy(gone)
    del gone
    with pytest.raises(ReferenceError):
        isinstance(proxy, torch.Tensor)
    x, gamma = torch.randn(3, 5), torch.ones(5)
    assert not candidates.peeking(x, gamma, 1e-6).any(), "no oracle is in memory"
    found = Oracle(torch.full((3, 5), 7.0), x, gamma, x)
    torch.testing.assert_close(candidates.peeking(x, gamma, 1e-6), found.y)
