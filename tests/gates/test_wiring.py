"""Claims about the autograd gate: each graph is right for our kernel and wrong for some faulty wiring."""

import pytest
import torch
from torch.autograd.function import once_differentiable

from rmsnorm_cli.gates import candidates, wiring
from rmsnorm_cli.gates.candidates import RIGHT
from rmsnorm_cli.gates.graphs import CHECKS, OF_OURS, ON_GPU
from rmsnorm_cli.kernels.autograd import count


def verdicts(results):
    return {result.case.split(": ", 1)[1]: result.status for result in results}


def failing(results):
    return {name for name, status in verdicts(results).items() if status == "failed"}


def test_rowwise_is_wired_right(ask, rowwise, small):
    found = ask(wiring, rowwise, small(shape=(3, 33)), "interpreter")
    assert verdicts(found) == dict.fromkeys(
        [*CHECKS, *OF_OURS, *(ON_GPU if torch.cuda.is_available() else ())], "passed"
    )


@pytest.mark.parametrize("norm", [candidates.eager, candidates.native, RIGHT.norm()], ids=["eager", "native", "parts"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_right_candidates_are_wired_right(ask, impl, small, norm, dtype):
    found = verdicts(ask(wiring, impl(norm), small(dtype=dtype)))
    assert {name: found[name] for name in CHECKS} == dict.fromkeys(CHECKS, "passed")


def test_graphs_that_cannot_fail_here_are_not_asked(ask, impl, small):
    """Of a foreign implementation there is no counter to read, and without a GPU there is no stream."""
    found = verdicts(ask(wiring, impl(candidates.eager), small()))
    assert "what was asked for ran" not in found
    assert ("side stream" in found) == torch.cuda.is_available()


def gradients(x, gamma, eps, dy):
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), gamma.detach().requires_grad_()
        return torch.autograd.grad(candidates.eager(*leaves, eps), leaves, dy)


def wired(backward, forward=lambda ctx, x, gamma, eps: candidates.eager(x, gamma, eps)):
    """Make a norm whose backward is a function of ctx, dy, dx and dgamma, the last two right."""

    class Wired(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gamma, eps):
            ctx.save_for_backward(x, gamma)
            ctx.eps = eps
            return forward(ctx, x, gamma, eps)

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            x, gamma = ctx.saved_tensors
            return *backward(ctx, dy, *gradients(x, gamma, ctx.eps, dy)), None

    return Wired.apply


def only_if_both(ctx, dy, dx, dgamma):
    """Compute gradients only if both are needed: what a needs_input_grad read the wrong way round does."""
    return (dx, dgamma) if all(ctx.needs_input_grad[:2]) else (None, None)


def dense_dy(ctx, dy, dx, dgamma):
    """Read dy's memory from its first element on, as if it were dense."""
    stored = dy.new_empty(0).set_(dy.untyped_storage())[dy.storage_offset() :]
    read = stored.repeat(dy.numel() // stored.numel() + 1)[: dy.numel()].view(dy.shape)
    return gradients(*ctx.saved_tensors, ctx.eps, read)


def spoils_dy(ctx, dy, dx, dgamma):
    if not dy._is_view():
        dy.data.copy_(dx)
    return dx, dgamma


def frees_after_first(ctx, dy, dx, dgamma):
    ctx.runs = getattr(ctx, "runs", 0) + 1
    return (dx, dgamma) if ctx.runs == 1 else (0 * dx, dgamma)


class _Unwatched(torch.autograd.Function):
    """Keeps x, gamma or y as an attribute, which does not notice that it is changed."""

    @staticmethod
    def forward(ctx, x, gamma, eps, keep_y):
        y = candidates.eager(x, gamma, eps)
        ctx.kept, ctx.eps = (x, gamma, y if keep_y else None), eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, gamma, y = ctx.kept
        dx, dgamma = gradients(x, gamma, ctx.eps, dy)
        if y is not None:
            dgamma = (dy * y / gamma).sum(0)
        return dx, dgamma, None, None


def cached_by_address():
    kept = {}

    def norm(x, gamma, eps):
        y = candidates.eager(x, gamma, eps)
        first = kept.setdefault((x.data_ptr(), x.shape), y.detach().clone())
        return y + (first - y.detach())

    return norm


def no_grad_path(x, gamma, eps):
    """Take another, wrong path where no gradient is asked for."""
    y = candidates.eager(x, gamma, eps)
    return y if torch.is_grad_enabled() and x.requires_grad else y * 1.01


def always_asks(x, gamma, eps):
    return candidates.eager(x, gamma, eps) + torch.zeros((), requires_grad=True)


def stateful():
    """Count calls, and drift: the same graph built twice is not the same."""
    calls = [0]

    def norm(x, gamma, eps):
        calls[0] += 1
        return candidates.eager(x, gamma, eps) * (1 + 0.01 * (calls[0] > 1))

    return norm


BROKEN = {
    "gamma frozen": (wired(only_if_both), {}),
    "x frozen": (wired(only_if_both), {}),
    "no gradient asked": (always_asks, {}),
    "no_grad and inference_mode": (no_grad_path, {}),
    "x used twice": (stateful(), {}),
    "two steps add up": (stateful(), {}),
    "two backwards through one graph": (wired(frees_after_first), {}),
    "x changed in place after the forward": (lambda *a: _Unwatched.apply(*a, False), {}),
    "gamma changed in place after the forward": (lambda *a: _Unwatched.apply(*a, False), {}),
    "y changed in place after the forward": (lambda *a: _Unwatched.apply(*a, True), {}),
    "a hook keeps dy": (wired(spoils_dy), {}),
    "dy expanded": (wired(lambda ctx, dy, dx, dg: (dx, dg) if dy.is_contiguous() else (2 * dx, dg)), {}),
    "dy strided": (wired(dense_dy), {}),
    "dy sliced by cat": (wired(dense_dy), {}),
    "checkpointed": (stateful(), {}),
    "new numbers at the same address": (cached_by_address(), {}),
    "what was asked for ran": (candidates.eager, {"ours": True}),
    "second derivative": (candidates.rstd_as_constant, {}),
}


@pytest.mark.parametrize("graph", BROKEN)
def test_each_graph_is_wrong_for_some_faulty_wiring(ask, impl, small, graph):
    norm, kwargs = BROKEN[graph]
    assert graph in failing(ask(wiring, impl(norm, **kwargs), small()))


def test_every_graph_but_the_gpus_own_has_a_faulty_wiring():
    assert set(BROKEN) == {*CHECKS, *OF_OURS}


def test_a_dy_changed_in_place_is_seen_by_who_shares_it_and_blamed_nowhere_else(ask, impl, small):
    sharing = {"x used twice", "two backwards through one graph", "a hook keeps dy"}
    assert set(failing(ask(wiring, impl(wired(spoils_dy)), small()))) == sharing


def test_a_buffer_that_is_handed_out_twice_is_seen(ask, impl, small):
    def grows(ctx, dy, dx, dgamma):
        ctx.total = getattr(ctx, "total", torch.zeros_like(dgamma))
        ctx.total += dgamma
        return dx, ctx.total

    assert failing(ask(wiring, impl(wired(grows)), small())) == {"two backwards through one graph"}


def test_a_second_derivative_may_be_refused_but_not_wrong(ask, impl, small):
    assert verdicts(ask(wiring, impl(RIGHT.norm()), small()))["second derivative"] == "passed"
    wrong = [v for v in ask(wiring, impl(candidates.rstd_as_constant), small()) if v.status == "failed"]
    assert len(wrong) == 1
    assert "off by" in wrong[0].detail


def test_a_counted_kernel_must_have_run_once_each_way(ask, impl, small):
    def counting(x, gamma, eps):
        count("candidate", "forward")
        y = candidates.eager(x, gamma, eps)
        if y.requires_grad:
            y.register_hook(lambda _: count("candidate", "backward"))
        return y

    assert failing(ask(wiring, impl(counting, ours=True), small())) == set()


def test_what_a_foreign_one_raises_in_one_graph_is_a_refusal_of_it(ask, impl, small):
    def norm(x, gamma, eps):
        if not gamma.requires_grad and x.requires_grad:
            raise NotImplementedError("gamma must be trained")
        return candidates.eager(x, gamma, eps)

    found = verdicts(ask(wiring, impl(norm), small()))
    assert found["gamma frozen"] == "refused"
    assert verdicts(ask(wiring, impl(norm, ours=True, triton=True), small()))["gamma frozen"] == "failed"


def test_what_only_a_wrapper_could_answer_is_not_asked_of_an_isolated_implementation(ask, impl, small):
    """A second derivative or saved tensors in another process: the wrapper's right answer is no evidence."""
    found = verdicts(ask(wiring, impl(candidates.rstd_as_constant, isolated=True), small()))
    of_the_gpu = set() if torch.cuda.is_available() else set(ON_GPU)
    assert {name for name, status in found.items() if status == "skipped"} == wiring.OF_THE_PROCESS - of_the_gpu
    assert failing(ask(wiring, impl(candidates.rstd_as_constant), small())) == {"second derivative"}
