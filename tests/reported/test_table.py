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


def test_the_committed_table_names_the_cases_and_tests_of_today(immunity_table, fresh_table):
    """If not, write it anew: pytest -m case --immunity docs/immunity.md."""
    assert immunity_table == fresh_table
