"""Claims about the determinism gate: what ours must keep, and what is reported of others."""

import functools
from dataclasses import replace

import pytest
import torch

from rmsnorm_cli.gates import determinism
from rmsnorm_cli.gates.candidates import RIGHT
from rmsnorm_cli.gates.determinism import Repeated
from rmsnorm_cli.inputs import cases


@pytest.fixture
def question():
    return Repeated(cases.case((17, 33), "float32", "spread", 1e-6, 0), 5)


def shuffled(x, r, dy):
    return functools.reduce(torch.add, (dy * x * r)[torch.randperm(len(x))])


UNORDERED = replace(RIGHT, dgamma=shuffled).norm()


def by_batch(x, gamma, eps):
    """Choose the order of the row's sum by the number of rows."""
    if len(x) > 8:
        return RIGHT.norm()(x, gamma, eps)
    return replace(RIGHT, y=lambda x, r, gamma: x * r * gamma * (1 + 2**-23)).norm()(x, gamma, eps)


def by_place(x, gamma, eps):
    """Treat the first row of a batch by another path."""
    top = replace(RIGHT, y=lambda x, r, gamma: x * r * gamma * (1 + 2**-23)).norm()(x[:1], gamma, eps)
    return torch.cat([top, RIGHT.norm()(x[1:], gamma, eps)]) if len(x) > 1 else top


def words(results):
    return [result.status for result in results]


def test_rowwise_has_the_same_bits_each_time_and_in_every_batch(ask, rowwise):
    question = Repeated(cases.case((5, 65), "float16", "spread", 1e-6, 0), 3)
    assert words(ask(determinism, rowwise, question, "interpreter")) == ["passed", "passed"]


def test_a_right_candidate_passes(ask, impl, question):
    assert words(ask(determinism, impl(RIGHT.norm(), ours=True), question)) == ["passed", "passed"]


def test_an_unordered_sum_fails_where_determinism_is_promised(ask, impl, question):
    for promise in ({"ours": True}, {"deterministic": True}):
        first = ask(determinism, impl(UNORDERED, **promise), question)[0]
        assert first.status == "failed"
        assert "dgamma of run" in first.detail


def test_an_unordered_sum_is_reported_of_others(ask, impl, question):
    first = ask(determinism, impl(UNORDERED), question)[0]
    assert first.status == "skipped"
    assert "reported, not judged" in first.detail
    assert "largest difference" in first.detail


@pytest.mark.parametrize("norm", [by_batch, by_place])
def test_a_row_whose_bits_depend_on_its_batch_is_seen(ask, impl, question, norm):
    assert words(ask(determinism, impl(norm, ours=True), question)) == ["passed", "failed"]


def test_a_gpu_computes_more_rows_alone_since_a_last_bit_shows_in_some_rows_only(impl, question, device):
    """Sum a single row in another order only if it is the sixth, as a row whose last bit happens to differ."""
    sixth = cases.tensors(question.case, device).x[5]

    def norm(x, gamma, eps):
        if len(x) == 1 and torch.equal(x[0], sixth):
            return replace(RIGHT, y=lambda x, r, gamma: x * r * gamma * (1 + 2**-23)).norm()(x, gamma, eps)
        return RIGHT.norm()(x, gamma, eps)

    for execution, status in (("interpreter", "passed"), ("cuda", "failed")):
        assert words(determinism.check(impl(norm, ours=True), question, execution, device, {})) == ["passed", status]


def test_a_result_left_over_from_the_call_before_is_seen(ask, impl, question):
    total = [0.0]

    def growing(x, gamma, eps):
        total[0] += 1e-6
        return RIGHT.norm()(x, gamma, eps) + total[0]

    assert words(ask(determinism, impl(growing, ours=True), question))[0] == "failed"


@pytest.mark.usefixtures("without_gpu")
def test_the_plan_repeats_as_often_as_the_settings_say(settings, rowwise):
    asked = determinism.plan(settings(repeats=7), rowwise, "interpreter")
    assert {question.repeats for question in asked} == {7}
    assert {question.dtype for question in asked} == {"float32", "float16"}


def test_all_repeats_are_run(ask, impl, question):
    calls = []

    def norm(x, gamma, eps):
        calls.append(len(x))
        return RIGHT.norm()(x, gamma, eps)

    ask(determinism, impl(norm), question)
    assert calls.count(17) == 5 + 1  # five runs and the reversed batch


def test_one_buffer_for_all_results_does_not_hide_that_they_differ(ask, impl, question):
    """An implementation that hands out the same memory each time: compared with itself it would always be equal."""
    buffers, calls = {}, []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            calls.append(1)
            buffer = buffers.setdefault(tuple(y.shape), torch.empty_like(y))
            return buffer.copy_(y + 1e-6 * len(calls))

        @staticmethod
        def backward(ctx, dy):
            return dy

    def norm(x, gamma, eps):
        return Kept.apply(RIGHT.norm()(x, gamma, eps))

    assert words(ask(determinism, impl(norm, ours=True), question))[0] == "failed"
