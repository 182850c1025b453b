"""The words and figures that intervals turn into: exact wording, both sides of every limit."""

import pytest

from rmsnorm_cli.timing import Interval, beats_floor, control, duration, figures, judge, suspect, void
from rmsnorm_cli.timing.verdict import decimals


def ratio(low, high, estimate=None):
    return Interval((low + high) / 2 if estimate is None else estimate, low, high, 25)


def test_faster_is_told_as_a_speed_up_with_its_interval():
    """Time ratio 1/1.24 to 1/1.22 reads 1.23×."""
    verdict = judge(Interval(1 / 1.23, 1 / 1.24, 1 / 1.22, 25))
    assert verdict.word == "faster"
    assert verdict.text == "faster 1.23× (99 % interval 1.22–1.24)"


def test_slower_is_told_as_a_ratio_of_times_with_its_interval():
    verdict = judge(ratio(1.35, 1.45))
    assert verdict.word == "slower"
    assert verdict.text == "slower 1.40× (99 % interval 1.35–1.45)"


def test_equal_needs_the_whole_interval_inside_the_band():
    assert judge(ratio(0.991, 1.009)).text == "equal within 1 %"
    assert judge(ratio(0.989, 1.009)).word == "inconclusive"
    assert judge(ratio(0.991, 1.011)).word == "inconclusive"


def test_an_interval_that_touches_the_band_from_outside_decides_nothing():
    assert judge(ratio(0.95, 0.9899)).word == "faster"
    assert judge(ratio(0.95, 0.9901)).word == "inconclusive"
    assert judge(ratio(1.0101, 1.05)).word == "slower"
    assert judge(ratio(1.0099, 1.05)).word == "inconclusive"


def test_an_estimate_far_from_one_with_a_wide_interval_is_inconclusive_and_says_how_wide():
    verdict = judge(ratio(0.5, 1.25, 0.8))
    assert verdict.word == "inconclusive"
    assert verdict.text == "inconclusive (99 % interval of the speed-up 0.8–2.0)"


def test_the_band_and_the_confidence_are_the_ones_declared():
    assert judge(ratio(0.96, 1.04), band=0.05).text == "equal within 5 %"
    assert judge(ratio(0.5, 0.6), confidence=0.95).text.count("95 % interval") == 1


def test_a_measurement_that_is_void_keeps_its_interval_but_speaks_no_word():
    verdict = void(ratio(0.5, 0.51), "12 blocks, verdicts need 20")
    assert (verdict.word, verdict.text) == ("inconclusive", "inconclusive (12 blocks, verdicts need 20)")
    assert verdict.ratio.estimate == pytest.approx(0.505)


@pytest.mark.parametrize(
    ("low", "high", "held"),
    [(0.995, 1.004, True), (1.001, 1.004, True), (0.98, 1.004, False), (0.995, 1.02, False), (1.02, 1.03, False)],
)
def test_the_control_holds_where_its_whole_interval_is_within_one_percent(low, high, held):
    assert control(ratio(low, high)).held is held


def test_a_control_wider_than_the_band_says_what_it_resolves_and_one_beyond_it_that_it_is_biased():
    """Resolution is how far from 1 the interval reaches, rounded up to two figures."""
    coarse = control(ratio(0.9712, 1.0105))
    assert (coarse.held, coarse.biased, coarse.resolution) == (False, False, pytest.approx(0.0288))
    assert coarse.text == "A/A control resolves 2.9 %: 0.99 (0.97–1.01)"
    assert control(ratio(0.999, 1.0301)).text.startswith("A/A control resolves 3.1 %")
    aside = control(ratio(1.0101, 1.03))
    assert (aside.held, aside.biased) == (False, True)
    assert aside.text == "A/A control biased: 1.020 (1.010–1.030)"
    assert control(ratio(0.4, 2.3)).text == "A/A control resolves no less than 100 %: 1.3 (0.4–2.3)"
    assert control(ratio(0.97, 0.9899)).biased
    assert not control(ratio(1.0099, 1.03)).biased


def test_under_a_coarse_control_a_verdict_needs_a_difference_beyond_it_and_names_it():
    assert judge(Interval(1 / 3.1, 1 / 3.2, 1 / 3.0, 25), resolution=0.03).text == (
        "faster 3.1× (99 % interval 3.0–3.2); A/A resolves 3 %"
    )
    assert judge(ratio(1.031, 1.05), resolution=0.03).word == "slower"
    assert judge(ratio(1.029, 1.05), resolution=0.03).word == "inconclusive"
    assert judge(ratio(0.94, 0.969), resolution=0.03).word == "faster"
    inside = judge(ratio(0.94, 0.971), resolution=0.03)
    assert inside.word == "inconclusive"
    assert inside.text.endswith("; A/A resolves 3 %)")
    assert judge(ratio(0.999, 1.001), resolution=0.03).word == "inconclusive", "equal is not said"


def test_a_cold_time_below_the_streams_is_invalid_only_beyond_margin_and_interval():
    assert beats_floor(ratio(0.5, 0.6))
    assert not beats_floor(ratio(0.90, 0.96)), "a copy is no exact floor"
    assert beats_floor(ratio(0.90, 0.94))


def test_more_than_ten_times_faster_is_suspect():
    assert suspect(ratio(0.08, 0.099))
    assert not suspect(ratio(0.08, 0.101))


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(1.0, 1.5, "1.2"), (1.22, 1.24, "1.23"), (1.2295, 1.2305, "1.2300"), (1.0, 9.0, "5"), (1.23, 1.23, "1.2300")],
)
def test_a_figure_has_no_more_digits_than_its_interval_supports(low, high, text):
    assert figures(ratio(low, high)) == text


@pytest.mark.parametrize(("width", "places"), [(20, 0), (2.0, 0), (1.0, 1), (0.02, 2), (0.002, 3), (1e-9, 4), (0.0, 4)])
def test_decimals_go_down_to_the_first_digit_of_half_the_width(width, places):
    assert decimals(5.0, 5.0 + width) == places


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(12.3e-6, 12.5e-6, "12.4 µs"), (90e-6, 130e-6, "110 µs"), (31e-3, 33e-3, "32 ms"), (2.0e-6, 2.0e-6, "2.00 µs")],
)
def test_times_are_microseconds_or_milliseconds_with_the_figures_of_their_interval(low, high, text):
    assert duration(ratio(low, high)) == text


def test_the_ends_of_a_dispersion_have_the_figures_of_the_median():
    assert duration(ratio(2.599e-6, 2.601e-6), (2.6e-6, 2.614e-6)) == "2.60 µs (2.60–2.61)"
