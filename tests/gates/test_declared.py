"""Claims about the declared tolerance gate: its plan, one run a case, its verdict words, and the mistakes it names."""

import signal
from collections import Counter

import pytest
import torch

from rmsnorm_cli.errors import Interrupted
from rmsnorm_cli.gates import candidates, declared, hypotheses
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.tolerances import DECLARED
from rmsnorm_cli.kernels import implementation
from rmsnorm_cli.kernels.contract import INTERPRETED
from rmsnorm_cli.kernels.foreign_common import ForeignRefused, ForeignTimeout
from rmsnorm_cli.kernels.tables import CHUNK_TILE, backward_table


def statuses(results):
    return {result.scope: result.status for result in results}


@pytest.mark.usefixtures("without_gpu")
def test_rowwise_is_asked_at_least_72_cases_over_fp32_and_fp16(settings, rowwise):
    asked = declared.plan(settings(), rowwise, "interpreter")
    assert len(asked) >= 72
    assert {case.dtype for case in asked} == {"float32", "float16"}
    assert {case.N for case in asked} >= {1, 2, 3, 31, 33, 127, 256, 257, 1000, 1023, 1024, 1025, 4096}
    assert {case.M for case in asked} >= {1, 17, 67}
    assert {case.distribution for case in asked} == set(cases.DISTRIBUTIONS)


@pytest.mark.usefixtures("without_gpu")
def test_rowwise_is_asked_nothing_outside_its_contract(settings, rowwise):
    asked = declared.plan(settings(), rowwise, "interpreter")
    assert all(len(case.shape) == 2 and case.N <= 4096 and case.gamma_dtype is None for case in asked)
    assert {case.layout for case in asked} == {"contiguous", "misaligned", "expanded_dy", "sliced_dy", "transposed_dy"}


def test_an_implementation_without_a_contract_is_asked_everything(settings, impl):
    asked = declared.plan(settings(), impl(candidates.eager), "cpu")
    assert {case.layout for case in asked} == set(cases.LAYOUTS)
    assert {case.N for case in asked} >= set(cases.WIDE_COLS)
    assert {case.gamma_dtype for case in asked} == {None, "none", "float32"}
    assert sum(case.dtype == "bfloat16" for case in asked) >= 36


@pytest.mark.skipif(not INTERPRETED, reason="a GPU takes such rows in chunks only where it cannot share them")
def test_rows_in_chunks_are_more_than_one_step_takes(settings):
    """Otherwise a loop over tiles of rows that ends too early would be seen nowhere."""
    step = CHUNK_TILE[0]
    asked = declared.plan(settings(), implementation("fused"), "interpreter")
    tall = {case.M for case in asked if backward_table(case.N, 4).path == "shared" and case.dtype == "float32"}
    assert any(rows > step and rows % step for rows in tall)


def test_settings_narrow_the_plan(settings, rowwise):
    narrow = settings(rows=(3,), cols=(5,), dtypes=("float16",), distributions=("tiny",), layouts=("contiguous",))
    assert [case.id for case in declared.plan(narrow, rowwise, "interpreter")] == ["float16/3x5/tiny/contiguous"]


@pytest.mark.usefixtures("without_gpu")
def test_the_seed_and_eps_of_the_run_reach_every_case(settings, rowwise):
    asked = declared.plan(settings(), rowwise, "interpreter")
    assert {case.seed for case in asked} == {0}
    assert {case.eps for case in asked} == {1e-6, cases.EXACT_EPS, 1e-8, 1e-3}  # the last two belong to by_eps


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rowwise_passes_on_a_padded_width(ask, rowwise, small, dtype):
    found = ask(declared, rowwise, small("spread", (3, 257), dtype), "interpreter")
    assert statuses(found) == {"forward": "passed", "dx": "passed", "dgamma": "passed"}
    assert all(result.execution in ("interpreter", "cuda") for result in found)
    assert all(0 <= result.worst < 0.5 for result in found)


def test_one_forward_and_one_backward_serve_three_verdicts(ask, impl, small):
    calls = Counter()

    def norm(x, gamma, eps):
        calls["forward"] += 1
        y = candidates.eager(x, gamma, eps)
        y.register_hook(lambda _: calls.update(["backward"]))
        return y

    assert len(ask(declared, impl(norm), small())) == 3
    assert calls == {"forward": 1, "backward": 1}


def test_without_gamma_there_is_no_verdict_on_dgamma(ask, impl, small):
    assert list(statuses(ask(declared, impl(candidates.eager), small(gamma_dtype="none")))) == ["forward", "dx"]


def test_an_fp32_gamma_beside_fp16_is_judged_as_fp32(ask, impl, small):
    rounded = small(dtype="float16", gamma_dtype="float32", shape=(17, 257))

    def in_fp16(x, gamma, eps):
        return candidates.eager(x, gamma.half(), eps)

    found = statuses(ask(declared, impl(candidates.eager), rounded))
    assert found == {"forward": "passed", "dx": "passed", "dgamma": "passed"}
    assert statuses(ask(declared, impl(in_fp16), rounded))["dgamma"] == "failed"


def raising(kind, text="no"):
    def norm(x, gamma, eps):
        raise kind(text)

    return norm


@pytest.mark.parametrize(
    ("norm", "ours", "status"),
    [
        (raising(ValueError), False, "refused"),
        (raising(ValueError), True, "failed"),
        (raising(MemoryError), False, "error"),
        (raising(torch.OutOfMemoryError), False, "error"),
        (raising(ForeignTimeout), False, "error"),
        (raising(ForeignRefused), False, "refused"),
        (raising(RuntimeError, "CUDA error: an illegal memory access"), False, "error"),
        (lambda x, gamma, eps: None, False, "failed"),
        (candidates.cut_off, False, "failed"),
        (candidates.wrong_dtype, False, "failed"),
    ],
)
def test_what_is_raised_or_missing_gets_its_own_word(ask, impl, small, norm, ours, status):
    found = ask(declared, impl(norm, ours=ours), small())
    assert statuses(found)["dx"] == status
    assert all(result.detail for result in found if result.status == status)


def test_a_backward_that_raises_leaves_the_forward_judged(ask, impl, small):
    def norm(x, gamma, eps):
        y = candidates.eager(x, gamma, eps)
        y.register_hook(lambda _: (_ for _ in ()).throw(NotImplementedError("no")))
        return y

    found = statuses(ask(declared, impl(norm), small()))
    assert found == {"forward": "passed", "dx": "refused", "dgamma": "refused"}


def test_an_interrupt_is_not_the_implementations_doing(ask, impl, small):
    with pytest.raises(KeyboardInterrupt):
        ask(declared, impl(raising(KeyboardInterrupt)), small())


def test_a_signal_passes_through_code_that_catches_every_exception(ask, impl, small):
    """A compiler wraps whatever is raised inside it; SIGTERM during a compilation must end the run all the same."""

    def swallowing(x, gamma, eps):
        try:
            raise Interrupted(signal.SIGTERM)
        except Exception as problem:
            raise RuntimeError("the backend failed") from problem

    with pytest.raises(Interrupted):
        ask(declared, impl(swallowing), small())


def test_a_gradient_that_is_missing_fails(ask, impl, small):
    def norm(x, gamma, eps):
        return candidates.eager(x, gamma.detach(), eps)

    found = statuses(ask(declared, impl(norm), small()))
    assert found == {"forward": "passed", "dx": "passed", "dgamma": "failed"}


def test_an_implementation_that_spoils_its_inputs_is_judged_by_the_unspoilt_ones(ask, impl, small):
    def norm(x, gamma, eps):
        x.data.mul_(3)
        return candidates.eager(x, gamma, eps * 9)  # right for what x has become

    found = statuses(ask(declared, impl(norm), small()))
    assert found["dx"] == "failed"


def test_a_failure_says_where_and_how_far(ask, impl, small):
    wrong = ask(declared, impl(candidates.ONE_WRONG.norm()), small())[0]
    assert wrong.status == "failed"
    assert wrong.extra["index"] == [4, 32]
    assert wrong.extra["got"] == pytest.approx(wrong.extra["want"] + 0.5)
    assert wrong.extra["regions"]["last row"] == pytest.approx(1 / 33)
    assert "last row, tail column" in wrong.detail
    assert wrong.worst > 1


TABLES = {"forward": hypotheses.FORWARD, "dx": hypotheses.DX, "dgamma": hypotheses.DGAMMA}
EVERY = [(scope, name) for scope, table in TABLES.items() for name in table]


@pytest.mark.parametrize(("scope", "name"), EVERY)
def test_each_mistake_is_named_when_it_is_made(scope, name, small):
    """Feed the predicted wrong result itself: it must differ from the right one and be recognised."""
    inputs = cases.tensors(small("spread", (5, 33), eps=1e-3))
    terms = hypotheses.Terms(*(tensor.double() for tensor in (inputs.x, inputs.gamma, inputs.dy)), 1e-3)
    got = TABLES[scope][name](terms).float()
    named = hypotheses.explain(scope, got, inputs, 1e-3, DECLARED["float32"])
    assert name in named.split("; or ")
    want = cases.oracle(inputs, 1e-3)
    right = {"forward": want.y, "dx": want.dx, "dgamma": want.dgamma}[scope]
    assert float((got.double() - right).norm() / right.norm()) > 1e-4


def test_a_right_result_is_explained_by_no_mistake(small):
    inputs = cases.tensors(small("spread", (5, 33), eps=1e-3))
    want = cases.oracle(inputs, 1e-3)
    for scope, right in (("forward", want.y), ("dx", want.dx), ("dgamma", want.dgamma)):
        assert hypotheses.explain(scope, right.float(), inputs, 1e-3, DECLARED["float32"]) == ""


def test_the_padded_block_is_computed_as_a_kernel_would(small):
    terms = hypotheses.Terms(torch.ones(1, 257), torch.ones(257), torch.ones(1, 257), 1e-6)
    assert terms.B == 512
    y = hypotheses.FORWARD["the mean square is divided by the padded block B, not by N"](terms)
    assert float(y[0, 0]) == pytest.approx(1.411458, abs=1e-6)


def test_inputs_are_shared_not_copied(impl, small):
    """The candidate must get the case's own strides, not a dense copy of them."""
    seen = []

    def norm(x, gamma, eps):
        seen.append(x.stride())
        return candidates.eager(x, gamma, eps)

    from rmsnorm_cli.gates.gate import answer

    inputs = cases.tensors(small(layout="sliced_rows"))
    assert isinstance(inputs, Inputs)
    answer(impl(norm), inputs, 1e-6)
    assert seen == [(41, 1)]
