"""gradcheck passes right formulas and fails wrong ones, and says which program it tested."""

import itertools
import json

import pytest
import torch

from rmsnorm_cli import config
from rmsnorm_cli.commands import gradcheck
from rmsnorm_cli.console import Console
from rmsnorm_cli.environment import choose_device
from rmsnorm_cli.judging import derivatives
from rmsnorm_cli.kernels import implementation, reference
from rmsnorm_cli.results import count
from rmsnorm_cli.rundir.run import open_run

TABLE = config.load("gradcheck", file=None, environ={}, sets=[], options={}).gradcheck


def through(backward):
    """Return a differentiable RMSNorm whose forward is right and whose gradients come from `backward`."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gamma, eps):
            ctx.save_for_backward(x, gamma)
            ctx.eps = eps
            return reference.forward(x, gamma, eps)

        @staticmethod
        def backward(ctx, dy):
            x, gamma = ctx.saved_tensors
            return *backward(dy, x, gamma, ctx.eps), None

    return lambda x, gamma, eps: Function.apply(x, gamma, eps)


def parts(dy, x, gamma, eps):
    """Return rstd, x_hat, u and the mean of u · x_hat, from which the right and wrong gradients are made."""
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    u = dy * gamma
    return rstd, x * rstd, u, (u * x * rstd).mean(-1, keepdim=True)


def right(dy, x, gamma, eps):
    rstd, x_hat, u, c = parts(dy, x, gamma, eps)
    return rstd * (u - x_hat * c), (dy * x_hat).sum(0)


def eps_missing_in_backward(dy, x, gamma, eps):
    return right(dy, x, gamma, 0.0)


def divided_by_block(dy, x, gamma, eps):
    rstd, x_hat, u, c = parts(dy, x, gamma, eps)
    block = 1 << (x.shape[-1] - 1).bit_length()
    return rstd * (u - x_hat * c * x.shape[-1] / block), (dy * x_hat).sum(0)


def gamma_missing_in_the_mean(dy, x, gamma, eps):
    rstd, x_hat, u, _ = parts(dy, x, gamma, eps)
    return rstd * (u - x_hat * (dy * x_hat).mean(-1, keepdim=True)), (dy * x_hat).sum(0)


def dgamma_times_gamma(dy, x, gamma, eps):
    return right(dy, x, gamma, eps)[0], gamma * right(dy, x, gamma, eps)[1]


def mean_for_sum(dy, x, gamma, eps):
    return right(dy, x, gamma, eps)[0], right(dy, x, gamma, eps)[1] / x.shape[0]


def verdicts(call, rows=3, cols=7):
    """Return scope -> status of the finite-difference checks at the killing scale."""
    judge = gradcheck.Judge("planted", "cpu", "a planted formula")
    probe = derivatives.probe(rows, cols, *derivatives.KILLING, seed=0)
    return {result.scope: result.status for result in gradcheck.check_call(judge, call, probe, TABLE, 0)}


def test_the_right_formula_passes_first_and_second_derivatives():
    assert verdicts(through(right)) == {"dx": "passed", "dgamma": "passed", "properties": "passed"}


@pytest.mark.parametrize(
    ("backward", "scope"),
    [
        (eps_missing_in_backward, "dx"),
        (divided_by_block, "dx"),
        (gamma_missing_in_the_mean, "dx"),
        (dgamma_times_gamma, "dgamma"),
        (mean_for_sum, "dgamma"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_gradient_fails_in_its_own_scope(backward, scope):
    found = verdicts(through(backward))
    assert found[scope] == "failed"
    if scope == "dgamma":
        assert found["dx"] == "passed"


def test_a_second_derivative_that_treats_rstd_as_constant_fails():
    """The wrong Hessian of a backward that uses a saved rstd: first derivatives are right, second are not."""

    def constant_rstd(dy, x, gamma, eps):
        rstd = reference.statistics(x, eps).detach()
        u = dy * gamma
        return rstd * (u - x * rstd * (u * x * rstd).mean(-1, keepdim=True)), (dy * x * rstd).sum(0)

    assert verdicts(through(constant_rstd)) == {"dx": "passed", "dgamma": "passed", "properties": "failed"}


@pytest.mark.parametrize(("cols", "how"), [(33, "every element"), (257, "random directions")])
def test_wide_rows_are_probed_in_random_directions_and_still_fail_a_wrong_mean(cols, how):
    judge = gradcheck.Judge("planted", "cpu", "a planted formula")
    probe = derivatives.probe(2, cols, *derivatives.KILLING, seed=0)
    results = list(gradcheck.check_call(judge, through(divided_by_block), probe, TABLE, 0))
    assert how in results[0].detail
    assert results[0].status == "failed"


@pytest.mark.parametrize("wrong", [divided_by_block, dgamma_times_gamma])
def test_a_wrong_explicit_backward_of_the_reference_is_seen(wrong, monkeypatch):
    """The oracle itself is judged, by autograd and by complex steps."""
    monkeypatch.setattr(reference, "backward", wrong)
    judge = gradcheck.Judge("reference", "cpu", "the explicit backward formula")
    results = list(gradcheck.check_formulas(judge, derivatives.probe(3, 7, *derivatives.KILLING, seed=0), 0))
    assert count(results)["failed"] >= 3
    assert {"against autograd" in r.detail or "against complex steps" in r.detail for r in results} == {True}


def test_complex_steps_agree_with_the_formula_to_rounding():
    probe = derivatives.probe(2, 5, 1.0, 1e-6, seed=3)
    for got, want in zip(
        reference.backward(probe.dy, probe.x, probe.gamma, 1e-6), derivatives.complex_step(probe), strict=True
    ):
        assert derivatives.relative(got, want) < 1e-14


def test_an_error_that_is_not_a_number_fails():
    judge = gradcheck.Judge("planted", "cpu", "a planted formula")
    assert judge.ask("dx", "case", "NaN", lambda: float("nan")).status == "failed"


def test_rowwise_is_named_as_not_tested_here():
    impl = implementation("rowwise")
    (result,) = gradcheck.check_implementation(impl, derivatives.probe(2, 3, 1.0, 1e-6, 0), "interpreter", TABLE, 0)
    assert result.status == "skipped"
    assert "was not tested" in result.detail


def test_the_command_writes_partitions_whose_hashes_it_reports(tmp_path, capsys):
    options = {"run.dir": str(tmp_path), "gradcheck.rows": [2], "gradcheck.cols": [3], "run.device": "auto"}
    settings = config.load("gradcheck", file=None, environ={}, sets=[], options=options)
    device = choose_device("auto")
    with open_run(settings, ["rmsnorm"], device, {}) as run:
        outcome = gradcheck.run(settings, run, Console(quiet=True), device)
        run.finish(outcome)
    assert outcome.status == "passed", capsys.readouterr()
    assert set(outcome.summary["partitions"]) == {"train", "validation", "test"}
    assert len({*outcome.summary["partitions"].values()}) == 3
    assert {path.name for path in (run.dir / "partitions").iterdir()} == {"train.pt", "validation.pt", "test.pt"}
    records = (run.dir / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["impl"] for line in records} == {"reference", "rowwise", "fused"}


STRANGERS = """
import os
import torch

def right(x, gamma, eps):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma, eps)

def aborts(x, gamma, eps):
    os.abort()

def wide(x, gamma, eps):
    if x.shape[-1] < 3:
        raise ValueError("three columns and more")
    return right(x, gamma, eps)

def wrong(x, gamma, eps):
    return right(x, gamma, eps + 1e-4) + x - x.detach()
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """Return what gradcheck says of one of STRANGERS, beside what it says of the reference."""
    (tmp_path / "strangers.py").write_text(STRANGERS)
    monkeypatch.chdir(tmp_path)

    def judged(name, cols=(3,)):
        options = {"run.dir": str(tmp_path), "run.impl": [f"strangers.py:{name}"], "gradcheck.rows": [2]}
        settings = config.load("gradcheck", options=options | {"gradcheck.cols": list(cols)})
        device = choose_device("auto")
        with open_run(settings, ["rmsnorm"], device, {}) as run:
            outcome = gradcheck.run(settings, run, Console(quiet=True), device)
            run.finish(outcome)
        assert [r for r in outcome.results if r.impl == "reference" and r.status != "passed"] == []
        return outcome, [r for r in outcome.results if r.impl != "reference"]

    return judged


@pytest.mark.case("B68")
def test_a_stranger_that_aborts_is_a_row_and_not_the_end(stranger):
    """Its process dies at each question; after three of them it is asked no more, and all else is judged."""
    outcome, rows = stranger("aborts", cols=(3, 7))
    assert (outcome.status, outcome.exit_code) == ("error", 1)
    assert [row.status for row in rows if row.status != "skipped"] == ["error"] * (gradcheck.PATIENCE + 1)
    assert "was killed by SIGABRT" in rows[0].detail
    assert "the rest was not asked" in rows[-1].detail
    (table,) = [table for table in outcome.tables if table.title == "what did not pass"]
    assert {row[2] for row in table.rows} == {"error"}


def test_a_stranger_is_judged_by_its_first_derivatives_and_may_decline(stranger):
    """The graph of another process is not here, so that second derivatives are not asked; an exception declines."""
    outcome, rows = stranger("wide", cols=(2, 7))
    assert outcome.status == "passed"
    assert [row.status for row in rows] == ["refused", "refused", "skipped"] * 2 + ["passed", "passed", "skipped"] * 2
    assert "three columns and more" in rows[0].detail


def test_a_wrong_gradient_of_a_stranger_fails(stranger):
    outcome, rows = stranger("wrong")
    assert outcome.status == "failed"
    assert {row.scope for row in rows if row.status == "failed"} == {"dx"}


def test_the_seed_decides_the_directions_of_second_derivatives(monkeypatch):
    """What was drawn before does not matter, another seed does, and the global generator stays where it was."""
    probe = derivatives.probe(2, 3, *derivatives.KILLING, seed=0)
    judge = gradcheck.Judge("reference", "interpreter", "the reference")
    drawn = []
    monkeypatch.setattr(torch.autograd, "gradgradcheck", lambda *_, **__: drawn.append(torch.randn(3)))
    for seed, before in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(before)
        state = torch.get_rng_state()
        list(gradcheck.check_call(judge, reference.forward, probe, TABLE, seed))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("M", "N", "seed"), [(2, 3, 1073), (2, 3, 1342), (2, 3, 1780), (3, 7, 0), (3, 7, 11), (3, 33, 0)]
)
def test_no_direction_fails_the_reference(M, N, seed):
    """With x as it is, of rms 1e-2, a step of 1e-6 or of 1e-7 failed these; in units of its rms none of 2500 did."""
    probe = derivatives.probe(M, N, *derivatives.KILLING, seed=0)
    judge = gradcheck.Judge("reference", "cuda", "the reference")  # every element, up to wide rows
    results = list(gradcheck.check_call(judge, reference.forward, probe, TABLE, seed))
    assert [result for result in results if result.status != "passed"] == []


def test_no_seed_fails_the_formula():
    """One column: what the second derivative by gamma is, is what is left of terms a million times as large."""
    judge = gradcheck.Judge("reference", "interpreter", "the formula")
    for seed in range(100):
        for M, scale in itertools.product((1, 3), (derivatives.KILLING, (1.0, 1e-6))):
            results = list(gradcheck.check_formulas(judge, derivatives.probe(M, 1, *scale, seed=seed), seed))
            assert [result for result in results if result.status != "passed"] == []


def test_a_kernel_in_the_interpreter_is_probed_element_by_element_in_narrow_rows_alone():
    judge = gradcheck.Judge("planted", "interpreter", "a planted formula")
    for cols, how in ((7, "every element"), (8, "random directions")):
        probe = derivatives.probe(2, cols, *derivatives.KILLING, seed=0)
        results = list(gradcheck.check_call(judge, through(divided_by_block), probe, TABLE, 0))
        assert how in results[0].detail
        assert results[0].status == ("failed" if cols != 8 else "passed"), "8 is its own block"


@pytest.mark.gpu
def test_the_reference_passes_in_float64_on_the_gpu():
    judge = gradcheck.Judge("reference", "cuda", "the reference on the GPU")
    probe = derivatives.probe(3, 7, *derivatives.KILLING, seed=0, device="cuda")
    assert not count(list(gradcheck.check_call(judge, reference.forward, probe, TABLE, 0)))["failed"]
