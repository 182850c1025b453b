"""What a run comes to: which tables make it inconclusive, and what is said of its controls. Tables are made by hand."""

import pytest

from rmsnorm_cli.bench import summary


def cells_with(word, held=True, unsaid=None, impl="ours", control=True):
    row = {"impl": impl, "status": "passed", "against": {"torch": {"word": word}}}
    found = {"held": held, "biased": False, "resolution": 0.004 if held else 0.03, "holds_1": True}
    return [{"tables": [{"rows": [row], "control": found if control else None, "unsaid": unsaid}]}]


@pytest.mark.parametrize(
    ("cells", "gate", "inconclusive"),
    [
        (cells_with("faster", held=False), None, 0),
        (cells_with("inconclusive", held=False), None, 0),
        (cells_with("inconclusive", held=False, unsaid="A/A control resolves 3 %"), None, 1),
        (cells_with("inconclusive", held=False), "torch", 1),
        (cells_with("inconclusive", control=False), "torch", 1),
        (cells_with("inconclusive", held=True), "torch", 0),
        (cells_with("faster", held=False), "torch", 0),
        (cells_with("inconclusive", held=False, impl="reference"), "torch", 0),
        (cells_with("inconclusive", held=False), "compile", 0),
    ],
)
def test_a_table_is_inconclusive_where_it_says_nothing_or_where_the_question_of_the_gate_stays_open(
    cells, gate, inconclusive
):
    """Where the control held, a ratio on the band's edge answers the gate: it is not shown to be slower."""
    assert summary.counts(cells, gate)["inconclusive"] == inconclusive
    assert summary.counts(cells, gate)["passed"] == 1


def test_controls_are_counted_by_how_they_came_out_and_the_coarsest_is_named():
    cells = cells_with("faster") + cells_with("faster", held=False) + cells_with("faster", control=False)
    biased = cells_with("inconclusive", held=False)
    biased[0]["tables"][0]["control"].update(biased=True, resolution=0.5, holds_1=False)
    found = summary.controls(cells + biased)
    assert found == {"tables": 3, "held": 1, "biased": 1, "hold_1": 2, "coarsest": 0.03}
    assert summary.controls([])["coarsest"] is None


def test_first_calls_are_added_up_over_cells():
    cells = [{"first_calls": {"a": 1.0, "b": 2.0}}, {"first_calls": {"a": 0.5}}, {"first_calls": {}}]
    assert summary.first_calls(cells) == {"a": 1.5, "b": 2.0}
