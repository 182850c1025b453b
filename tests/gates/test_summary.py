"""Claims about `scopes` of the JSON document, and about which gates a choice of scopes selects."""

import json

from rmsnorm_cli.gates import GATES, scopes, selected
from rmsnorm_cli.results import STATUSES, CaseResult, folded, strict_json


def verdict(status, worst=None, case="a", scope="forward", gate="declared tolerance", dtype="float32", impl="rowwise"):
    return CaseResult(impl, "interpreter", scope, gate, dtype, case, status, worst)


def test_one_entry_for_each_implementation_scope_gate_and_dtype():
    entries = scopes(
        [
            verdict("passed", 0.1),
            verdict("passed", 0.3, "b"),
            verdict("passed", dtype="float16"),
            verdict("passed", scope="dx"),
            verdict("passed", gate="exact class"),
            verdict("passed", impl="fused"),
        ]
    )
    assert len(entries) == 5
    first = entries[0]
    assert (first["impl"], first["execution"], first["scope"], first["gate"], first["dtype"]) == (
        "rowwise", "interpreter", "forward", "declared tolerance", "float32",
    )  # fmt: skip
    assert first["cases"] == first["passed"] == 2
    assert first["worst"] == {"value": 0.3, "case": "b"}


def test_a_table_joins_the_dtypes_of_which_all_passed_and_hides_nothing_else():
    dtypes = ("float32", "float16", "bfloat16", "float64")
    entries = scopes(
        [
            *(
                verdict("passed", worst, dtype, dtype=dtype)
                for dtype, worst in zip(dtypes, (0.1, 0.7, 0.3, None), strict=True)
            ),
            verdict("refused", None, "c", dtype="bfloat16"),
            verdict("passed", 0.9, "d", scope="dx", dtype="float16"),
        ]
    )
    joined, refused, other = folded(entries)
    assert (joined["dtype"], joined["cases"], joined["passed"]) == ("float32, float16, float64", 3, 3)
    assert joined["worst"] == {"value": 0.7, "case": "float16"}
    assert (refused["dtype"], refused["cases"], refused["passed"], refused["refused"]) == ("bfloat16", 2, 1, 1)
    assert (other["scope"], other["dtype"]) == ("dx", "float16")
    assert len(entries) == 5, "what the JSON document holds is not touched"
    assert entries[0]["dtype"] == "float32"


def test_every_status_is_counted():
    (entry,) = scopes([verdict(status) for status in STATUSES])
    assert all(entry[status] == 1 for status in STATUSES)
    assert entry["cases"] == len(STATUSES)


def test_the_worst_is_the_worst_failure_even_beside_larger_numbers_that_passed():
    (entry,) = scopes([verdict("passed", 0.9, "a"), verdict("failed", 1.5, "b"), verdict("failed", 40.0, "c")])
    assert entry["worst"] == {"value": 40.0, "case": "c"}


def test_a_failure_without_a_number_is_still_the_worst():
    (entry,) = scopes([verdict("passed", 0.9, "a"), verdict("failed", None, "b")])
    assert entry["worst"] == {"value": None, "case": "b"}


def test_without_any_number_there_is_no_worst():
    assert scopes([verdict("passed")])[0]["worst"] is None
    assert scopes([]) == []


def test_the_entries_are_strict_json():
    text = strict_json(scopes([verdict("failed", float("inf"))]))
    assert json.loads(text)[0]["failed"] == 1
    assert "Infinity" not in text


def test_scopes_select_their_gates_in_order():
    assert [gate.NAME for gate in selected(["contract"])] == ["contract"]
    numeric = ["exact class", "declared tolerance", "rounding budget", "fit"]
    assert [gate.NAME for gate in selected(["dgamma"])] == numeric
    everything = selected(["forward", "dx", "dgamma", "contract", "properties"])
    assert everything == GATES
    assert selected([]) == ()


def test_gates_have_distinct_names():
    assert len({gate.NAME for gate in GATES}) == len(GATES)
