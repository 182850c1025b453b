"""Claims about the comparison: every fake result is found, with its index and both values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm_cli.judging.numerics import TOLERANCES, bits, compare, dx_scale, identical, kinds, regions, spacing
from rmsnorm_cli.judging.tolerances import Tolerance

F32 = TOLERANCES["float32"]
WANT = torch.linspace(-2, 2, 4096, dtype=torch.float64).reshape(4, 1024)


def judged(got, want=WANT, tolerance=F32, dtype=torch.float32, **more):
    return compare(got, want, tolerance, dtype=dtype, **more)


def right():
    return WANT.float()


def test_a_right_result_passes():
    found = judged(right())
    assert found.ok
    assert found.worst is not None
    assert found.worst < 0.01
    assert not found.regions


@pytest.mark.case("B64")
def test_one_wrong_element_of_4096_fails_with_its_index_and_both_values():
    got = right()
    got[2, 77] += 1
    found = judged(got)
    assert not found.ok
    assert found.index == (2, 77)
    assert found.got == pytest.approx(found.want + 1)
    assert found.worst > 1
    assert "middle row" in found.detail
    assert "1 of 4096 wrong" in found.detail


@pytest.mark.case("B64")
def test_one_nan_fails_and_is_named():
    got = right()
    got[3, 5] = math.nan
    found = judged(got)
    assert not found.ok
    assert found.index == (3, 5)
    assert math.isnan(found.got)
    assert found.ulps is None


@pytest.mark.case("B64")
def test_nan_everywhere_fails():
    assert not judged(torch.full_like(right(), math.nan)).ok


@pytest.mark.case("B64")
def test_an_infinity_where_the_oracle_is_finite_fails():
    got = right()
    got[0, 0] = math.inf
    assert judged(got).index == (0, 0)


@pytest.mark.parametrize("want", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("got", [math.nan, math.inf, -math.inf, 0.0])
def test_what_is_not_finite_must_be_of_the_same_kind(got, want):
    left, wide = right(), WANT.clone()
    left[1, 1], wide[1, 1] = got, want
    same = got == want or (math.isnan(got) and math.isnan(want))
    assert judged(left, wide).ok == same


def test_an_oracle_beyond_fp16_wants_an_infinity():
    want = torch.tensor([[1e5, -1e5, 1.0]], dtype=torch.float64)
    fp16 = TOLERANCES["float16"]
    good = torch.tensor([[math.inf, -math.inf, 1.0]], dtype=torch.float16)
    clipped = torch.tensor([[65504.0, -65504.0, 1.0]], dtype=torch.float16)
    assert judged(good, want, fp16, torch.float16).ok
    assert not judged(clipped, want, fp16, torch.float16).ok


@pytest.mark.case("B64")
def test_a_shape_that_would_broadcast_fails():
    for got in (WANT[:, :1].float(), WANT[:1].float(), torch.tensor(0.0), torch.empty(0), WANT.float()[None]):
        found = judged(got)
        assert not found.ok
        assert "shape" in found.detail


@pytest.mark.case("B64")
def test_another_dtype_fails_even_with_right_values():
    assert "dtype" in judged(WANT.half()).detail
    assert "dtype" in judged(WANT.clone()).detail


def test_another_device_fails():
    assert "device" in judged(WANT.float().to("meta")).detail


def test_what_is_no_tensor_fails():
    assert "list" in judged(right().tolist()).detail


@pytest.mark.case("B64")
def test_an_empty_result_equals_an_empty_oracle_only():
    empty = torch.empty(0, 8, dtype=torch.float64)
    assert judged(empty.float(), empty).ok
    assert not judged(torch.empty(0, 7), empty).ok


def test_the_limit_itself_passes_and_the_next_number_fails():
    want = torch.tensor([[0.5]], dtype=torch.float64)
    limit = Tolerance(0.25, 0.5)  # 0.25 + 0.25
    assert judged(torch.tensor([[1.0]]), want, limit).worst == 1.0
    assert judged(torch.tensor([[1.0]]), want, limit).ok
    assert not judged(torch.nextafter(torch.tensor([[1.0]]), torch.tensor(2.0)), want, limit).ok


def test_a_zero_tolerance_accepts_equality_alone():
    exactly = Tolerance(0.0, 0.0)
    want = right().double()
    assert judged(right(), want, exactly).ok
    assert not judged(torch.nextafter(right(), torch.tensor(9.0)), want, exactly).ok


def test_both_sides_are_divided_by_the_scale():
    want = torch.tensor([[100.0], [100.0]], dtype=torch.float64)
    got = torch.tensor([[101.0], [101.0]])
    loose = Tolerance(0.02, 0.0)
    found = judged(got, want, loose, scale=torch.tensor([[100.0], [1.0]], dtype=torch.float64))
    assert found.index == (1, 0)
    assert found.regions["first row"] == 0


def test_dx_is_scaled_only_away_from_unit_rms():
    rstd = torch.tensor([0.4, 0.5, 1.0, 2.0, 700.0, 0.0, math.nan, math.inf], dtype=torch.float64)
    assert dx_scale(rstd).tolist() == [0.4, 1, 1, 1, 700, 1, 1, 1]


@pytest.mark.case("B64")
@settings(max_examples=50, deadline=None)
@given(data=st.data(), rows=st.integers(1, 6), cols=st.integers(1, 70))
def test_a_single_wrong_element_is_found_wherever_it_is(data, rows, cols):
    want = torch.ones(rows, cols, dtype=torch.float64)
    where = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    got = want.float()
    got[where] = data.draw(st.sampled_from([0.0, 1.01, -1.0, math.nan, math.inf]))
    found = judged(got, want)
    assert not found.ok
    assert found.index == where
    full = 2 ** (cols.bit_length() - 1)
    tail, block = found.regions.get("tail columns", 0.0), found.regions["full columns"]
    assert (tail > 0) == (where[1] >= full)
    assert (block > 0) == (where[1] < full)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [1.0, 1.5, 2.0, 0.75, 1000.0, 1e-3, 0.0, 3e-8])
def test_spacing_is_the_distance_to_the_next_number(dtype, value):
    here = torch.tensor(value, dtype=dtype)
    up = torch.nextafter(here.float(), torch.tensor(math.inf)) if dtype == torch.float32 else _next(here)
    expected = up.double() - here.double()
    assert spacing(here.double(), dtype).item() == expected.item()


def _next(here):
    return (here.view(torch.int16) + 1).view(here.dtype)


def test_ulps_are_counted_in_the_output_dtype():
    want = torch.tensor([[1.0]], dtype=torch.float64)
    found = judged(torch.tensor([[1.0 + 3 * 2**-10]], dtype=torch.float16), want, Tolerance(0, 0), torch.float16)
    assert found.ulps == 3.0


def test_regions_tell_rows_and_tail_columns_apart():
    wrong = torch.zeros(4, 5, dtype=torch.bool)
    wrong[3, 4] = True
    shares = regions(wrong)
    assert shares == {
        "all": 0.05,
        "full columns": 0.0,
        "tail columns": 0.25,
        "first row": 0.0,
        "last row": 0.2,
        "rows between": 0.0,
        "rows touched": 0.25,
        "columns touched": 0.2,
    }


def test_identical_sees_one_bit_the_sign_of_zero_and_a_nans_payload():
    zero = torch.zeros(2, 2)
    assert identical(zero, zero.clone()).ok
    assert not identical(zero, -zero).ok
    nan = torch.full((2,), math.nan)
    payload = (bits(nan) + 1).view(torch.float32)
    assert identical(nan, nan.clone()).ok
    assert not identical(payload, nan).ok
    assert not identical(torch.nextafter(zero, torch.tensor(1.0)), zero).ok


def test_kinds_are_four():
    assert kinds(torch.tensor([1.0, math.nan, math.inf, -math.inf])).tolist() == [0, 1, 2, 3]
