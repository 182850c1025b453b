"""Claims about the contract gate: refusals in time and by name, odd but right calls that work, honest foreigners."""

import pytest
import torch

from rmsnorm_cli.gates import candidates, contract
from rmsnorm_cli.gates.refusals import questions
from rmsnorm_cli.kernels.autograd import count
from rmsnorm_cli.kernels.contract import ContractError

ROWWISE = {question.id: question for question in questions("rowwise", cuda=False)}
ANYONE = {question.id: question for question in questions("any", cuda=False)}
FUSED = {question.id: question for question in questions("fused", cuda=False)}


@pytest.mark.parametrize("name", ROWWISE)
def test_rowwise_keeps_its_contract(ask, rowwise, name):
    (verdict,) = ask(contract, rowwise, ROWWISE[name], "interpreter")
    assert verdict.status == "passed", verdict.detail
    assert verdict.scope == "contract"


def test_rowwise_is_asked_every_refusal_of_its_table():
    refused = [question for question in ROWWISE.values() if question.expect == "refuse"]
    assert {question.about for question in refused} == {"x", "gamma", "eps", "dy"}
    for word in ("4097 columns", "4097 rows", "bfloat16", "float64", "NaN", "bool", "strided", "transposed", "meta"):
        assert any(word in question.id for question in refused), word


def test_fused_must_do_what_rowwise_refuses_for_its_layout():
    for name in ("x of three dimensions", "x transposed", "gamma strided", "gamma None", "x float64"):
        assert ROWWISE[name].expect == "refuse"
        assert FUSED[name].expect == "work"


def test_the_plan_follows_the_implementations_name(settings, rowwise, impl):
    assert len(contract.plan(settings(), rowwise, "interpreter")) == len(ROWWISE)
    assert [question.id for question in contract.plan(settings(), impl(candidates.eager), "cpu")] == list(ANYONE)


def ours(behaviour):
    """Make a norm of ours that does something and then refuses with the words of a real refusal."""

    def norm(x, gamma, eps):
        behaviour(x, gamma)
        raise ContractError("gamma has shape (7,): it must be (8,)")

    return norm


FAULTS = {
    "x was changed": lambda x, gamma: x.data.add_(1),
    "gamma was changed": lambda x, gamma: gamma.data.zero_(),
    "a kernel was launched": lambda x, gamma: count("candidate", "forward"),
    "new memory was written": lambda x, gamma: torch.empty_like(x).zero_(),
}


@pytest.mark.parametrize("trace", FAULTS)
def test_a_refusal_that_comes_too_late_fails(ask, impl, trace):
    norm = ours(FAULTS[trace])
    (verdict,) = ask(contract, impl(norm, ours=True), ROWWISE["gamma one too short"])
    assert verdict.status == "failed"
    assert trace in verdict.detail


def test_a_refusal_in_time_passes(ask, impl):
    (verdict,) = ask(contract, impl(ours(lambda x, gamma: None), ours=True), ROWWISE["gamma one too short"])
    assert verdict.status == "passed"


def test_allocating_without_writing_is_no_trace(ask, impl):
    norm = ours(lambda x, gamma: torch.empty_like(x))
    assert ask(contract, impl(norm, ours=True), ROWWISE["gamma one too short"])[0].status == "passed"


def test_a_refusal_that_names_another_argument_fails(ask, impl):
    (verdict,) = ask(contract, impl(ours(lambda x, gamma: None), ours=True), ROWWISE["eps 0"])
    assert verdict.status == "failed"
    assert "does not name eps" in verdict.detail


def test_our_implementations_must_refuse_by_contract_error(ask, impl):
    def norm(x, gamma, eps):
        raise RuntimeError("The size of tensor gamma must match")

    (verdict,) = ask(contract, impl(norm, ours=True), ROWWISE["gamma one too short"])
    assert verdict.status == "failed"
    assert "RuntimeError" in verdict.detail


def test_a_foreign_exception_is_an_honest_refusal(ask, impl):
    (verdict,) = ask(contract, impl(candidates.native), ANYONE["gamma one too long"])
    assert verdict.status == "passed"


def test_an_answer_to_a_senseless_call_fails(ask, impl):
    (verdict,) = ask(contract, impl(candidates.forgetful), ANYONE["gamma one too long"])
    assert verdict.status == "failed"
    assert "no right answer" in verdict.detail


def test_rows_of_no_columns_may_be_refused_or_empty(ask, impl):
    def filled(x, gamma, eps):
        return torch.zeros(3, 1)

    question = ANYONE["x of no columns"]
    assert ask(contract, impl(candidates.native), question)[0].status == "passed"
    assert ask(contract, impl(filled), question)[0].status == "failed"


@pytest.mark.parametrize("name", [name for name, question in ANYONE.items() if question.expect == "work"])
def test_what_is_odd_but_right_works_and_is_judged(ask, impl, name):
    good, wrong = impl(candidates.native), impl(lambda x, gamma, eps: candidates.eager(x, gamma, eps * 1.5 + 1))
    assert ask(contract, good, ANYONE[name])[0].status == "passed"
    assert ask(contract, wrong, ANYONE[name])[0].status == ("passed" if name.startswith("no rows") else "failed")


def test_without_rows_a_missing_dgamma_or_a_nan_fails(ask, impl):
    """The mean over no rows is NaN; the sum is zero."""
    wrong = candidates.MEAN_OVER_ROWS.norm()
    (verdict,) = ask(contract, impl(wrong), ANYONE["no rows"])
    assert verdict.status == "failed"
    assert "dgamma" in verdict.detail
    assert "nan" in verdict.detail


def test_a_foreign_refusal_of_an_odd_call_is_reported_as_one(ask, impl):
    def two_dimensions(x, gamma, eps):
        if x.dim() != 2:
            raise NotImplementedError("2-D only")
        return candidates.eager(x, gamma, eps)

    assert ask(contract, impl(two_dimensions), ANYONE["x of one dimension"])[0].status == "refused"
    assert ask(contract, impl(two_dimensions, ours=True), ANYONE["x of one dimension"])[0].status == "failed"


def test_every_question_makes_its_call_on_the_device(device):
    for question in (*ROWWISE.values(), *FUSED.values(), *ANYONE.values()):
        call = question.make(device)
        tensors = [value for value in (call.x, call.gamma, call.dy) if isinstance(value, torch.Tensor)]
        assert {value.device.type for value in tensors} <= {torch.device(device).type, "meta"}


def test_on_a_gpu_tensors_left_on_the_cpu_are_asked_about_too():
    more = {question.id for question in questions("rowwise", cuda=True)} - set(ROWWISE)
    assert more == {"gamma on the CPU beside x on a GPU", "x and gamma on the CPU of a GPU machine"}
    assert len(questions("torch", cuda=True)) == len(ANYONE) + 1
