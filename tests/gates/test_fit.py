"""Claims about the fit: it reads what was really used, and says in words what should not have been."""

from dataclasses import replace

import pytest
import torch

from rmsnorm_cli.gates import candidates, fit, readings
from rmsnorm_cli.gates.candidates import RIGHT
from rmsnorm_cli.gates.hypotheses import Terms
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.kernels.foreign import opened

DTYPES = ("float32", "float16", "bfloat16")
GOOD = {
    "eager": (candidates.eager, "fp32"),
    "native": (candidates.native, "fp32"),
    "sums by halves": (candidates.TREE.norm(), "fp32"),
    "llama": (candidates.llama, "llama"),
    "gemma": (candidates.gemma, "gemma"),
}


def graded(dtype="float32", shape=(8, 257), **more):
    return cases.case(shape, dtype, "graded", more.pop("eps", 1e-6), more.pop("seed", 0))


@pytest.fixture
def said(ask, impl):
    """Return what the fit says of a norm on one question, by scope; "" where it passes."""

    def of(norm, question=None, **more):
        verdicts = ask(fit, impl(norm, **more), question or graded())
        assert {verdict.status for verdict in verdicts} <= {"passed", "failed"}
        return {verdict.scope: verdict.detail if verdict.status == "failed" else "" for verdict in verdicts}

    return of


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_ones_pass_with_room_to_spare(ask, impl, name, dtype):
    norm, convention = GOOD[name]
    for seed in range(5):
        for shape in fit.SHAPES:
            found = ask(fit, impl(norm, rounding=convention), graded(dtype, shape, seed=seed))
            assert [verdict.status for verdict in found] == ["passed"] * 3, [verdict.detail for verdict in found]
            assert max(verdict.worst for verdict in found) < 0.8
            assert found[0].detail.endswith(f", {convention}")


@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-5, 1e-3, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_ones_pass_at_any_eps(said, dtype, eps):
    assert not any(said(candidates.TREE.norm(), graded(dtype, eps=eps)).values())


def test_the_teaching_kernel_passes_and_is_read(ask, rowwise):
    for dtype in ("float32", "float16"):
        found = ask(fit, rowwise, graded(dtype), "interpreter")
        assert {verdict.status for verdict in found} == {"passed"}
        assert found[0].extra["read"].startswith("divides by 257")
        assert [verdict.extra["read"] for verdict in found] == [verdict.detail for verdict in found]


@pytest.mark.parametrize(
    ("dtype", "shrink", "eps"), [("float32", 1e-7, 4e-7), ("float16", 3e-5, 1e-4), ("bfloat16", 3e-4, 1e-3)]
)
def test_divisor_and_eps_are_read_sharply(dtype, shrink, eps):
    for seed in range(5):
        given = cases.tensors(graded(dtype, (24, 1000), seed=seed))
        t = Terms(given.x.double(), given.gamma.double(), given.dy.double(), 1e-6)
        y = candidates.eager(given.x, given.gamma, 1e-6).double()
        found = readings.of_y(y, t, readings.slack(given.x.dtype, "fp32", 1000)).root
        assert abs(found.shrink.got - 1) < shrink
        assert abs(found.eps.got - 1) < eps
        assert found.shrink.slack < 10 * shrink, "and the limit is not far from what is reached"


def test_float64_is_held_to_its_own_roundoff(said):
    for seed in range(5):
        for shape in fit.SHAPES:
            assert not any(said(candidates.native, graded("float64", shape, seed=seed)).values())
    text = said(lambda x, gamma, eps: candidates.native(x, gamma, eps * (1 + 1e-9)), graded("float64"))["forward"]
    assert text == "eps is 1.000000001e-06 instead of 1e-06"


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_term_is_small_on_its_rows(dtype):
    """Rows run from below √eps to far above it, and mean(u·x̂) is what it is for u = x̂, but for a little noise."""
    given = cases.tensors(graded(dtype, (24, 1000)))
    t = Terms(given.x.double(), given.gamma.double(), given.dy.double() * 24**0.5, 1e-6)
    assert t.m.min() < 0.2 * t.eps
    assert t.m.max() > 100
    torch.testing.assert_close(t.c, t.m / (t.m + t.eps), atol=0.06, rtol=0)


def _rstd(change):
    return replace(RIGHT, rstd=change)


def _dx(first, second):
    """Return a dx = first · u − second · x · mean(u·x), from rstd."""
    return replace(RIGHT, dx=lambda x, r, u: first(r) * u - second(r) * x * (u * x).mean(-1, True))


def _mean_square(x):
    return x.square().mean(-1, True)


SENTENCES = {
    # what the norm is made of, the scope, what is said
    "padded": (candidates.PADDED, "forward", "the mean square is divided by 512 instead of 257"),
    "unbiased": (
        _rstd(lambda x, eps: (x.square().sum(-1, True) / (x.shape[-1] - 1) + eps).rsqrt()), "forward",
        "the mean square is divided by 256 instead of 257",
    ),
    "sum": (
        _rstd(lambda x, eps: (x.square().sum(-1, True) + eps).rsqrt()), "forward",
        "the mean square is divided by 1, that is not at all, instead of 257",
    ),
    "half": (
        _rstd(lambda x, eps: (x.square().mean(-1, True) * 2.5 + eps).rsqrt()), "forward",
        "the mean square is divided by 102.8 instead of 257",
    ),
    "no eps": (_rstd(lambda x, eps: _mean_square(x).rsqrt()), "forward", "eps is left out"),
    "eps ten times": (
        _rstd(lambda x, eps: (_mean_square(x) + 1e-5).rsqrt()), "forward", "eps is 1e-05 instead of 1e-06"
    ),
    "eps in half": (
        _rstd(lambda x, eps: RIGHT.rstd(x, float(torch.tensor(eps).half()))), "forward",
        "eps is 1.01328e-06 instead of 1e-06, which is eps in float16",
    ),
    "eps in the sum": (
        _rstd(lambda x, eps: ((x.square().sum(-1, True) + eps) / x.shape[-1]).rsqrt()), "forward",
        "eps is 3.891e-09 instead of 1e-06: it is added to the sum, not to the mean",
    ),
    "eps outside": (
        _rstd(lambda x, eps: 1 / (_mean_square(x).sqrt() + eps)), "forward",
        "no divisor and no eps explain the rstd of the rows",
    ),
    "rstd in bfloat16": (
        _rstd(lambda x, eps: RIGHT.rstd(x, eps).bfloat16().float()), "forward", "rstd is rounded to bfloat16"
    ),
    "a factor": (
        replace(RIGHT, y=lambda x, r, gamma: x * r * gamma * (1 + 2**-16)), "forward",
        "rstd is 1.00002 times that of divisor and eps, in every row",
    ),
    "no normalisation": (
        candidates.NO_NORM, "forward", "nothing is normalised: rstd does not depend on the mean square of the row"
    ),
    "gamma ignored": (replace(RIGHT, y=lambda x, r, gamma: x * r), "forward", "gamma is not applied"),
    "gamma + ¼": (
        replace(RIGHT, y=lambda x, r, gamma: x * r * (gamma + 0.25)), "forward", "gamma is applied as gamma + 0.25"
    ),
    "a mean subtracted": (
        replace(RIGHT, y=lambda x, r, gamma: (x - x.mean(-1, True)) * r * gamma), "forward",
        "y is no multiple of gamma·x in each row",
    ),
    "zeros": (candidates.ZEROS, "forward", "y has rows of zeros"),
    "no second term": (
        candidates.NO_SECOND_TERM, "dx", "the second term, x·rstd³·mean(u·x), is missing"
    ),
    "second term added": (
        _dx(lambda r: r, lambda r: -(r**3)), "dx", "the second term, x·rstd³·mean(u·x), has the wrong sign"
    ),
    "second term by B": (
        _dx(lambda r: r, lambda r: r**3 * 257 / 512), "dx", "mean(u·x) is divided by 512 instead of 257"
    ),
    "second term not divided": (
        _dx(lambda r: r, lambda r: r**3 * 257), "dx",
        "mean(u·x) is divided by 1, that is not at all, instead of 257",
    ),
    "a power lost": (
        _dx(lambda r: r, lambda r: r**2), "dx",
        "the second term, x·rstd³·mean(u·x), carries rstd to the power 2 instead of 3",
    ),
    "outer rstd lost": (
        _dx(lambda r: r**0, lambda r: r**2), "dx",
        "the first term, rstd·u, carries rstd to the power 0 instead of 1; "
        "the second term, x·rstd³·mean(u·x), carries rstd to the power 2 instead of 3",
    ),
    "first term halved": (
        _dx(lambda r: r / 2, lambda r: r**3), "dx", "the first term, rstd·u, is 0.5 times what it should be"
    ),
    "its own rstd without eps": (
        replace(RIGHT, dx=lambda x, r, u: RIGHT.dx(x, _mean_square(x).rsqrt(), u)), "dx",
        "in the backward, eps is left out",
    ),
    "its own rstd by B": (
        replace(RIGHT, dx=lambda x, r, u: RIGHT.dx(x, candidates.PADDED.rstd(x, 1e-6), u)), "dx",
        "in the backward, the mean square is divided by 512 instead of 257",
    ),
    "rstd kept in half": (
        replace(RIGHT, dx=lambda x, r, u: RIGHT.dx(x, r.half().float(), u)), "dx",
        "in the backward, rstd is rounded to float16",
    ),
    "gamma missing": (
        replace(RIGHT, dx=lambda x, r, u: r * (u.roll(1, -1) - x * r * (u * x * r).mean(-1, True))), "dx",
        "dx is no sum of multiples of u and x in each row",
    ),
    "mean over rows": (candidates.MEAN_OVER_ROWS, "dgamma", "dgamma is the mean over rows, not the sum"),
    "twice": (
        replace(RIGHT, dgamma=lambda x, r, dy: 2 * RIGHT.dgamma(x, r, dy)), "dgamma",
        "dgamma is 2 times the sum over rows of dy·x̂",
    ),
    "a row left out": (
        replace(RIGHT, dgamma=lambda x, r, dy: (dy * x * r)[:-1].sum(0)), "dgamma",
        "dgamma is no multiple of the sum over rows of dy·x̂",
    ),
    "nothing": (replace(RIGHT, dgamma=lambda x, r, dy: 0 * RIGHT.dgamma(x, r, dy)), "dgamma", "dgamma is zero"),
}  # fmt: skip


@pytest.mark.parametrize("name", SENTENCES)
def test_what_was_used_is_said_in_words(said, name):
    parts, scope, sentence = SENTENCES[name]
    found = said(parts.norm())
    assert found[scope] == sentence
    if scope != "forward":
        assert {other for other, text in found.items() if text} == {scope}


def test_what_follows_from_the_forward_is_not_blamed_on_the_backward(said):
    """The padded block in the forward, saved for the backward; then another mistake of the backward on top."""
    found = said(candidates.PADDED.norm())
    assert found["dx"] == "dx is right for the rstd that y was made with"
    assert found["dgamma"] == "dgamma is right for the rstd that y was made with"
    both = replace(candidates.PADDED, dx=candidates.NO_SECOND_TERM.dx, dgamma=candidates.MEAN_OVER_ROWS.dgamma)
    found = said(both.norm())
    assert found["dx"].startswith("with the rstd that y was made with, the second term")
    assert found["dgamma"] == "with the rstd that y was made with, dgamma is the mean over rows, not the sum"


def test_the_known_mistake_is_the_hint(ask, impl):
    outside = _rstd(lambda x, eps: 1 / (_mean_square(x).sqrt() + eps))
    assert ask(fit, impl(outside.norm()), graded())[0].hint == "eps is added outside the root"
    twice = replace(RIGHT, y=lambda x, r, gamma: x * r * gamma**2)
    assert ask(fit, impl(twice.norm()), graded())[0].hint == "gamma is applied twice"
    near = ask(fit, impl(candidates.llama), graded("float16"))[0]
    assert near.status == "failed"
    assert near.hint == "", "half a unit off fits any small mistake, so none is named"


CONVENTIONS = {"fp32": candidates.eager, "llama": candidates.llama, "gemma": candidates.gemma}
DOES = {"fp32": "rounds once", "llama": "rounds where Llama's norm does", "gemma": "multiplies by 1 + gamma"}


@pytest.mark.parametrize("declared", CONVENTIONS)
@pytest.mark.parametrize("followed", CONVENTIONS)
def test_a_contradiction_to_the_declared_rounding_is_said(said, declared, followed):
    text = said(CONVENTIONS[followed], graded("float16"), name="mine.py:norm", rounding=declared)["forward"]
    if declared == followed:
        assert text == ""
    else:
        assert f"declared {declared}, but " in text
        assert DOES[followed] in text
        assert text.endswith(f": pass --rounding {followed}")


def test_float32_tells_1_plus_gamma_but_not_the_order(said):
    assert said(candidates.llama)["forward"] == ""
    assert "pass --rounding gemma" in said(candidates.gemma, name="mine:norm")["forward"]
    text = said(candidates.llama, name="mine:norm", rounding="gemma")["forward"]
    assert text == "declared gemma, but multiplies by gamma, not by 1 + gamma: pass --rounding fp32 or llama"


def test_who_cannot_choose_is_not_told_to(said):
    assert "--rounding" not in said(candidates.llama, graded("float16"), name="rowwise")["forward"]


ROUNDED = {
    "rstd is rounded to float16": (replace(RIGHT, rstd=lambda x, eps: RIGHT.rstd(x, eps).half().float()), "fp32"),
    "y is cut to float16": (candidates.CUT, "fp32"),
    "1 + gamma is rounded to float16": (
        replace(RIGHT, y=lambda x, r, gamma: x * r * (1 + gamma).half().float()), "gemma"
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", ROUNDED)
def test_what_is_rounded_on_the_way_is_named(said, sentence):
    parts, convention = ROUNDED[sentence]
    assert sentence in said(parts.norm(), graded("float16"), rounding=convention)["forward"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_few_bits_are_enough_to_tell_n_from_n_minus_one(said, dtype):
    unbiased = SENTENCES["unbiased"][0].norm()
    text = said(unbiased, graded(dtype, (24, 4096)))["forward"]
    assert "divided by 409" in text
    assert "instead of 4096" in text


def test_nan_a_wrong_dtype_and_a_missing_gradient_fail(said):
    assert "want" in said(candidates.ONE_NAN.norm())["forward"]
    assert "dtype" in said(candidates.wrong_dtype)["forward"]
    assert "no gradient" in said(candidates.cut_off)["dx"]


def test_bfloat16_is_skipped_in_the_interpreter_alone(rowwise, impl, device):
    inside = fit.check(rowwise, graded("bfloat16"), "interpreter", device, {})
    assert {(verdict.status, "truncates" in verdict.detail) for verdict in inside} == {("skipped", True)}
    outside = fit.check(impl(candidates.native), graded("bfloat16"), "cpu", device, {})
    assert {verdict.status for verdict in outside} == {"passed"}


@pytest.mark.usefixtures("without_gpu")
def test_the_plan_is_small_and_within_the_contract(settings, rowwise):
    planned = fit.plan(settings(), rowwise, "interpreter")
    assert {case.dtype for case in planned} == {"float32", "float16"}
    assert sum(case.M for case in planned) <= 100
    assert len(fit.plan(settings(), rowwise, "cuda")) > len(planned)


def test_a_file_in_a_process_of_its_own_is_read_too(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def norm(x, gamma, eps):\n"
        "    wide = x.float()\n"
        "    return (wide * (wide.square().mean(-1, keepdim=True) + 2 * eps).rsqrt()).to(x.dtype) * gamma\n"
    )
    with opened("mine.py:norm", "cpu") as mine:
        text = ask(fit, mine, graded("float16"))[0].detail
    assert text.startswith("eps is 2.000")
    assert text.endswith("instead of 1e-06")
