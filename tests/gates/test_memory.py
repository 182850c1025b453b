"""Claims about fenced memory and the memory gate: what is served, what is seen, and what is owned not to be seen."""

from dataclasses import replace

import pytest
import torch

from rmsnorm_cli.gates import candidates, memory
from rmsnorm_cli.gates.arena import Arena, fence, same_bits
from rmsnorm_cli.gates.candidates import RIGHT
from rmsnorm_cli.gates.gate import answer
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.layouts import place

# Fenced memory.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_the_two_poisons_differ_everywhere_and_one_is_nan(dtype):
    like = torch.zeros(3, 5, dtype=dtype)
    nan, finite = fence(like, "nan").whole, fence(like, "finite").whole
    if dtype.is_floating_point:
        assert bool(nan.isnan().all())
        assert bool(finite.isfinite().all())
        assert len(finite.unique()) == 89
    assert nan.shape == finite.shape


@pytest.mark.parametrize("layout", ["dense", "sliced_rows", "every_second", "transposed_heads", "expanded"])
def test_a_fence_keeps_strides_values_and_alignment(layout):
    like = place(torch.full((3, 5), 2.0), layout)
    block = fence(like, "nan", like)
    assert block.tensor.stride() == like.stride()
    assert torch.equal(block.tensor, like)
    assert block.tensor.data_ptr() % 64 == 0
    assert block.intact()


def test_memory_between_strided_elements_is_poison():
    like = place(torch.ones(3, 5), "sliced_rows")
    block = fence(like, "nan", like)
    assert int(block.whole.isnan().sum()) == block.whole.numel() - 15


@pytest.mark.parametrize("offset", [-1, 0, 14, 15])
def test_guards_tell_a_write_outside_from_one_inside(offset):
    block = fence(torch.zeros(3, 5), "nan")
    block.tensor.as_strided((1,), (1,), block.tensor.storage_offset() + offset).fill_(1)
    assert block.guards_intact() == (0 <= offset < 15)
    assert not block.intact()


def test_guards_hold_a_whole_padded_block():
    block = fence(torch.zeros(1, 1025), "nan")
    assert block.first >= 2048 * 4
    assert block.whole.numel() * 4 - block.last >= 2048 * 4


def test_rewriting_the_poison_itself_is_not_seen_by_one_pattern_but_by_the_other():
    """Writing NaN over a NaN guard changes nothing: that is why there are two runs."""
    seen = []
    for poison in ("nan", "finite"):
        block = fence(torch.zeros(2, 3), poison)
        whole = block.whole.view(torch.uint8)
        whole[block.last : block.last + 4] = 0xFF
        seen.append(not block.guards_intact())
    assert seen == [False, True]


ALLOCATIONS = {
    "empty": lambda: torch.empty(3, 5),
    "empty_like": lambda: torch.empty_like(torch.ones(3, 5)),
    "new_empty": lambda: torch.ones(2).new_empty(3, 5),
    "empty_strided": lambda: torch.empty_strided((3, 5), (1, 3)),
    "zeros": lambda: torch.zeros(3, 5),
    "zeros_like": lambda: torch.zeros_like(torch.ones(3, 5)),
    "full": lambda: torch.full((3, 5), 7.0),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_every_way_to_allocate_is_served(name):
    plain = ALLOCATIONS[name]()
    with Arena("finite") as arena:
        made = ALLOCATIONS[name]()
    own = [block for block in arena.blocks if block.tensor.data_ptr() == made.data_ptr()]
    assert len(own) == 1
    assert made.shape == plain.shape
    assert made.stride() == plain.stride()
    assert not made._is_view()
    if name in ("zeros", "zeros_like", "full"):
        assert torch.equal(made, plain)


def test_the_mode_reaches_the_backward(impl, small):
    inputs = cases.tensors(small())
    marks = []
    with Arena("nan") as arena:
        answer(impl(RIGHT.norm()), inputs, 1e-6, between=lambda: marks.append(arena.served))
    assert marks[0] >= 1
    assert arena.served >= marks[0] + 2  # dx and dgamma


def test_allocations_inside_a_custom_operator_are_served():
    @torch.library.custom_op("rmsnorm_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.copy_(2 * x)
        return out

    with Arena("nan") as arena:
        made = twice(torch.ones(3))
    assert torch.equal(made, torch.full((3,), 2.0))
    assert any(block.tensor.data_ptr() == made.data_ptr() for block in arena.blocks)


def test_same_bits_tells_zeros_apart_and_takes_two_absences_for_equal():
    zero = torch.zeros(3)
    assert same_bits(None, None)
    assert not same_bits(None, zero)
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.half())
    assert same_bits(zero, zero.clone())


# The gate.


def verdicts(results):
    return {result.case.split(": ")[-1]: result.status for result in results}


GOOD = {"inputs untouched": "passed", "guards": "passed", "everything written": "passed", "no aliases": "passed"}


@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "expanded_dy", "sliced_dy"])
def test_rowwise_keeps_to_its_memory(ask, rowwise, small, layout):
    found = ask(memory, rowwise, small("spread", (2, 33), layout=layout), "interpreter")
    assert verdicts(found) == GOOD


@pytest.mark.parametrize("layout", ["contiguous", "sliced_rows", "transposed_heads"])
def test_a_kernel_like_candidate_passes(ask, impl, small, layout):
    assert verdicts(ask(memory, impl(RIGHT.norm()), small(layout=layout))) == GOOD


def rejected(ask, impl, small, norm, **kwargs):
    found = verdicts(ask(memory, impl(norm, **kwargs), small()))
    return {name for name, status in found.items() if status == "failed"}


def _store(name, offset):
    def end(tensors):
        tensor = tensors[name]
        at = tensor.storage_offset() + offset(tensor)
        if 0 <= at < tensor.untyped_storage().nbytes() // tensor.element_size():
            tensor.as_strided((1,), (1,), at).fill_(7)

    return end


@pytest.mark.parametrize(("name", "end"), [("y", "forward_end"), ("dx", "backward_end"), ("dgamma", "backward_end")])
@pytest.mark.parametrize(
    "offset", [lambda t: t.numel(), lambda t: -1, lambda t: t.numel() + 30], ids=["after", "before", "far"]
)
def test_one_element_stored_outside_an_output_is_seen(ask, impl, small, name, end, offset):
    norm = replace(RIGHT, **{end: _store(name, offset)}).norm()
    assert rejected(ask, impl, small, norm) == {"guards"}


@pytest.mark.parametrize("name", ["x", "gamma"])
def test_one_element_stored_behind_an_input_is_seen(ask, impl, small, name):
    norm = replace(RIGHT, forward_end=_store(name, lambda t: t.numel())).norm()
    assert rejected(ask, impl, small, norm) == {"inputs untouched"}


@pytest.mark.parametrize(("name", "end"), [("x", "forward_end"), ("gamma", "forward_end"), ("dy", "backward_end")])
def test_an_input_changed_and_put_back_elsewhere_is_seen(ask, impl, small, name, end):
    norm = replace(RIGHT, **{end: lambda tensors: tensors[name].data[..., :1].neg_()}).norm()
    assert "inputs untouched" in rejected(ask, impl, small, norm)


@pytest.mark.parametrize(("name", "end"), [("y", "forward_end"), ("dx", "backward_end"), ("dgamma", "backward_end")])
def test_an_element_that_is_never_written_is_seen(ask, impl, small, name, end):
    """Put back what the allocator gave: the same as never having written it."""
    poison = {}

    def remember(tensors):
        tensor = tensors[name]
        start = tensor.untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(start)
        poison["left"] = whole[0].clone()  # guards hold the same pattern family as the tensor did
        tensor.flatten()[-1:].copy_(poison["left"])

    norm = replace(RIGHT, **{end: remember}).norm()
    assert rejected(ask, impl, small, norm) == {"everything written"}


def test_an_output_that_is_an_input_is_seen(ask, impl, small):
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gamma, eps):
            ctx.save_for_backward(x, gamma)
            return candidates.eager(x, gamma, eps)

        @staticmethod
        def backward(ctx, dy):
            return dy, torch.zeros_like(ctx.saved_tensors[1]), None

    assert rejected(ask, impl, small, Same.apply) == {"no aliases"}


def test_results_that_share_one_buffer_are_seen(ask, impl, small, device):
    buffer = torch.empty(4096, device=device)

    def norm(x, gamma, eps):
        y = candidates.eager(x, gamma, eps)
        return _Into.apply(y, buffer)

    assert "no aliases" in rejected(ask, impl, small, norm)


class _Into(torch.autograd.Function):
    """Copies into one buffer, which every call returns."""

    @staticmethod
    def forward(ctx, y, buffer):
        out = torch.empty(0, device=y.device).set_(buffer.untyped_storage(), 0, y.shape, y.stride())
        return out.copy_(y)

    @staticmethod
    def backward(ctx, dy):
        return dy.clone(), None


def test_an_unordered_sum_is_not_blamed_on_memory(ask, impl, small):
    def shuffled(x, r, dy):
        order = torch.randperm(len(x))
        return (dy * x * r)[order].flip(0).unbind(0)[0] * 0 + sum((dy * x * r)[order])

    norm = replace(RIGHT, dgamma=shuffled).norm()
    found = ask(memory, impl(norm), small(shape=(65, 33)))
    assert verdicts(found) == GOOD


def test_memory_that_compiled_code_allocates_is_owned_not_to_be_fenced(ask, impl, small):
    found = verdicts(ask(memory, impl(candidates.native), small()))
    assert found == GOOD | {"guards": "skipped"}


def test_our_own_triton_kernels_are_inconclusive_when_nothing_was_fenced(ask, impl, small):
    found = verdicts(ask(memory, impl(candidates.native, ours=True, triton=True), small()))
    assert found["guards"] == "inconclusive"


def test_a_refusal_is_reported_as_one(ask, impl, small):
    def norm(x, gamma, eps):
        raise ValueError("no")

    assert [result.status for result in ask(memory, impl(norm), small())] == ["refused"]


@pytest.mark.usefixtures("without_gpu")
def test_the_plan_has_widths_on_both_sides_of_powers_of_two(settings, rowwise):
    asked = memory.plan(settings(), rowwise, "interpreter")
    widths = {case.N for case in asked}
    assert {1, 3, 33, 257, 1024} <= widths
    assert {case.dtype for case in asked} == {"float32", "float16"}


def test_the_memory_of_another_process_is_not_vouched_for(ask, impl):
    """Each answer of an isolated implementation is a fresh copy, which says nothing of its own buffers."""
    case = cases.case((5, 33), "float32", "spread", 1e-6, 0)
    found = {r.case.rpartition(": ")[2]: r.status for r in ask(memory, impl(RIGHT.norm(), isolated=True), case)}
    assert found == {"inputs untouched": "passed"} | dict.fromkeys(memory.OF_THE_PROCESS, "skipped")
