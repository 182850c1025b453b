"""What is asked less often runs nothing that is not run anyway, still is enough, and spares nothing that was named."""

from types import SimpleNamespace

import pytest
import torch

from rmsnorm_cli.commands import verify
from rmsnorm_cli.config.models import Operator, RunTable, Verify
from rmsnorm_cli.gates import declared, determinism, exact, fit, identities, memory, rounding, wiring
from rmsnorm_cli.inputs import cases, thinning
from rmsnorm_cli.kernels import implementation
from rmsnorm_cli.kernels.contract import INTERPRETED

BITS16 = ("float16", "bfloat16")


def settings(impl=("rowwise", "fused"), **table):
    return SimpleNamespace(operator=Operator(), run=RunTable(impl=impl), verify=Verify(**table))


def planned(gate, name, execution="interpreter", **table):
    return gate.plan(settings(**table), implementation(name), execution)


def whole(gate, monkeypatch):
    """Return what `fused` would be asked in the interpreter if nothing were spared."""
    with monkeypatch.context() as patch:
        patch.setattr(thinning, "spared", lambda case: False)
        return planned(gate, "fused")


def launches(asked):
    """Return the kernels of `fused` that cases run, with the size of an element, and whether rows fill their tiles."""
    from rmsnorm_cli.kernels.backplan import BackwardPlan
    from rmsnorm_cli.kernels.frontplan import ForwardPlan

    found = set()
    for case in asked:
        x = torch.empty(case.shape, dtype=getattr(torch, case.dtype))
        gamma = torch.empty(case.N, dtype=x.dtype)
        forward, backward = ForwardPlan(x, gamma), BackwardPlan(x, x, gamma, tuple(range(x.dim() - 1)), True, True)
        for plan, program in ((forward, forward.program), (backward, backward.main)):
            found.add((plan.path, x.element_size(), program.constants["FULL"]))
    return found


@pytest.mark.skipif(not INTERPRETED, reason="is about the launches of Triton's interpreter")
@pytest.mark.parametrize("gate", [declared, memory])
def test_what_the_interpreter_is_spared_runs_no_launch_that_is_not_run_anyway(gate, monkeypatch):
    asked, everything = planned(gate, "fused"), whole(gate, monkeypatch)
    assert len(everything) > len(asked)
    assert launches(asked) == launches(everything)


@pytest.mark.usefixtures("without_gpu")
def test_the_interpreter_is_asked_enough_of_both_kernels_in_every_scope():
    for name in ("rowwise", "fused"):
        asked = [case for case in planned(declared, name) if case.dtype in ("float32", "float16")]
        assert len([case for case in asked if case.gamma_dtype != "none"]) >= 2 * 72, name
    fused = planned(declared, "fused")
    for dtype in ("float32", "float16"):
        assert {case.N for case in fused if case.dtype == dtype} >= set(cases.WIDE_COLS)
    assert {case.layout for case in fused if case.dtype == "bfloat16"} == {case.layout for case in fused}
    grid = {(M, N) for M in cases.ROWS for N in cases.COLS}
    assert {case.shape for case in fused if case.dtype == "bfloat16"} >= grid
    assert {case.distribution for case in fused if case.dtype == "bfloat16"} == set(cases.DISTRIBUTIONS)


@pytest.mark.usefixtures("without_gpu")
def test_nothing_is_spared_that_runs_elsewhere_or_was_named():
    everywhere = planned(declared, "fused", "cpu")
    assert {(case.N, case.dtype) for case in everywhere} >= {(N, d) for N in cases.WIDE_COLS for d in BITS16}
    named = planned(declared, "fused", dtypes=("bfloat16",))
    assert {case.N for case in named} >= set(cases.WIDE_COLS)
    assert {case.N for case in planned(memory, "fused", dtypes=("bfloat16",))} >= {9001, 65537}
    (wide,) = planned(
        declared, "fused", rows=(2,), cols=(65537,), dtypes=("float16",), layouts=("contiguous",),
        distributions=("tiny",),
    )  # fmt: skip
    assert wide.N == 65537


@pytest.mark.usefixtures("without_gpu")
def test_fewer_runs_are_compared_only_where_programs_cannot_race():
    for name, execution, runs in (("fused", "interpreter", thinning.RUNS), ("torch", "cpu", 20)):
        assert {question.repeats for question in planned(determinism, name, execution)} == {runs}
    assert {question.repeats for question in planned(determinism, "fused", repeats=7)} == {7}


def compilations(asked):
    asked = [getattr(question, "case", question) for question in asked]
    return len({(case.shape, case.dtype, case.gamma_dtype, case.layout, case.eps) for case in asked})


def test_an_implementation_that_compiles_for_each_shape_is_asked_72_cases_of_few_shapes():
    asked = planned(declared, "compile", "cpu")
    assert sum(case.dtype in ("float32", "float16") for case in asked) >= 72
    assert compilations(asked) <= 40
    assert {case.N for case in asked} >= set(cases.COLS)
    assert {case.M for case in asked} >= set(cases.ROWS)
    assert {case.dtype for case in asked} == {"float32", "float16", "bfloat16"}
    for gate in (memory, exact, rounding, fit, identities, wiring, determinism):
        assert 1 <= compilations(planned(gate, "compile", "cpu")) <= thinning.COMPILED, gate.NAME
    assert compilations(planned(declared, "torch", "cpu")) > 200
    assert len(planned(declared, "compile", "cpu", rows=(3, 4), cols=(5, 6, 7))) >= 3 * 6, "what is named is asked"


def test_cases_of_one_compilation_follow_one_another():
    seen = []
    for case in thinning.bounded(planned(declared, "torch", "cpu"), 50):
        key = (case.shape, case.dtype, case.gamma_dtype, case.layout, case.eps)
        assert key not in seen[:-1]
        seen += [key] if key not in seen else []
    assert len(seen) == 50


def test_the_plan_that_is_told_says_what_is_spared():
    told = verify.plan(settings(impl=("fused", "compile")))
    assert any(thinning.IN_THE_INTERPRETER in line for line in told)
    assert any(thinning.OF_THE_COSTLY in line for line in told)
    assert not any(thinning.OF_THE_COSTLY in line for line in verify.plan(settings()))
    assert len(verify.plan(settings(dtypes=("float16",)))) == 2
