"""The table of reported cases is whole: every case has a test, every mark a case, docs/immunity.md names them all."""

import tomllib
from pathlib import Path

CASES = tomllib.loads((Path(__file__).parent / "cases.toml").read_text(encoding="utf-8"))


def test_every_reported_case_is_covered_and_every_mark_is_of_a_case(covering):
    assert {identifier for identifier in CASES if not covering.get(identifier)} == set()
    assert covering.keys() <= CASES.keys()


def test_every_case_says_what_goes_wrong_what_is_right_and_where_it_was_reported():
    for identifier, case in CASES.items():
        assert set(case) == {"kind", "case", "right", "source"}, identifier
        assert all(text and "|" not in text for text in case.values()), identifier


def test_the_committed_table_has_every_case_and_no_test_that_is_gone(committed_table, fresh_table):
    """If not, write it anew: pytest -m case --immunity=docs/immunity.md. Tests may be newer than the last run."""
    assert committed_table.keys() == fresh_table.keys()
    for identifier, (wrong, right, tests, *results) in committed_table.items():
        assert [wrong, right] == fresh_table[identifier][:2], identifier
        named, there = set(tests.split("<br>")), set(fresh_table[identifier][2].split("<br>"))
        assert named <= there, identifier
        assert "failed" not in " ".join(results), identifier
