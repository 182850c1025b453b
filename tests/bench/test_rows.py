"""From sessions to rows: what earns a number, a verdict, or neither. Sessions are made by hand; no clock, no device."""

import numpy as np
import pytest

from rmsnorm_cli.bench import rows
from rmsnorm_cli.timing import STARVED, Sample, Session

RULES = rows.Rules(band=0.01, confidence=0.99, resamples=500, min_blocks=20, canary_within=0.02)
BLOCKS = 25


def session_of(seconds, blocks=BLOCKS, noise=1e-4, flags=(), seed=0):
    """Return a session whose entries take the given seconds, with a little lognormal noise."""
    rng = np.random.default_rng(seed)
    session = Session(blocks=blocks)
    for block in range(blocks):
        for position in range(2):
            for name, true in seconds.items():
                taken = true * float(np.exp(rng.normal(0, noise)))
                session.samples.append(Sample(name, block, position, taken, tuple(flags)))
    return session


def table_of(session, names, baselines=("torch",), cold=False, moved=1000, stream=900):
    timed = rows.Timed(session, names, baselines, moved, stream, cold)
    return rows.table(timed, RULES, np.random.default_rng(0))


def row_of(table, name):
    return next(row for row in table["rows"] if row["impl"] == name)


def test_a_row_has_median_dispersion_rate_and_a_verdict_against_each_yardstick():
    session = session_of({"ours": 1e-6, "ours (A/A)": 1e-6, "torch": 2e-6, "reference": 4e-6})
    table = table_of(session, ["ours", "torch", "reference"], ["torch", "reference"])
    ours = row_of(table, "ours")
    assert ours["median"] == pytest.approx(1e-6, rel=1e-3)
    assert ours["p10"] <= ours["low"] <= ours["median"] <= ours["high"] <= ours["p90"]
    assert ours["samples"] == 50
    assert ours["bytes_per_second"] == pytest.approx(1e9, rel=1e-3)
    assert ours["against"]["torch"]["estimate"] == pytest.approx(0.5, rel=1e-3)
    assert ours["against"]["torch"]["text"].startswith("faster 2.000")
    assert ours["against"]["reference"]["word"] == "faster"
    assert "torch" not in row_of(table, "torch")["against"]
    assert row_of(table, "reference")["against"]["torch"]["word"] == "slower"


def test_no_verdict_is_spoken_under_a_biased_control():
    session = session_of({"ours": 1e-6, "ours (A/A)": 1.03e-6, "torch": 2e-6})
    table = table_of(session, ["ours", "torch"])
    assert table["control"]["biased"] is True
    against = row_of(table, "ours")["against"]["torch"]
    assert against["word"] == "inconclusive"
    assert "A/A control biased: 1.03" in against["text"]
    assert against["estimate"] == pytest.approx(0.5, rel=1e-3), "the interval is kept"
    assert table["unsaid"] == table["control"]["text"]
    alone = table_of(session_of({"ours": 1e-6, "ours (A/A)": 1.03e-6}), ["ours"])
    assert alone["unsaid"], "nor do times stand alone that a biased clock took"


def test_under_a_coarse_control_what_is_clearly_larger_is_said():
    seconds = {"ours": 1e-6, "ours (A/A)": 1e-6, "torch": 2e-6, "close": 1.01e-6}
    table = table_of(session_of(seconds, noise=0.05), ["ours", "close", "torch"])
    assert (table["control"]["held"], table["control"]["biased"]) == (False, False)
    assert row_of(table, "ours")["against"]["torch"]["word"] == "faster"
    assert "; A/A resolves " in row_of(table, "ours")["against"]["torch"]["text"]
    assert table["unsaid"] is None


def test_a_table_of_which_nothing_could_be_said_says_why():
    close = session_of({"ours": 1e-6, "ours (A/A)": 1e-6, "torch": 1.01e-6}, noise=0.05)
    table = table_of(close, ["ours", "torch"])
    assert {row["against"]["torch"]["word"] for row in table["rows"] if row["against"]} == {"inconclusive"}
    assert table["unsaid"] == table["control"]["text"]
    edge = session_of({"ours": 1e-6, "ours (A/A)": 1e-6, "torch": 1.009e-6}, noise=5e-3)
    found = table_of(edge, ["ours", "torch"])
    assert row_of(found, "ours")["against"]["torch"]["word"] == "inconclusive"
    assert found["unsaid"] is None, "a ratio on the edge of the band, under a control that held, is a finding"
    assert table_of(close, ["ours", "torch"], baselines=())["unsaid"] is None, "no comparison was asked for"


def test_no_verdict_is_spoken_without_a_control_or_with_too_few_blocks():
    alone = table_of(session_of({"ours": 1e-6, "torch": 2e-6}), ["ours", "torch"])
    assert alone["control"] is None
    assert row_of(alone, "ours")["against"]["torch"]["text"] == "inconclusive (no A/A control)"
    few = table_of(session_of({"ours": 1e-6, "ours (A/A)": 1e-6, "torch": 2e-6}, blocks=19), ["ours", "torch"])
    assert row_of(few, "ours")["against"]["torch"]["text"] == "inconclusive (19 blocks, verdicts need 20)"


@pytest.mark.case("B70")
def test_a_cold_time_below_the_stream_is_invalid_and_a_warm_one_is_not():
    seconds = {"skips": 0.5e-6, "skips (A/A)": 0.5e-6, "torch": 2e-6, "stream": 1e-6}
    cold = table_of(session_of(seconds), ["skips", "torch"], cold=True)
    skips = row_of(cold, "skips")
    assert skips["status"] == "failed"
    assert skips["detail"].startswith("invalid: faster than a plain stream")
    assert skips["against"] == {}, "an invalid time wins nothing"
    assert skips["share_of_stream"]["estimate"] == pytest.approx(2.0, rel=1e-3)
    assert row_of(cold, "torch")["status"] == "passed"
    warm = table_of(session_of(seconds), ["skips", "torch"], cold=False)
    assert row_of(warm, "skips")["status"] == "passed"


def test_a_cold_time_at_the_streams_is_valid_though_it_is_a_hair_faster():
    seconds = {"ours": 0.97e-6, "ours (A/A)": 0.97e-6, "stream": 1e-6}
    assert row_of(table_of(session_of(seconds), ["ours"], cold=True), "ours")["status"] == "passed"


def test_the_streams_rate_is_its_own_bytes_over_its_own_time():
    table = table_of(session_of({"ours": 1e-6, "ours (A/A)": 1e-6, "stream": 1e-6}), ["ours"], cold=True)
    assert table["stream"]["bytes_per_second"] == pytest.approx(9e8, rel=1e-3)


def test_more_than_ten_times_faster_is_marked_suspect():
    table = table_of(session_of({"ours": 1e-6, "ours (A/A)": 1e-6, "torch": 11e-6}), ["ours", "torch"])
    ours = row_of(table, "ours")
    assert ours["flags"] == ["suspect"]
    assert ours["against"]["torch"]["text"].endswith("suspect: more than moving fewer bytes explains")


def test_outliers_are_counted_flagged_and_kept():
    session = session_of({"ours": 1e-6, "ours (A/A)": 1e-6})
    spiked = [s if i % 12 else Sample(s.entry, s.block, s.position, 9e-6) for i, s in enumerate(session.samples)]
    session.samples[:] = spiked
    ours = row_of(table_of(session, ["ours"]), "ours")
    assert ours["outliers"]["severe"] >= 8
    assert ours["samples"] == 50
    assert ours["flags"] == ["noisy"]


def test_starved_samples_are_counted():
    session = session_of({"ours": 1e-6, "ours (A/A)": 1e-6}, flags=[STARVED])
    assert row_of(table_of(session, ["ours"]), "ours")["starved"] == 50


def test_who_left_the_session_has_no_number_and_is_nobodys_yardstick():
    session = session_of({"ours": 1e-6, "ours (A/A)": 1e-6, "torch": 2e-6})
    session.failures["torch"] = "y[3] is NaN"
    table = table_of(session, ["ours", "torch"])
    assert [row["impl"] for row in table["rows"]] == ["ours"]
    assert row_of(table, "ours")["against"] == {}


def test_sampling_goes_on_until_the_control_is_in_the_band_and_narrow():
    rng = np.random.default_rng(0)
    good = session_of({"ours": 1e-6, "ours (A/A)": 1e-6})
    wide = session_of({"ours": 1e-6, "ours (A/A)": 1e-6}, noise=0.03)
    apart = session_of({"ours": 1e-6, "ours (A/A)": 1.02e-6})
    few = session_of({"ours": 1e-6, "ours (A/A)": 1e-6}, blocks=RULES.min_blocks - 1)
    assert rows.twin_held(good, RULES, rng)
    assert not rows.twin_held(wide, RULES, rng)
    assert not rows.twin_held(apart, RULES, rng)
    assert not rows.twin_held(few, RULES, rng), "so few blocks carry no verdict"
    assert rows.twin_held(session_of({"ours": 1e-6}), RULES, rng), "no control, nothing to wait for"


def test_over_all_cells_the_mean_is_geometric_the_worst_is_shown_and_missing_numbers_count():
    cells = []
    for name, seconds in (("a", {"ours": 1e-6, "torch": 2e-6}), ("b", {"ours": 2e-6, "torch": 1e-6})):
        made = table_of(session_of(seconds | {"ours (A/A)": seconds["ours"]}), ["ours", "torch"])
        cells.append({"cell": name, "tables": [{"perimeter": "forward", "measure": "gpu", "cache": "cold"} | made]})
    refused = {"impl": "ours", "status": "refused", "detail": "", "against": {}, "flags": []}
    table = {"perimeter": "forward", "measure": "gpu", "cache": "cold", "rows": [refused]}
    cells.append({"cell": "c", "tables": [table]})
    (ours,) = rows.overall(cells, ["torch"])
    assert ours["speedup"] == pytest.approx(1.0, rel=1e-3), "2 and 1/2"
    assert ours["worst"]["cell"] == "b"
    assert ours["worst"]["speedup"] == pytest.approx(0.5, rel=1e-3)
    assert (ours["cells"], ours["faster"], ours["slower"], ours["no number"]) == (3, 1, 1, 1)
