"""Claims about what is asked: names, values, layouts, the default plan and the oracle."""

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm_cli.config.models import Verify
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.cases import COLS, DISTRIBUTIONS, LAYOUTS, ROWS, Case
from rmsnorm_cli.inputs.layouts import Inputs, place

NAMES = tuple(DISTRIBUTIONS)


def test_the_configuration_offers_exactly_these_distributions_and_layouts():
    assert Verify().distributions == NAMES
    assert Verify().layouts == tuple(LAYOUTS)


def test_the_configuration_defaults_to_these_rows_and_columns():
    assert Verify().rows == ROWS
    assert Verify().cols == COLS


def test_importing_cases_imports_no_torch():
    code = "import sys, rmsnorm_cli.inputs.cases; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_grid_asks_at_least_72_cases_over_two_dtypes():
    asked = cases.grid(ROWS, COLS, ("float32", "float16"), NAMES, 1e-6, 0)
    assert len(asked) == len({case.id for case in asked}) == 78


def test_grid_lets_every_distribution_meet_an_odd_width_above_one():
    asked = cases.grid(ROWS, COLS, ("float32",), NAMES, 1e-6, 0)
    met = {case.distribution for case in asked if case.N > 1 and case.N % 2}
    assert met == set(NAMES)


def test_grid_gives_the_widest_odd_shapes_to_the_strongest_distributions():
    by_shape = {case.shape: case.distribution for case in cases.grid(ROWS, COLS, ("float32",), NAMES, 1e-6, 0)}
    assert by_shape[67, 1025] == "spread"
    assert "normal" not in {by_shape[M, N] for M in (17, 67) for N in (257, 1023, 1025)}


def test_ids_tell_every_part_of_a_question_apart():
    base = cases.case((3, 5), "float32", "spread", 1e-6, 0)
    others = [
        cases.case((5, 3), "float32", "spread", 1e-6, 0),
        cases.case((3, 5), "float16", "spread", 1e-6, 0),
        cases.case((3, 5), "float32", "tiny", 1e-6, 0),
        cases.case((3, 5), "float32", "spread", 1e-5, 0),
        cases.case((3, 5), "float32", "spread", 1e-6, 0, layout="misaligned"),
        cases.case((3, 5), "float32", "spread", 1e-6, 0, gamma_dtype="none"),
    ]
    assert len({case.id for case in (base, *others)}) == 7


def test_values_do_not_depend_on_the_process():
    """Python's own hash() differs between processes; the seed of a case must not."""
    code = "from rmsnorm_cli.inputs.cases import Case; print(Case((3, 5), seed=7).generator_seed)"
    seeds = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": salt}, capture_output=True, check=True
        ).stdout
        for salt in ("1", "2")
    }
    expected = int.from_bytes(hashlib.sha256(b"7/float32/3x5/spread/contiguous").digest()[:8], "big") >> 1
    assert seeds == {f"{expected}\n".encode()}


def test_another_seed_gives_other_values_and_the_same_seed_the_same():
    one, again, other = (cases.tensors(Case((3, 5), seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one.x, again.x)
    assert torch.equal(one.dy, again.dy)
    assert not torch.equal(one.x, other.x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2), (17, 33), (0, 8)])
def test_every_distribution_exists_at_small_and_empty_shapes(name, shape):
    inputs = cases.tensors(cases.case(shape, "float16", name, 1e-6, 0))
    assert inputs.x.shape == inputs.dy.shape == shape
    assert inputs.gamma is not None
    assert inputs.gamma.shape == shape[1:]
    assert bool(inputs.dy.isfinite().all()) == (name != "nonfinite" or shape[0] <= 2)


def _draw(name, shape=(67, 1000), dtype="float32"):
    return cases.tensors(cases.case(shape, dtype, name, 1e-6, 0))


def _rms(x):
    return x.double().square().mean(-1).sqrt()


def test_spread_rows_reach_from_a_thousandth_to_a_hundred_in_no_order():
    rms = _rms(_draw("spread").x)
    assert 0.9e-3 < float(rms.min()) < 1.1e-3
    assert 90 < float(rms.max()) < 110
    assert not torch.equal(rms, rms.sort().values)


@pytest.mark.parametrize(("name", "rms"), [("tiny", 1e-3), ("large", 30.0), ("normal", 1.0)])
def test_scaled_rows_have_their_scale(name, rms):
    assert _rms(_draw(name).x).flatten().tolist() == pytest.approx([rms] * 67, rel=0.1)


def test_gamma_has_both_signs_and_a_zero_except_where_it_must_not():
    gamma = _draw("spread").gamma
    assert bool((gamma > 0).any())
    assert bool((gamma < 0).any())
    assert int((gamma == 0).sum()) == 1
    assert bool((_draw("normal").gamma == 1).all())
    assert bool((_draw("parallel").gamma != 0).all())


def test_dy_is_scaled_like_a_mean_loss():
    assert float(_draw("spread").dy.std()) * math.sqrt(67) == pytest.approx(1.0, rel=0.02)


def test_zero_rows_stand_between_others_and_never_last():
    zero = (_draw("zero_rows").x == 0).all(-1)
    assert int(zero.sum()) == 33
    assert not bool(zero[-1])


def test_parallel_leaves_almost_nothing_of_dx():
    inputs = _draw("parallel")
    want = cases.oracle(inputs, 1e-6)
    u = inputs.gamma.double() * inputs.dy.double()
    assert float((want.dx / want.rstd).norm() / u.norm()) < 1e-5


def test_aligned_makes_the_second_term_of_order_one():
    inputs = _draw("aligned")
    want = cases.oracle(inputs, 1e-6)
    c = (inputs.gamma.double() * inputs.dy.double() * inputs.x.double() * want.rstd).mean(-1) * math.sqrt(67)
    assert bool(((c > 0.8) & (c < 1.2)).all())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("N", [1, 2, 3, 257, 1000])
def test_exact_class_is_exact_in_every_dtype(dtype, N):
    case = cases.case((17, N), dtype, "exact", 1e-6, 0)
    inputs = cases.tensors(case)
    want = cases.oracle(inputs, case.eps)
    products = inputs.gamma.double() * inputs.dy.double() * inputs.x.double() * want.rstd
    assert bool((want.rstd == 0.5).all())
    assert bool((products.mean(-1) == 0.5).all())
    for exact in (want.y, want.dx, want.dgamma):
        assert torch.equal(exact.to(getattr(torch, dtype)).double(), exact)


@pytest.mark.case("B65")
def test_stalling_sum_is_lost_on_a_16_bit_accumulator_and_seen_by_its_tolerance():
    for dtype, first in (("float16", 512.0), ("bfloat16", 64.0)):
        case = cases.case((67, 4), dtype, "stalling", 1e-6, 0)
        inputs = cases.tensors(case)
        want = cases.oracle(inputs, case.eps).dgamma
        rows = (inputs.dy.double() * 0.5).to(getattr(torch, dtype))
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        assert bool((total == first).all())
        tolerance = 3e-3 if dtype == "float16" else 2.4e-2
        assert bool(((total.double() - want).abs() > tolerance * (1 + want.abs())).all())


def test_fp16_range_has_squares_beyond_fp16_on_both_sides():
    x = _draw("fp16_range", dtype="float16").x
    assert bool((x * x).isinf().any())
    assert bool((x * x == 0).any())
    assert bool(x.isfinite().all())
    assert bool((_draw("fp16_range", (1, 33), "float16").x.square()).isinf().all())


def test_nonfinite_puts_infinities_in_odd_widths_and_nan_in_even_ones_and_nan_in_dy():
    odd, even = _draw("nonfinite", (5, 33)).x, _draw("nonfinite", (5, 34)).x
    assert (int(odd.isposinf().sum()), int(odd.isneginf().sum()), int(odd.isnan().sum())) == (1, 1, 0)
    assert (int(even.isinf().sum()), int(even.isnan().sum())) == (0, 1)
    dy = _draw("nonfinite", (5, 33)).dy
    assert (int(dy.isnan().sum()), bool(dy[0, 0].isnan())) == (1, True)
    want = cases.oracle(_draw("nonfinite", (5, 33)), 1e-6)
    assert int((~want.dgamma.isfinite()).sum()) == 3
    assert bool(want.dx[0].isnan().all())
    assert bool(want.dx[[1, 3]].isfinite().all())


STRIDES = {
    "sliced_rows": (41, 1),
    "transposed_heads": (1, 5),
    "misaligned": (33, 1),
    "every_second": (66, 2),
    "expanded": (0, 0),
}


@pytest.mark.parametrize("layout", STRIDES)
def test_layouts_have_their_strides_and_the_values_they_were_given(layout):
    values = torch.full((5, 33), 2.0) if layout == "expanded" else torch.arange(165.0).reshape(5, 33)
    placed = place(values, layout)
    assert placed.stride() == STRIDES[layout]
    assert torch.equal(placed, values)


def test_misaligned_starts_off_every_alignment_that_vector_loads_need():
    assert place(torch.ones(5, 33, dtype=torch.float16), "misaligned").data_ptr() % 16 == 2


@pytest.mark.parametrize("layout", ["sliced_rows", "every_second", "misaligned"])
def test_memory_around_a_layout_is_nan(layout):
    placed = place(torch.ones(5, 33), layout)
    around = torch.empty(0).set_(placed.untyped_storage())
    assert int(around.isnan().sum()) == around.numel() - 165


def test_what_lies_behind_one_number_that_serves_all_is_nan():
    """Read as if it were dense, an expanded dy must not give the right value by chance."""
    dy = cases.tensors(Case((5, 33), layout="expanded_dy")).dy
    around = torch.empty(0).set_(dy.untyped_storage())
    assert around.numel() == dy.numel()
    assert int(around.isnan().sum()) == around.numel() - 1


@pytest.mark.gpu
def test_far_rows_lie_beyond_what_32_bits_reach_and_a_wrapped_offset_finds_nan(device):
    x = place(torch.ones(2, 257, dtype=torch.float16, device=device), "far_rows")
    assert x.stride() == (2**31, 1)
    assert bool((x == 1).all())
    wrapped = x.as_strided((257,), (1,), x.storage_offset() - 2**31)
    assert bool(wrapped.isnan().all())


def test_transposed_heads_swaps_the_dimensions_before_the_last():
    assert place(torch.ones(2, 3, 5, 7), "transposed_heads").stride() == (105, 7, 21, 1)


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"expanded_dy", "1d", "3d", "4d"}))
def test_a_layout_changes_no_value_but_dys_when_expanded(layout):
    inputs = cases.tensors(Case((5, 33), layout=layout))
    dense = inputs.pristine()
    assert dense.x.is_contiguous()
    assert torch.equal(dense.x, inputs.x)
    assert bool(inputs.x.isfinite().all())
    assert bool(inputs.dy.isfinite().all())


def test_expanded_dy_is_one_number_without_strides():
    dy = cases.tensors(Case((3, 5, 9), layout="expanded_dy")).dy
    assert dy.stride() == (0, 0, 0)
    assert dy.shape == (3, 5, 9)


# The oracle.


def _complex_step(x, gamma, dy, eps):
    """Differentiate by a complex step of 1e-200: no difference is taken, so nothing cancels."""

    def loss(x, gamma):
        return (dy * gamma * x * ((x * x).mean(-1, keepdims=True) + eps) ** -0.5).sum()

    dx, dgamma = np.zeros_like(x), np.zeros_like(gamma)
    for index in np.ndindex(*x.shape):
        z = x.astype(complex)
        z[index] += 1e-200j
        dx[index] = loss(z, gamma).imag / 1e-200
    for j in range(len(gamma)):
        z = gamma.astype(complex)
        z[j] += 1e-200j
        dgamma[j] = loss(x.astype(complex), z).imag / 1e-200
    return dx, dgamma


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    eps=st.sampled_from([1e-6, 1e-3, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_oracle_agrees_with_a_complex_step_derivative(shape, scale, eps, seed):
    rng = np.random.default_rng(seed)
    x, gamma, dy = rng.standard_normal(shape) * scale, rng.standard_normal(shape[1]), rng.standard_normal(shape)
    want = cases.oracle(Inputs(*(torch.from_numpy(array) for array in (x, gamma, dy))), eps)
    dx, dgamma = _complex_step(x, gamma, dy, eps)
    size = np.abs(gamma * dy).max() * float(want.rstd.max())
    assert np.abs(want.dx.numpy() - dx).max() <= 1e-12 * size
    assert np.abs(want.dgamma.numpy() - dgamma).max() <= 1e-12 * np.abs(dy).sum()


def test_oracle_knows_the_facts_checked_by_hand():
    x, dy = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0]])
    want = cases.oracle(Inputs(x, torch.ones(2), dy), 1e-6)
    assert want.rstd.item() == pytest.approx(0.282843, abs=5e-7)
    assert want.y.tolist()[0] == pytest.approx([0.848528, 1.131371], abs=5e-7)
    assert want.dx.tolist()[0] == pytest.approx([-0.090510, 0.067882], abs=5e-7)
    scaled = cases.oracle(Inputs(x, torch.tensor([2.0, 0.5]), dy), 1e-6)
    assert scaled.y.tolist()[0] == pytest.approx([1.697056, 0.565685], abs=5e-7)


@pytest.mark.case("B34")
def test_oracle_rounds_where_llama_does():
    """bf16 x = [3, 4], gamma = 1.5: one rounding gives 1.6953125, rounding x̂ first gives 1.703125."""
    x, gamma = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16), torch.tensor([1.5, 1.5], dtype=torch.bfloat16)
    inputs = Inputs(x, gamma, torch.ones_like(x))
    once = cases.oracle(inputs, 1e-6).y.bfloat16().tolist()
    twice = cases.oracle(inputs, 1e-6, "llama").y.bfloat16().tolist()
    assert once == [[1.2734375, 1.6953125]]
    assert twice == [[1.2734375, 1.703125]]


@pytest.mark.case("B40")
def test_oracle_adds_one_to_gemmas_gamma_and_not_to_its_gradient():
    inputs = Inputs(torch.tensor([[3.0, 4.0]]), torch.tensor([0.5, -0.5]), torch.tensor([[1.0, 2.0]]))
    plain = Inputs(inputs.x, inputs.gamma + 1, inputs.dy)
    gemma, want = cases.oracle(inputs, 1e-6, "gemma"), cases.oracle(plain, 1e-6)
    for name in ("y", "dx", "dgamma"):
        assert torch.equal(getattr(gemma, name), getattr(want, name))


def test_oracle_has_no_dgamma_without_gamma():
    inputs = cases.tensors(Case((3, 5), gamma_dtype="none"))
    assert inputs.gamma is None
    assert cases.oracle(inputs, 1e-6).dgamma is None
