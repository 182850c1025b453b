"""Reports about verification suites themselves: comparisons that pass, references that are worse, inputs that hide."""

import pytest
import torch

from rmsnorm_cli.commands import verify
from rmsnorm_cli.config import load
from rmsnorm_cli.console import Console
from rmsnorm_cli.environment import Device
from rmsnorm_cli.gates import declared, memory
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.numerics import compare
from rmsnorm_cli.judging.tolerances import DECLARED
from rmsnorm_cli.kernels import Implementation, reference
from rmsnorm_cli.results import CaseResult, Outcome, count, overall


class Faulty(torch.autograd.Function):
    """The right formula with a mistake planted in y, dx or dgamma."""

    @staticmethod
    def forward(ctx, x, gamma, eps, mistake):
        """Return y, or what the mistake makes of it."""
        ctx.save_for_backward(x, gamma)
        ctx.eps, ctx.mistake = eps, mistake
        return mistake("y", reference.forward(x, gamma, eps), x, gamma, None, eps)

    @staticmethod
    def backward(ctx, dy):
        """Return dx and dgamma, or what the mistake makes of them."""
        x, gamma = ctx.saved_tensors
        dx, dgamma = reference.backward(dy, x, gamma, ctx.eps)
        dx = ctx.mistake("dx", dx, x, gamma, dy, ctx.eps)
        return dx, ctx.mistake("dgamma", dgamma, x, gamma, dy, ctx.eps), None, None


def planted(mistake):
    return Implementation("fake", lambda x, gamma, eps: Faulty.apply(x, gamma, eps, mistake))


def on(what, change):
    """Return a mistake that changes one of the three results and leaves the others right."""
    return lambda name, right, x, gamma, dy, eps: change(right.clone()) if name == what else right


def put(value):
    def change(tensor):
        tensor.view(-1)[tensor.numel() // 2 + 1] = value
        return tensor

    return change


FAKES = {
    "all NaN": lambda t: t.fill_(float("nan")),
    "one NaN": put(float("nan")),
    "one infinity": put(float("inf")),
    "one element of 4096 wrong": put(12.5),
    "zeros": lambda t: t.zero_(),
}


@pytest.mark.case("B64")
@pytest.mark.parametrize("what", ["y", "dx", "dgamma"])
@pytest.mark.parametrize("fake", FAKES)
def test_every_fake_result_fails_with_index_and_both_values(fake, what):
    """Through the gate that verify asks, each in its own scope, the others passing."""
    case = cases.case((16, 256) if what != "dgamma" else (3, 4096), "float32", "aligned", 1e-6, 0)
    verdicts = declared.check(planted(on(what, FAKES[fake])), case, "cpu", "cpu", DECLARED)
    status = {verdict.scope: verdict for verdict in verdicts}
    scope = {"y": "forward"}.get(what, what)
    assert {name for name, verdict in status.items() if verdict.status == "failed"} == {scope}
    seen = status[scope].extra
    want = cases.oracle(cases.tensors(case), case.eps)
    right = {"y": want.y, "dx": want.dx, "dgamma": want.dgamma}[what]
    assert seen["want"] == pytest.approx(float(right[tuple(seen["index"])]))
    assert str(seen["index"]).strip("[]").split(",")[0] in status[scope].detail


SHAPES = {
    "one row, to be broadcast": lambda t: t[:1],
    "one number a row": lambda t: t[:, :1],
    "transposed": lambda t: t.t().contiguous(),
    "flat": lambda t: t.flatten(),
    "empty": lambda t: t[:0],
    "another dtype": lambda t: t.double(),
    "16 bits": lambda t: t.half(),
}


@pytest.mark.case("B64")
@pytest.mark.parametrize("fake", SHAPES)
def test_right_numbers_of_another_shape_or_dtype_fail(fake):
    impl = Implementation("fake", lambda x, gamma, eps: SHAPES[fake](reference.forward(x, gamma, eps)))
    case = cases.case((5, 33), "float32", "aligned", 1e-6, 0)
    verdicts = {v.scope: v.status for v in declared.check(impl, case, "cpu", "cpu", DECLARED)}
    assert verdicts["forward"] == "failed"


@pytest.mark.case("B65")
def test_the_oracle_is_more_exact_than_a_right_kernel_and_a_stalled_sum_fails(same):
    """4096 rows of ones in bf16: the sum is 68415.966, a right kernel gives 68608, a bf16 sum over rows 65536."""
    x = torch.ones(4096, 2).bfloat16()
    dy = torch.where(torch.arange(4096) % 16 == 0, 256.0, 0.75)[:, None].expand(-1, 2).bfloat16()
    want = cases.oracle(Inputs(x, torch.ones(2).bfloat16(), dy), 1e-6).dgamma
    assert want.dtype == torch.float64
    same(want, [68415.966] * 2, atol=0, rtol=1e-8)
    right, stalled = torch.full((2,), 68608.0).bfloat16(), torch.full((2,), 65536.0).bfloat16()
    assert compare(right, want, DECLARED["bfloat16"], dtype=torch.bfloat16).ok
    assert not compare(stalled, want, DECLARED["bfloat16"], dtype=torch.bfloat16).ok
    assert not compare(stalled.float(), want, DECLARED["float32"], dtype=torch.float32).ok


def double_gamma(name, right, x, gamma, dy, eps):
    """Multiply gamma twice into the second term of dx."""
    if name != "dx":
        return right
    rstd = reference.statistics(x, eps)
    u = dy.float() * gamma.float()
    x_hat = x.float() * rstd
    return (rstd * (u - x_hat * (u * gamma.float() * x_hat).mean(-1, keepdim=True))).to(x.dtype)


def last_row_dropped(name, right, x, gamma, dy, eps):
    """Leave the last row out of dgamma."""
    flat = x.reshape(-1, x.shape[-1]), None if dy is None else dy.reshape(-1, x.shape[-1])
    return right if name != "dgamma" else reference.backward(flat[1][:-1], flat[0][:-1], gamma, eps)[1]


def dy_as_contiguous(name, right, x, gamma, dy, eps):
    """Read dy's memory from its start as if it were dense."""
    if name == "y" or dy.is_contiguous() or dy.untyped_storage().nbytes() < dy.numel() * dy.element_size():
        return right
    start = min(dy.storage_offset(), dy.untyped_storage().nbytes() // dy.element_size() - dy.numel())
    dense = dy.as_strided(dy.shape, torch.empty(dy.shape).stride(), start)
    return reference.backward(dense, x, gamma, eps)[name == "dgamma"]


def next_row_clobbered(name, right, x, gamma, dy, eps):
    """Store one element too many behind rows of odd width: it lands in column 0 of the next row."""
    if name == "y" and right.shape[-1] % 2:
        rows = right.reshape(-1, right.shape[-1])
        rows[1:, 0] = rows[:-1, -1]
    return right


def eps_outside(name, right, x, gamma, dy, eps):
    """Add eps to the root."""
    if name != "y":
        return right
    root = x.float().square().mean(-1, keepdim=True).sqrt()
    y = x.float() / (root + eps)
    return (y if gamma is None else y * gamma.float()).to(x.dtype)


def padded_divisor(name, right, x, gamma, dy, eps):
    """Divide by the next power of two."""
    N = x.shape[-1]
    return right if name != "y" else right * (2 ** (N - 1).bit_length() / N) ** 0.5


MISTAKES = (double_gamma, last_row_dropped, dy_as_contiguous, next_row_clobbered, eps_outside, padded_divisor)


def first_objection(impl, settings):
    """Return how many default cases it took until one failed, or None where all pass."""
    plan = [case for case in declared.plan(settings, impl, "cpu") if case.M * case.N <= 20_000]
    for number, case in enumerate(plan, start=1):
        if any(v.status == "failed" for v in declared.check(impl, case, "cpu", "cpu", DECLARED)):
            return number
    return None


@pytest.mark.case("B67")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_each_planted_mistake_is_caught_by_a_default_case(mistake):
    assert first_objection(planted(mistake), load("verify")) is not None


@pytest.mark.case("B67")
def test_no_default_case_objects_to_the_right_formula():
    """Otherwise the test above would pass for the wrong reason."""
    assert first_objection(planted(lambda name, right, *_: right), load("verify")) is None


@pytest.mark.case("B67")
def test_default_cases_have_what_hides_nothing():
    """Odd sizes, gradients in strides of their own, weights of both signs and away from one, rows of many scales."""
    settings = load("verify")
    plan = declared.plan(settings, Implementation("any", reference.forward), "cpu")
    assert {case.N % 2 for case in plan} == {0, 1}
    assert {"expanded_dy", "sliced_dy", "transposed_dy", "misaligned"} <= {case.layout for case in plan}
    weights = [cases.tensors(case).gamma for case in plan if case.distribution == "spread" and 2 < case.N < 300]
    for gamma in filter(lambda gamma: gamma is not None, weights):
        assert (gamma < 0).any()
        assert (gamma > 0).any()
        assert (gamma != 1).float().mean() > 0.9


def raising(kind):
    def norm(x, gamma, eps):
        raise kind("never")

    return Implementation("never", norm)


@pytest.mark.case("B68")
@pytest.mark.parametrize(
    ("kind", "status"), [(ValueError, "inconclusive"), (torch.OutOfMemoryError, "error")], ids=["refuses", "breaks"]
)
def test_an_implementation_that_never_answers_is_no_pass(kind, status, device):
    """What it raises is a row, the scopes that nobody judged are rows, and the whole is not 0."""
    settings = load("verify", options={"verify.only": ["forward", "dx"], "verify.rows": [1], "verify.cols": [3]})
    here = Device("auto", "cuda" if device != "cpu" else "interpreter", device, "here")
    results = list(verify.ask(raising(kind), settings, Console(quiet=True), here, DECLARED))
    counts = count(results)
    assert counts["passed"] == 0
    assert (overall(counts), Outcome(overall(counts), "cpu", counts).exit_code) == (status, 1)


@pytest.mark.case("B68")
@pytest.mark.parametrize("only", ["refused", "skipped", "inconclusive", "error", "failed", None])
def test_a_verdict_without_a_pass_is_no_pass(only):
    """All skipped, all refused, nothing at all: never `passed`, never 0; beside a pass each by its own rule."""
    made = [CaseResult("", "cpu", "forward", "", "", "", only)] if only else []
    alone = Outcome(overall(count(made)), "cpu", count(made))
    assert (alone.status != "passed", alone.exit_code) == (True, 1)
    passed = CaseResult("", "cpu", "forward", "", "", "", "passed")
    beside = Outcome(overall(count([*made, passed])), "cpu", {})
    assert beside.exit_code == (0 if only in ("refused", "skipped", None) else 1)


@pytest.mark.case("B64", "B67")
def test_memory_beside_the_outputs_is_watched():
    """A store of one element behind y: right numbers, caught by the guards."""

    def norm(x, gamma, eps):
        y = torch.empty_like(x)
        y.copy_(reference.forward(x.detach(), gamma, eps))
        y.as_strided((1,), (1,), y.storage_offset() + y.numel()).fill_(0)
        return y + 0 * (x + gamma)

    case = cases.case((3, 33), "float32", "aligned", 1e-6, 0)
    verdicts = memory.check(Implementation("fake", norm), case, "cpu", "cpu", DECLARED)
    assert "failed" in {verdict.status for verdict in verdicts if verdict.case.endswith("guards")}
