"""Claims: each gate sees a fault that no other gate sees, so that none can be left out."""

import functools
from dataclasses import replace

import pytest
import torch

from rmsnorm_cli.errors import VerifierUntrusted
from rmsnorm_cli.gates import (
    candidates,
    contract,
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
from rmsnorm_cli.gates.candidates import RIGHT
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.judging import numerics
from rmsnorm_cli.judging.tolerances import DECLARED


def test_a_right_kernel_like_candidate_is_rejected_by_none(rejecting):
    assert rejecting(RIGHT.norm(), deterministic=True) == set()


def test_contract_alone_sees_that_the_length_of_gamma_is_not_looked_at(rejecting):
    assert rejecting(candidates.forgetful) == {contract.NAME}


def test_memory_alone_sees_a_write_one_element_past_the_end(rejecting):
    assert rejecting(candidates.PAST_THE_END.norm()) == {memory.NAME}


def test_memory_alone_sees_a_read_past_the_end_of_a_row(rejecting):
    """A load without its mask, of a lane that is then multiplied by zero: only NaN behind the row shows it."""

    def reading(x, eps):
        return (x.square().mean(-1, True) + eps).rsqrt()

    def norm(x, gamma, eps):
        behind = x.detach().storage_offset() + x.numel()
        inside = x.untyped_storage().nbytes() > behind * x.element_size()
        lane = x.detach().as_strided((1,), (1,), behind) if inside else torch.zeros(1)
        return candidates.eager(x, gamma, eps) + (0 * lane).to(x.dtype)

    assert rejecting(norm) == {memory.NAME}


def test_exact_class_alone_sees_one_ulp_too_much(rejecting):
    off = replace(RIGHT, y=lambda x, r, gamma: x * r * gamma * (1 + 2**-23))
    assert rejecting(off.norm()) == {exact.NAME}


def test_declared_tolerance_alone_sees_squares_that_overflow_fp16(rejecting):
    """Squares in x's dtype: nothing shows at unit scale."""

    def norm(x, gamma, eps):
        y = candidates.eager(x, gamma, eps)
        return torch.where((x.detach() * x.detach()).isinf().any(-1, keepdim=True), y * 0, y)

    more = {declared.NAME: [cases.case((7, 33), "float16", "fp16_range", 1e-6, 0)]}
    assert rejecting(norm) == set()
    assert rejecting(norm, more) == {declared.NAME}


def test_rounding_budget_alone_sees_partial_sums_of_16_bits(rejecting):
    assert rejecting(candidates.in_half(candidates.PARTIALS_IN_HALF)()) == {rounding.NAME}


def test_fit_alone_sees_small_squares_lost_in_16_bits(rejecting):
    """Only its rows are smaller than √eps, and there the mean square is no longer the mean of the squares."""
    assert rejecting(candidates.in_half(candidates.SQUARES_LOST)()) == {fit.NAME}


def test_identities_alone_see_a_leak_between_rows_that_finite_numbers_hide(rejecting):
    def norm(x, gamma, eps):
        return candidates.eager(x, gamma, eps) + 0 * x.detach().sum()

    assert rejecting(norm) == {identities.NAME}


def test_autograd_alone_sees_that_a_change_in_place_goes_unnoticed(rejecting):
    assert rejecting(candidates.UNWATCHED.norm()) == {wiring.NAME}


def test_autograd_alone_sees_a_second_derivative_that_is_silently_wrong(rejecting):
    assert rejecting(candidates.rstd_as_constant) == {wiring.NAME}


def test_autograd_alone_sees_a_gradient_that_accumulates_over_calls(rejecting):
    """A buffer that is not cleared: the second backward through one graph adds the first one's dgamma."""
    from torch.autograd.function import once_differentiable

    class Accumulating(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gamma, eps):
            ctx.save_for_backward(x, gamma)
            ctx.eps, ctx.total = eps, 0
            return candidates.eager(x, gamma, eps)

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
                dx, dgamma = torch.autograd.grad(candidates.eager(*leaves, ctx.eps), leaves, dy)
            ctx.total = ctx.total + dgamma
            return dx, ctx.total.clone(), None

    assert rejecting(Accumulating.apply) == {wiring.NAME}


def test_determinism_alone_sees_an_unordered_sum_within_tolerance(rejecting):
    def shuffled(x, r, dy):
        return functools.reduce(torch.add, (dy * x * r)[torch.randperm(len(x))])

    more = {determinism.NAME: [determinism.Repeated(cases.case((65, 33), "float32", "spread", 1e-6, 0), 5)]}
    assert rejecting(replace(RIGHT, dgamma=shuffled).norm(), more, deterministic=True) == {determinism.NAME}


def test_controls_alone_see_a_comparison_that_takes_nan_for_a_wildcard(monkeypatch):
    """A verifier that passes NaN passes every kernel too, so no gate can tell; the controls can."""
    honest = numerics.compare

    def wildcard(got, want, tolerance, **more):
        if got.shape == want.shape:
            got = torch.where(got.isnan(), want.to(got.dtype), got)
        return honest(got, want, tolerance, **more)

    monkeypatch.setattr(declared, "compare", wildcard)
    with pytest.raises(VerifierUntrusted, match="NaN everywhere") as caught:
        controls.examine("interpreter", "cpu", DECLARED, seed=0)
    assert "2 controls misjudged" in str(caught.value)
