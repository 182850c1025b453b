"""Each mistake does what its entry says: its exposing input shows it, its hiding input does not, algebra predicts it.

In CI a mistake runs against its exposing input only; the whole matrix is `rmsnorm exercise --all`.
"""

from pathlib import Path

import pytest
import torch

from rmsnorm_cli import config, environment, faults, gates
from rmsnorm_cli.exercise import matrix
from rmsnorm_cli.exercise.judge import judge
from rmsnorm_cli.faults import CATALOGUE, apply
from rmsnorm_cli.faults.fault import DECLARED, rows
from rmsnorm_cli.judging.numerics import identical
from rmsnorm_cli.kernels import implementation

DEVICE = environment.Device("auto", "cuda", "cuda:0", "GPU") if torch.cuda.is_available() else None
HERE = DEVICE or environment.Device("auto", "interpreter", "cpu", "CPU, Triton interpreter")
RUN_HERE = [f.on(HERE.execution) for f in CATALOGUE if not f.elsewhere(HERE.execution) and not f.crashes]
MISTAKES = [fault for fault in RUN_HERE if not fault.equivalent]
EQUIVALENT = [fault for fault in RUN_HERE if fault.equivalent]
GATES = {gate.NAME: gate for gate in gates.GATES}


def by_name(fault):
    return fault.name


@pytest.mark.parametrize("fault", MISTAKES, ids=by_name)
def test_a_mistake_is_caught_by_each_gate_that_is_expected_to(fault, tmp_path: Path):
    """A gate that is expected to catch it objects, to the exposing input first if that is one of its questions."""
    settings = config.load("exercise")
    for name in fault.expected:
        if name in GATES:
            impl = apply.implementation(fault, tmp_path, fault.kernel)
            objection, asked = matrix.first_objection(GATES[name], impl, fault, settings, HERE)
            assert objection is not None, f"{name} objects to none of {asked} questions"


@pytest.mark.parametrize("fault", [f for f in MISTAKES if f.predicted], ids=by_name)
def test_algebra_predicts_every_element_that_a_mistake_makes(fault, tmp_path: Path):
    """What the prediction names is that wrong value and visibly wrong; what it leaves out is right."""
    seen = judge(apply.implementation(fault, tmp_path), fault.exposing, HERE.torch_device)
    assert {name: found.detail for name, found in seen.agreement(fault).items() if not found.ok} == {}
    assert set(seen.wrong) == set(seen.predicted(fault))


@pytest.mark.parametrize("fault", [f for f in MISTAKES if f.hiding], ids=by_name)
def test_the_hiding_input_hides_a_mistake(fault, tmp_path: Path):
    """The declared tolerance accepts y, dx and dgamma of that input, on the first call."""
    seen = judge(apply.implementation(fault, tmp_path), fault.hiding, HERE.torch_device)
    assert seen.wrong == ()


@pytest.mark.parametrize("fault", [f for f in MISTAKES if DECLARED in f.expected], ids=by_name)
def test_the_right_kernel_passes_the_exposing_input(fault):
    """An input that rejects the right kernel too would show nothing."""
    layout = getattr(fault.exposing, "layout", "contiguous")
    if fault.kernel == "fused" or layout not in ("sliced_rows", "transposed_heads"):
        assert judge(implementation(fault.kernel), fault.exposing, HERE.torch_device).wrong == ()


@pytest.mark.parametrize("fault", EQUIVALENT, ids=by_name)
def test_an_equivalent_change_leaves_every_bit_as_it_was(fault, tmp_path: Path):
    changed, unchanged = apply.implementation(fault, tmp_path), implementation(fault.kernel)
    for question in (
        fault.exposing,
        rows(dtype="float16"),
        rows("zero_rows", M=1),
        rows("large", N=1),
        rows(M=65, N=33),
    ):
        got, want = (judge(impl, question, HERE.torch_device).got for impl in (changed, unchanged))
        for part in ("y", "dx", "dgamma"):
            assert identical(getattr(got, part), getattr(want, part)).ok, (question.id, part)


def test_a_mistake_in_the_wiring_keeps_the_counters(tmp_path: Path):
    """The gates count calls: a changed wrapper must count where `counters` looks, or it would be caught for nothing."""
    from rmsnorm_cli.kernels import counters

    impl = faults.implementation("kept-as-attribute", tmp_path)
    before = counters().get(impl.name, {"forward": 0, "backward": 0})
    judge(impl, rows(), HERE.torch_device)
    after = counters()[impl.name]
    assert (after["forward"] - before["forward"], after["backward"] - before["backward"]) == (1, 1)
