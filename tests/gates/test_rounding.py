"""Claims about the rounding budget: right kernels stay inside it over many seeds, and each measure sees its mistake."""

from dataclasses import replace

import pytest
import torch

from rmsnorm_cli import faults
from rmsnorm_cli.faults.fault import BUDGET
from rmsnorm_cli.gates import candidates, rounding
from rmsnorm_cli.gates.candidates import RIGHT
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging import budget
from rmsnorm_cli.judging.budget import U32

HALF = 2.0**-11
DTYPES = ("float32", "float16", "bfloat16")
GOOD = {
    "eager": (candidates.eager, "fp32"),
    "native": (candidates.native, "fp32"),
    "sums by halves": (candidates.TREE.norm(), "fp32"),
    "llama": (candidates.llama, "llama"),
    "gemma": (candidates.gemma, "gemma"),
}


def asked(dtype, seed=0, of=rounding.QUESTIONS):
    return [cases.case(shape, dtype, name, 1e-6, seed) for shape, name in of]


@pytest.fixture
def failing(ask, impl):
    """Return the failed verdicts of a norm on the gate's questions, by scope."""

    def of(norm, dtype, **more):
        verdicts = [verdict for case in asked(dtype) for verdict in ask(rounding, impl(norm, **more), case)]
        assert {verdict.status for verdict in verdicts} <= {"passed", "failed"}
        return {verdict.scope: verdict for verdict in reversed(verdicts) if verdict.status == "failed"}

    return of


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_ones_pass_with_room_to_spare(ask, impl, name, dtype):
    norm, convention = GOOD[name]
    verdicts = [
        verdict
        for seed in range(5)
        for case in asked(dtype, seed)
        for verdict in ask(rounding, impl(norm, rounding=convention), case)
    ]
    assert {verdict.status for verdict in verdicts} == {"passed"}
    # A correctly rounded y of 16 bits has errors up to half an ULP: there the limit is near by its nature.
    assert max(verdict.worst for verdict in verdicts if dtype == "float32" or verdict.scope != "forward") < 0.8


def test_the_teaching_kernel_passes(ask, rowwise):
    for dtype in ("float32", "float16"):
        for case in asked(dtype, of=(((7, 258), "spread"), ((7, 258), "parallel"))):
            assert {verdict.status for verdict in ask(rounding, rowwise, case, "interpreter")} == {"passed"}


def test_float64_is_held_to_its_own_roundoff(failing):
    right, off = GOOD["native"][0], 1 + 2.0**-45
    assert failing(right, "float64") == {}
    assert set(failing(lambda x, gamma, eps: right(x, gamma, eps) * off, "float64")) == {"forward", "dx", "dgamma"}


def _times(scope, factor):
    """Return a norm of which one result is multiplied by a factor, inside, before it is stored."""
    parts = {
        "forward": {"y": lambda x, r, gamma: x * r * gamma * factor},
        "dx": {"dx": lambda x, r, u: factor * RIGHT.dx(x, r, u)},
        "dgamma": {"dgamma": lambda x, r, dy: factor * RIGHT.dgamma(x, r, dy)},
    }
    return replace(RIGHT, **parts[scope])


MISTAKES = {
    # name: parts, dtype, the scope that fails, the measures that see it
    "y cut": (candidates.CUT, "float16", "forward", ("ULP", "mis-rounded", "gain of a row", "mean gain")),
    "rstd in 16 bits": (
        replace(RIGHT, rstd=lambda x, eps: RIGHT.rstd(x, eps).half().float()), "float16", "forward",
        ("ULP", "mis-rounded", "gain of a row"),
    ),
    "x-hat rounded": (
        replace(RIGHT, y=lambda x, r, gamma: (x * r).half().float() * gamma), "float16", "forward",
        ("ULP", "mis-rounded"),
    ),
    "eps left out of unit rows": (
        replace(RIGHT, rstd=lambda x, eps: RIGHT.rstd(x, torch.where(x.abs().amax(-1, True) > 1, 0.0, eps))),
        "float32", "forward", ("mean gain", "RMS error of y"),
    ),
    "y a little large": (_times("forward", 1 + 2**-13), "float16", "forward", ("ULP", "mis-rounded", "mean gain")),
    "rstd kept in 16 bits": (
        replace(RIGHT, dx=lambda x, r, u: RIGHT.dx(x, r.half().float(), u)), "float16", "dx",
        ("the error of dx in roundings", "the largest error of dx against eager's"),
    ),
    "u in 16 bits": (
        replace(RIGHT, dx=lambda x, r, u: RIGHT.dx(x, r, u.half().float())), "float16", "dx",
        ("the error of dx in roundings", "RMS error of dx against eager's"),
    ),
    "the sum of dx in few bits": (
        replace(RIGHT, dx=lambda x, r, u: r * (u - x * r * (u * x * r).mean(-1, True) * (1 + 2**-19))),
        "float32", "dx", ("roundings of its terms is", "RMS error of dx"),
    ),
    "partials in 16 bits": (candidates.PARTIALS_IN_HALF, "float16", "dgamma", ("the error of dgamma in roundings",)),
    "dgamma a little large": (_times("dgamma", 1 + 2**-18), "float32", "dgamma", ("the error of dgamma",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_seen_by_its_measures(failing, name):
    parts, dtype, scope, measures = MISTAKES[name]
    found = failing(parts.norm(), dtype)
    assert scope in found
    assert not [measure for measure in measures if measure not in found[scope].detail], found[scope].detail
    assert found[scope].worst > 1
    assert found[scope].hint


def test_a_mistake_beyond_any_rounding_is_said_to_be_one(failing):
    assert "the formula" in failing(candidates.NO_SECOND_TERM.norm(), "float32")["dx"].hint
    assert "too few bits" in failing(candidates.PARTIALS_IN_HALF.norm(), "float16")["dgamma"].hint


def test_nan_and_a_wrong_dtype_fail(failing):
    assert "want" in failing(candidates.ONE_NAN.norm(), "float32")["forward"].detail
    assert "dtype" in failing(candidates.wrong_dtype, "float32")["forward"].detail
    assert "no gradient" in failing(candidates.cut_off, "float32")["dx"].detail


def test_what_was_measured_is_recorded(ask, impl):
    forward, dx, dgamma = ask(rounding, impl(RIGHT.norm()), asked("float16")[0])
    assert set(forward.extra["measured"]) == {
        "the largest error of y in ULP", "the share of y that is mis-rounded", "the gain of a row of y",
        "the mean gain of y's rows", "the largest error of y against eager's", "the RMS error of y against eager's",
    }  # fmt: skip
    assert len(dx.extra["measured"]) == 3
    assert list(dgamma.extra["measured"]) == ["the error of dgamma in roundings of its terms"]


def test_the_limits_are_the_frozen_ones():
    want = torch.linspace(-2, 2, 400, dtype=torch.float64).reshape(4, 100)
    ulp, share, row, mean = budget.of_y(want.half(), want)
    assert ulp.limit == 0.5 + 16 * U32 / HALF
    assert share.limit == 0.01
    assert row.limit == 8 * HALF / 10 + 16 * U32
    assert mean.limit == 6 * HALF / 20 + 4 * U32
    assert budget.of_y(want.float(), want)[0].limit == 16.5
    bound = budget.Bound(HALF * want.abs() + 2.0**-25, U32 * want.abs(), 16.0)
    limits = {
        (name, dtype): [each.limit for each in budget.against_eager(name, want.to(dtype), want, want, bound)]
        for name in ("y", "dx")
        for dtype in (torch.float32, torch.float16)
    }
    assert limits.pop(("dx", torch.float32)) == [3.0, 1.5]
    assert set(map(tuple, limits.values())) == {(2.0, 1.5)}


def test_a_row_that_is_too_small_is_as_far_off_as_one_that_is_too_large():
    want = torch.randn(4, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for sign in (-1, 1):
        got = want.clone()
        got[2] *= 1 + sign * 2**-9
        row = next(each for each in budget.of_y(got.half(), want) if "gain of a row" in each.what)
        assert row.share > 1
        assert row.value * sign > 0


def test_an_x_hat_near_a_tie_may_go_either_way(ask, impl):
    """One of these 20480 x̂ is rounded in float32 to the other side than in float64, and dgamma shows it."""
    case = cases.case((5, 4096), "float16", "spread", 1e-6, 59)
    verdicts = ask(rounding, impl(candidates.llama, rounding="llama"), case)
    assert {verdict.status for verdict in verdicts} == {"passed"}


def test_two_tiny_errors_are_no_ratio():
    """An eager result that happens to be exact does not make two roundings a failure; sixteen are one."""
    want = torch.ones(1, 128, dtype=torch.float64) * 1.5
    bound = budget.Bound(U32 * want, U32 * want, 16.0)
    near, far = (want * (1 + steps * 2.0**-23) for steps in (1, 8))
    assert all(each.share <= 1 for each in budget.against_eager("y", near.float(), want, want, bound))
    assert not any(each.share <= 1 for each in budget.against_eager("y", far.float(), want, want, bound))
    assert all(each.value == 0 for each in budget.against_eager("y", want.float(), want, want, bound))


def test_nan_is_over_every_limit():
    assert not budget.Measure("x", float("nan"), 1.0).share <= 1


def test_bfloat16_is_skipped_in_the_interpreter_alone(rowwise, impl, device):
    question = asked("bfloat16")[0]
    inside = rounding.check(rowwise, question, "interpreter", device, {})
    assert {(verdict.status, "truncates" in verdict.detail) for verdict in inside} == {("skipped", True)}
    outside = rounding.check(impl(candidates.native), question, "cpu", device, {})
    assert {verdict.status for verdict in outside} == {"passed"}


def test_a_foreign_process_may_run_the_interpreter(impl, device):
    """Its bfloat16 is not judged where y is cut; other mistakes in bfloat16, and everyone else's cuts, are."""

    def cut(x, gamma, eps):
        y = candidates.eager(x.float(), gamma.float(), eps)
        stored = (y.detach().view(torch.int32) & -65536).view(torch.float32)
        return (y + (stored - y.detach())).to(x.dtype)

    def of(norm, **more):
        found = rounding.check(impl(norm, **more), asked("bfloat16")[0], "cpu", device, {})
        return found[0].status

    assert of(cut, isolated=True) == "skipped"
    assert of(cut) == "failed"
    twice = replace(RIGHT, y=lambda x, r, gamma: (x * r).bfloat16().float() * gamma)
    assert of(twice.norm(), isolated=True) == "failed"
    assert of(candidates.native, isolated=True) == "passed"


@pytest.mark.usefixtures("without_gpu")
def test_the_plan_is_small_and_holds_the_inputs_that_expose_rounding_mistakes(settings, rowwise):
    planned = rounding.plan(settings(), rowwise, "interpreter")
    assert {case.dtype for case in planned} == {"float32", "float16"}
    assert sum(case.M for case in planned) <= 300
    assert len(rounding.plan(settings(), rowwise, "cuda")) > len(planned)
    exposing = [
        fault.exposing for fault in faults.CATALOGUE if fault.expected == (BUDGET,) and fault.file == "rowwise.py"
    ]
    assert exposing
    assert not [case.id for case in exposing if case not in planned]


def test_a_budget_without_gamma_has_none_for_dgamma():
    x = torch.randn(3, 8)
    inputs = Inputs(x, None, torch.randn(3, 8))
    assert budget.budget(inputs, cases.oracle(inputs, 1e-6)).dgamma is None
