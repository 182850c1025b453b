"""The oracle in chunks of rows: it judges what the whole one judges, and says where a wrong element lies."""

import pytest
import torch

from rmsnorm_cli.bench.answers import Answers
from rmsnorm_cli.bench.workload import Buffers, Cell
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.kernels import reference

EPS = 1e-6


def inputs_of(cell):
    return Buffers(cell, 1, "cpu", 3).pristine()


def outputs_of(inputs):
    y = reference.forward(inputs.x, inputs.gamma, EPS)
    dx, dgamma = reference.backward(inputs.dy, inputs.x, inputs.gamma, EPS)
    return {"y": y, "dx": dx, "dgamma": dgamma}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounding", ["fp32", "llama"])
@pytest.mark.parametrize("chunk", [1, 33 * 4, 33 * 5, 10**6])
def test_chunks_of_any_number_of_rows_judge_as_the_whole_does(dtype, rounding, chunk):
    """13 rows in chunks of 1, 4, 5 (a last one of 3) and 13: the same worst error, to the last bit of float64 sums."""
    inputs = inputs_of(Cell(13, 33, dtype))
    whole, parts = Answers(inputs, EPS, rounding), Answers(inputs, EPS, rounding, chunk)
    for what, got in outputs_of(inputs).items():
        one, other = whole.judge(what, got), parts.judge(what, got)
        assert one.ok is other.ok
        assert one.worst == pytest.approx(other.worst, rel=1e-9)


@pytest.mark.parametrize("what", ["y", "dx", "dgamma"])
@pytest.mark.parametrize("row", [0, 7, 12])
def test_one_wrong_element_in_any_chunk_is_found(what, row):
    inputs = inputs_of(Cell(13, 33, "float32"))
    got = outputs_of(inputs)[what].clone()
    place = (5,) if what == "dgamma" else (row, 5)
    got[place] += 0.5
    found = Answers(inputs, EPS, "fp32", 33 * 5).judge(what, got)
    assert not found.ok
    if what != "dgamma":
        told = {0: "first wrong element [0, 5]", 7: "from row 5 on, as row 0: first wrong element [2, 5]"}
        told[12] = "from row 10 on, as row 0: first wrong element [2, 5]"
        assert found.detail.startswith(told[row])


@pytest.mark.parametrize("what", ["y", "dx"])
def test_what_does_not_fit_is_refused_before_any_value_is_looked_at(what):
    inputs = inputs_of(Cell(13, 33, "float32"))
    answers = Answers(inputs, EPS, "fp32", 33)
    right = outputs_of(inputs)[what]
    for wrong in (right[:12], right.double(), right.expand(1, 13, 33), None):
        assert not answers.judge(what, wrong).ok


def test_no_more_than_a_chunk_is_computed_in_float64_at_once(monkeypatch):
    asked = []
    oracle = cases.oracle
    monkeypatch.setattr(cases, "oracle", lambda inputs, *more: asked.append(inputs.x.numel()) or oracle(inputs, *more))
    inputs = inputs_of(Cell(1000, 33, "float32"))
    answers = Answers(inputs, EPS, "fp32", 33 * 100)
    for what, got in outputs_of(inputs).items():
        assert answers.judge(what, got).ok
    assert max(asked) == 33 * 100
    assert sum(asked) == 3 * 1000 * 33, "once for dgamma, once for y, once for dx"


def test_dgamma_of_many_chunks_is_their_sum_and_not_their_mean():
    inputs = inputs_of(Cell(64, 8, "float32"))
    answers = Answers(inputs, EPS, "fp32", 8)
    assert not answers.judge("dgamma", outputs_of(inputs)["dgamma"] / 64).ok
    assert not answers.judge("dgamma", torch.zeros(8)).ok
