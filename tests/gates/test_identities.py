"""Claims about the identities gate: each relation holds for right implementations and is broken by a mistake."""

from dataclasses import replace

import pytest
import torch

from rmsnorm_cli.gates import candidates, identities
from rmsnorm_cli.gates.candidates import RIGHT
from rmsnorm_cli.gates.relations import RELATIONS
from rmsnorm_cli.inputs import cases


def verdicts(results):
    return {result.case.split(": ", 1)[1]: result.status for result in results}


def failing(results):
    return {name for name, status in verdicts(results).items() if status == "failed"}


def test_rowwise_keeps_every_relation(ask, rowwise, small):
    found = ask(identities, rowwise, small(shape=(3, 65)), "interpreter")
    assert verdicts(found) == dict.fromkeys(RELATIONS, "passed")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 257), (3, 64), (67, 1000)])
def test_right_candidates_keep_every_relation(ask, impl, small, dtype, shape):
    for norm in (candidates.eager, candidates.native, candidates.TREE.norm()):
        found = ask(identities, impl(norm), small(shape=shape, dtype=dtype))
        assert verdicts(found) == dict.fromkeys(RELATIONS, "passed")


def test_a_kernel_like_candidate_of_ours_keeps_them_bit_for_bit(ask, impl, small):
    found = ask(identities, impl(RIGHT.norm(), ours=True), small())
    assert failing(found) == set()


def _index(like):
    return torch.arange(like.shape[-1], device=like.device, dtype=torch.float32)


BROKEN = {
    "scaled by 4": replace(RIGHT, rstd=lambda x, eps: (x.square().mean(-1, True) + 1e-2).rsqrt()),
    "scaled by -2": replace(RIGHT, dx=lambda x, r, u: RIGHT.dx(x, r, u) / r),
    "odd in x": replace(RIGHT, y=lambda x, r, gamma: (x * r * gamma).abs()),
    "a NaN stays in its row": replace(RIGHT, y=lambda x, r, gamma: x * r * gamma + 0 * x.sum()),
    "linear in gamma": replace(RIGHT, y=lambda x, r, gamma: x * r * gamma.square()),
    "gamma zero": replace(RIGHT, y=lambda x, r, gamma: x * r * torch.where(gamma == 0, 1.0, gamma)),
    "linear in dy": replace(RIGHT, dx=lambda x, r, u: RIGHT.dx(x, r, u) + 1e-3 * x),
    "columns permuted": replace(RIGHT, y=lambda x, r, gamma: x * r * gamma * (1 + 1e-3 * _index(x))),
    "dgamma adds up over rows": candidates.MEAN_OVER_ROWS,
    "⟨dx, x⟩": candidates.NO_SECOND_TERM,
    "⟨gamma, dgamma⟩": replace(RIGHT, dgamma=lambda x, r, dy: (dy * x).sum(0)),
    "zero row": replace(RIGHT, rstd=lambda x, eps: (x.square().mean(-1, True) + 1e-30).rsqrt()),
    "zero padding": replace(RIGHT, rstd=lambda x, eps: (x.square().sum(-1, True) / (x.shape[-1] - 1) + eps).rsqrt()),
}


@pytest.mark.parametrize("relation", BROKEN)
def test_each_relation_is_broken_by_a_mistake(ask, impl, small, relation):
    assert relation in failing(ask(identities, impl(BROKEN[relation].norm()), small()))


def _with_gradient(forward, gradients):
    """Make a norm whose gradients are computed from dy, x, gamma and eps by a function of its own."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gamma, eps):
            ctx.save_for_backward(x, gamma)
            ctx.eps = eps
            return forward(x, gamma, eps)

        @staticmethod
        def backward(ctx, dy):
            x, gamma = ctx.saved_tensors
            r = RIGHT.rstd(x, ctx.eps)
            return *gradients(dy, x, gamma, r), None

    return Own.apply


def test_a_dgamma_that_depends_on_gamma_breaks_what_says_it_does_not(ask, impl, small):
    norm = _with_gradient(candidates.eager, lambda dy, x, g, r: (RIGHT.dx(x, r, dy * g), RIGHT.dgamma(x, r, dy * g)))
    broken = failing(ask(identities, impl(norm), small()))
    assert {"dgamma without gamma", "linear in gamma", "gamma zero"} <= broken


def test_a_dx_that_sees_gamma_alone_breaks_what_says_only_the_product_counts(ask, impl, small):
    """Forget gamma in the first term."""
    norm = _with_gradient(
        candidates.eager,
        lambda dy, x, g, r: (r * (dy - x * r * (dy * g * x * r).mean(-1, True)), RIGHT.dgamma(x, r, dy)),
    )
    assert "gamma and dy only as a product" in failing(ask(identities, impl(norm), small()))


def test_every_relation_has_a_mistake_that_breaks_it():
    tested = {*BROKEN, "dgamma without gamma", "gamma and dy only as a product"}
    assert tested == set(RELATIONS)


def test_one_bit_is_enough_for_ours_and_not_for_others(ask, impl, small):
    """A factor of 1 + 2^-23 in one column of y that depends on the size of gamma."""
    off = replace(RIGHT, y=lambda x, r, gamma: x * r * gamma * torch.where(gamma.abs() > 1.5, 1 + 2**-22, 1.0))
    case = small(shape=(5, 257))
    assert "linear in gamma" in failing(ask(identities, impl(off.norm(), ours=True), case))
    assert "linear in gamma" not in failing(ask(identities, impl(off.norm()), case))


def test_gemma_is_asked_about_all_that_holds_for_it(ask, impl, small):
    def gemma(x, gamma, eps):
        return candidates.eager(x, 1 + gamma, eps)

    found = verdicts(ask(identities, impl(gemma, rounding="gemma"), small()))
    assert set(found.values()) == {"passed"}
    assert set(RELATIONS) - set(found) == identities.NOT_OF_GEMMA


def test_bf16_sums_are_skipped_in_the_interpreter_with_the_reason(impl, small, device):
    from rmsnorm_cli.judging.tolerances import DECLARED

    found = identities.check(impl(candidates.eager), small(dtype="bfloat16"), "interpreter", device, DECLARED)
    skipped = {result.case.split(": ")[1] for result in found if result.status == "skipped"}
    assert "⟨dx, x⟩" in skipped
    assert "scaled by 4" not in skipped
    assert all("truncates" in result.detail for result in found if result.status == "skipped")


def test_a_refusal_of_one_transformed_input_spoils_one_relation(ask, impl, small):
    def norm(x, gamma, eps):
        if x.shape[-1] > 33:
            raise ValueError("too wide")
        return candidates.eager(x, gamma, eps)

    found = verdicts(ask(identities, impl(norm), small()))
    assert found.pop("zero padding") == "refused"
    assert set(found.values()) == {"passed"}


def test_an_infinity_is_right_where_fp16_cannot_hold_the_gradient_of_a_zero_row(ask, rowwise):
    """gamma·dy/√eps passes 65504 for a small eps; a finite number or another sign there would be wrong."""
    case = cases.case((4, 257), "float16", "aligned", 1e-12, 0)
    assert failing(ask(identities, rowwise, case, "interpreter")) == set()
