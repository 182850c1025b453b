"""Claims about the exact class gate: right kernels have every bit, and the smallest slip of a term shows."""

from dataclasses import replace

import pytest

from rmsnorm_cli.gates import candidates, exact
from rmsnorm_cli.gates.candidates import RIGHT


def failing(results):
    return {result.scope for result in results if result.status == "failed"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(3, 1), (3, 257)])
def test_rowwise_is_exact(ask, rowwise, small, shape, dtype):
    found = ask(exact, rowwise, small("exact", shape, dtype), "interpreter")
    assert [result.status for result in found] == ["passed"] * 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("norm", [candidates.eager, candidates.native, candidates.TREE.norm(), RIGHT.norm()])
def test_right_candidates_are_exact_in_every_dtype(ask, impl, small, dtype, norm):
    for shape in exact.SHAPES:
        assert failing(ask(exact, impl(norm), small("exact", shape, dtype))) == set()


def test_llama_and_gemma_are_exact_by_their_own_rounding(ask, impl, small):
    def gemma(x, gamma, eps):
        return candidates.eager(x, 1 + gamma, eps)

    for norm, rounding in ((candidates.llama, "llama"), (gemma, "gemma")):
        found = ask(exact, impl(norm, rounding=rounding), small("exact", (17, 257), "bfloat16"))
        assert failing(found) == set()


ULP = 1 + 2**-23
SLIPS = {
    "y by one ULP": (replace(RIGHT, y=lambda x, r, g: x * r * g * ULP), {"forward"}),
    "dx by two ULP": (replace(RIGHT, dx=lambda x, r, u: RIGHT.dx(x, r, u) * (1 + 2**-22)), {"dx"}),
    "dgamma by one ULP": (replace(RIGHT, dgamma=lambda x, r, dy: RIGHT.dgamma(x, r, dy) * ULP), {"dgamma"}),
    "a row of dgamma lost": (replace(RIGHT, dgamma=lambda x, r, dy: RIGHT.dgamma(x[1:], r[1:], dy[1:])), {"dgamma"}),
    "c without its rstd": (replace(RIGHT, dx=lambda x, r, u: r * (u - x * r * (u * x).mean(-1, True))), {"dx"}),
    "padded block": (candidates.PADDED, {"forward", "dx", "dgamma"}),
}


@pytest.mark.parametrize("name", SLIPS)
def test_the_smallest_slip_of_each_result_is_seen_in_its_scope_alone(ask, impl, small, name):
    parts, scopes = SLIPS[name]
    assert failing(ask(exact, impl(parts.norm(), ours=True), small("exact", (5, 33)))) == scopes


def test_a_foreign_dx_may_be_one_ulp_off_in_fp32_and_ours_may_not(ask, impl, small):
    """Compute mean(u·x̂) with a precomputed 1/N, which rounds where N is no power of two."""

    def by_reciprocal(x, r, u):
        return r * (u - x * r * (0.5 * (1 - 2**-22)))

    norm = replace(RIGHT, dx=by_reciprocal).norm()
    case = small("exact", (5, 33))
    assert failing(ask(exact, impl(norm), case)) == set()
    assert failing(ask(exact, impl(norm, ours=True), case)) == {"dx"}


def test_a_16_bit_accumulator_is_seen(ask, impl, small):
    def in_16_bit(x, r, dy):
        total = 0
        for row in (dy * x * r).bfloat16():
            total = total + row * (1 + 2**-7)
        return total.float()

    norm = replace(RIGHT, dgamma=in_16_bit).norm()
    assert failing(ask(exact, impl(norm), small("exact", (33, 257), "bfloat16"))) == {"dgamma"}


@pytest.mark.usefixtures("without_gpu")
def test_rowwise_is_asked_both_sides_of_powers_of_two_within_its_contract(settings, rowwise):
    asked = exact.plan(settings(), rowwise, "interpreter")
    assert {case.dtype for case in asked} == {"float32", "float16"}
    assert {case.eps for case in asked} == {3.0}
    assert {1, 2, 3, 8, 257, 1025, 4096} <= {case.N for case in asked}
    assert all(case.M <= 64 for case in asked)
