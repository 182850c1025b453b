"""Claims: the pattern of failures over a whole plan points to the right mistake."""

from dataclasses import replace

import pytest
import torch

from rmsnorm_cli.gates import candidates, declared, fit
from rmsnorm_cli.gates.candidates import RIGHT
from rmsnorm_cli.gates.diagnose import WHERE, diagnose
from rmsnorm_cli.inputs import cases

DTYPES = ("float32", "float16")
PLAN = cases.unique(
    [
        *cases.grid((1, 3, 17), (1, 2, 3, 33, 64, 257, 256), DTYPES, tuple(cases.DISTRIBUTIONS), 1e-6, 0),
        *cases.by_layout(DTYPES, ("expanded_dy", "transposed_dy", "misaligned"), 1e-6, 0),
    ]
)
PLAN = [case for case in PLAN if len(case.shape) == 2]


@pytest.fixture
def said(ask, impl):
    def of(norm):
        return diagnose([verdict for case in PLAN for verdict in ask(declared, impl(norm), case)])

    return of


def test_nothing_is_said_of_a_right_implementation(said):
    assert said(RIGHT.norm()) == ""


def test_the_padded_block_is_named_and_its_widths(said):
    text = said(candidates.PADDED.norm())
    assert "only widths that are no power of two" in text
    assert "divided by the padded block B" in text
    assert text.startswith("forward:")


def test_dx_alone_points_to_its_second_term(said):
    text = said(candidates.NO_SECOND_TERM.norm())
    assert text.startswith("dx:")
    assert "\n" not in text
    assert "the second term, x·rstd³·mean(u·x), is missing" in text
    assert "forward and dgamma are right" in text


def test_dgamma_alone_points_to_the_reduction(said):
    text = said(candidates.MEAN_OVER_ROWS.norm())
    assert text.startswith("dgamma:")
    assert "mean over rows" in text
    assert "only more than one row" in text
    assert "a sum against a mean" in text


def test_eps_left_out_points_to_small_rows(said):
    text = said(replace(RIGHT, rstd=lambda x, eps: x.square().mean(-1, True).rsqrt()).norm())
    assert "eps" in text
    assert "only rows of tiny, zero or mixed rms" in text


def test_what_was_really_used_is_told_beside_the_pattern(ask, impl):
    questions = [(declared, case) for case in PLAN[:40]]
    questions += [(fit, cases.case(shape, "float32", "graded", 1e-6, 0)) for shape in ((8, 257), (24, 1000), (8, 256))]
    padded = impl(candidates.PADDED.norm())
    lines = diagnose(verdict for gate, case in questions for verdict in ask(gate, padded, case)).splitlines()
    read = next(line for line in lines if line.startswith("forward, read off the results: "))
    assert "the mean square is divided by 512 instead of 257" in read
    assert "elsewhere the mean square is divided by 1024 instead of 1000" in read
    assert any(line.startswith("dx, read off the results: dx is right for the rstd that y was made") for line in lines)


def test_no_normalisation_is_named(said):
    assert "there is no normalisation" in said(candidates.NO_NORM.norm())


def test_dy_read_as_dense_points_to_dys_layout(said):
    """Walk dy's memory as if it were dense, as a kernel that is given only its address does."""

    def dense(x, gamma, eps):
        y = RIGHT.norm()(x, gamma, eps)
        return _ReadDense.apply(y)

    text = said(dense)
    assert "only layouts of dy" in text
    assert text.startswith("dx:")


class _ReadDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        stored = dy.new_empty(0).set_(dy.untyped_storage())
        start = dy.storage_offset()
        return stored.roll(-start).repeat(dy.numel() // stored.numel() + 1)[: dy.numel()].view(dy.shape)


def test_a_missing_tail_points_to_a_mask(said):
    def norm(x, gamma, eps):
        full = 2 ** (x.shape[-1].bit_length() - 1)
        y = candidates.eager(x, gamma, eps)
        return torch.cat([y[..., :full], 0 * y[..., full:]], -1) if full < x.shape[-1] else y

    assert "only columns past the last full block are wrong" in said(norm)


def test_a_missing_last_row_points_to_the_grid(said):
    def norm(x, gamma, eps):
        y = candidates.eager(x, gamma, eps)
        return torch.cat([y[:-1], 0 * y[-1:]]) if len(x) > 1 else y

    assert "only the last row is wrong" in said(norm)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (lambda x, gamma, eps: RIGHT.norm()(x, gamma, eps).double(), "the result has dtype torch.float64"),
        (lambda x, gamma, eps: RIGHT.norm()(x, gamma, eps)[None], "the result has shape (1, "),
        (
            lambda x, gamma, eps: RIGHT.norm()(x, gamma, eps).detach(),
            "y has no gradient: the call is cut off from autograd",
        ),
    ],
    ids=["dtype", "shape", "detached"],
)
def test_a_result_that_cannot_be_compared_points_to_no_formula(said, norm, reason):
    """What is told is what the result lacks; a guess at rstd or a partial would lead astray."""
    text = said(norm)
    assert reason in text
    for guess in (*WHERE.values(), "every element"):
        assert guess not in text
