"""Reports about memory layout: strides, slices, expanded gradients, odd starts and odd widths."""

import pytest
import torch

from rmsnorm_cli.gates import memory
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.judging.tolerances import DECLARED
from rmsnorm_cli.kernels import ContractError, counters, fused, implementation, reference, reset_counters, rms_norm


def ramp(*shape, device="cpu", dtype=torch.float32):
    """Return numbers that differ by position, small enough to be exact in every dtype."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) % 61 / 16 - 1.7).reshape(shape).to(device, dtype)


@pytest.mark.case("B01")
def test_transposed_view_is_read_by_its_strides_or_refused(impl, device, same):
    """The row mean used the column stride, the values to scale did not: y[0][1] came out as 0.309."""
    x = torch.arange(1.0, 25, device=device).reshape(6, 4).t()
    gamma = torch.arange(1.0, 7, device=device)
    if impl == "rowwise":
        with pytest.raises(ContractError, match="not contiguous"):
            rms_norm(x, gamma, impl=impl)
        x = x.contiguous()
    y = rms_norm(x, gamma, impl=impl)
    same(y[0], [0.07722833, 0.77228328, 2.08516486, 4.01587307, 6.56440790, 9.73076935])


VIEWS = {
    "rows and columns swapped": lambda t: t(12, 9).t(),
    "every third column": lambda t: t(9, 36)[:, ::3],
    "every second row backwards in memory": lambda t: t(18, 12)[::2],
    "overlapping windows": lambda t: t(40).unfold(0, 12, 3),
    "diagonal steps": lambda t: t(400).as_strided((9, 12), (13, 5), 7),
    "columns that all are one number": lambda t: t(9, 1).expand(9, 12),
    "rows that all are one row": lambda t: t(1, 12).expand(9, 12),
    "a slice of a slice": lambda t: t(3, 20, 40)[:, 2:17:5, 3:39:3],
    "last dimension from the front": lambda t: t(12, 3, 4).permute(1, 2, 0),
}


@pytest.mark.case("B01", "B05")
@pytest.mark.parametrize("of", ["x", "gamma", "dy"])
@pytest.mark.parametrize("view", VIEWS)
def test_any_view_gives_the_numbers_of_its_copy(view, of, device, gradients):
    """Whichever operand is the view, fused gives bit for bit what it gives for contiguous copies."""
    x = VIEWS[view](lambda *shape: ramp(*shape, device=device))
    gamma, dy = ramp(12, device=device) + 0.3, ramp(*x.shape, device=device) * 0.4
    if of == "gamma":
        gamma = ramp(60, device=device)[2::5]
    if of == "dy":
        dy, x = x, x.contiguous()
    if of == "x" and view in ("columns that all are one number", "rows that all are one row"):
        dy = dy.contiguous()
    dense = gradients(x.contiguous(), gamma.contiguous(), dy.contiguous(), "fused")
    for got, want in zip(gradients(x, gamma, dy, "fused"), dense, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=2e-6)
    right = reference.backward(dy.double(), x.double(), gamma.double(), 1e-6)
    torch.testing.assert_close(dense[1].double(), right[0], atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(dense[2].double(), right[1], atol=2e-5, rtol=2e-5)


@pytest.mark.case("B04")
@pytest.mark.parametrize("rows", [1, 5])
def test_a_gradient_whose_sign_is_a_flag_is_read_with_its_sign(rows, impl, device, gradients):
    """The imaginary part of a conjugate, as of a rotary embedding run backwards, is a view of memory of other signs."""
    x, gamma, dy = ramp(rows, 8, device=device), ramp(8, device=device) + 0.3, ramp(rows, 8, device=device) + 0.1
    flagged = torch._neg_view(-dy)
    assert flagged.is_neg()
    assert flagged.is_contiguous()
    for got, want in zip(gradients(x, gamma, flagged, impl), gradients(x, gamma, dy, impl), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.case("B02")
def test_gradient_of_a_sum_is_one_element_with_stride_zero(impl, tensor, same):
    """Kernels that assume unit strides read past the 4 bytes behind an expanded dy."""
    x, gamma = tensor([[3.0, 4.0], [1.0, 7.0]]), tensor([2.0, 0.5])
    rms_norm(x, gamma, impl=impl).sum().backward()
    same(x.grad, [[0.29415643, -0.22061728], [0.37799999, -0.05399999]])
    same(gamma.grad, [1.04852810, 2.53137078])


@pytest.mark.case("B02")
@pytest.mark.parametrize(
    "shape", [(65, 33), (3, 300), (1, 4096), pytest.param((4096, 512), marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("expand", ["one number", "one row", "one column"])
def test_an_expanded_gradient_equals_a_materialised_one(shape, expand, impl, device, gradients):
    """But for the order of sums, and the element behind it keeps its value: an in-place kernel would write rows to it.

    Two orders of a sum over thousands of rows are apart by roundings of what is summed, not of what is left of it.
    """
    M, N = shape
    x, gamma = ramp(M, N, device=device), ramp(N, device=device)
    one = {"one number": ramp(1, 1, device=device), "one row": ramp(1, N, device=device)}.get(
        expand, ramp(M, 1, device=device)
    )
    kept = one.clone()
    expanded = gradients(x, gamma, one.expand(M, N), impl)
    *of_rows, dgamma = gradients(x, gamma, one.expand(M, N).contiguous(), impl)
    for got, want in zip(expanded, of_rows, strict=False):
        torch.testing.assert_close(got, want, atol=0 if impl == "rowwise" else 1e-5, rtol=2e-6)
    _, summed = reference.backward(one.expand(M, N).double().abs(), x.double().abs(), gamma.double(), 1e-6)
    own = 0 if impl == "rowwise" else max(1e-5, float(summed.max()) * 2.0**-23)
    torch.testing.assert_close(expanded[2], dgamma, atol=own, rtol=2e-6)
    assert torch.equal(one, kept)


@pytest.mark.case("B04")
def test_gradient_of_a_concatenation_is_a_slice(impl, tensor, same):
    """The row stride of dy is twice that of x; a reader with x's stride gives [-0.543, 0.407] in dx1[1]."""
    x1, x2, gamma = tensor([[1.0, 2.0], [3.0, 4.0]]), tensor([[5.0, 6.0], [7.0, 8.0]]), tensor([1.0, 2.0])
    weights = tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], grad=False)
    joined = torch.cat([rms_norm(x1, gamma, impl=impl), rms_norm(x2, gamma, impl=impl)], dim=-1)
    (joined * weights).sum().backward()
    same(x1.grad, [[-0.50596387, 0.25298307], [-0.72407714, 0.54305821]])
    same(x2.grad, [[-0.39182680, 0.32652239], [-0.52744274, 0.46151245]])
    same(gamma.grad, [14.11003123, 22.17819546], atol=1e-5, rtol=0)


CONSUMERS = {
    "split": lambda y: torch.stack([part.sum(-1) * (i + 1) for i, part in enumerate(y.split(5, -1))]).sum(),
    "concatenation in front": lambda y: (torch.cat([y, y * 2], 0) * ramp(2 * y.shape[0], y.shape[1]).to(y)).sum(),
    "transposed product": lambda y: (y.t() @ ramp(y.shape[0], 3).to(y)).square().sum(),
    "every second column": lambda y: (y[:, ::2] * 3).sum() + y[:, 1::2].square().sum(),
    "padding": lambda y: (torch.nn.functional.pad(y, (3, 5)) * ramp(y.shape[0], y.shape[1] + 8).to(y)).sum(),
    "gathered rows": lambda y: (y[[2, 0, 2, 1]] * ramp(4, y.shape[1]).to(y)).sum(),
    "mean": lambda y: y.mean(),
}


@pytest.mark.case("B02", "B04")
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_gradients_are_right_whatever_consumes_y(consumer, impl, device, tensor):
    """Each consumer hands back dy in strides of its own; gradients are those that autograd gives through float64."""
    values = ramp(7, 17).tolist()
    x, gamma = tensor(values), tensor(ramp(17).tolist())
    CONSUMERS[consumer](rms_norm(x, gamma, impl=impl)).backward()
    wide_x, wide_gamma = tensor(values, torch.float64), tensor(ramp(17).tolist(), torch.float64)
    CONSUMERS[consumer](reference.forward(wide_x, wide_gamma, 1e-6)).backward()
    torch.testing.assert_close(x.grad.double(), wide_x.grad, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(gamma.grad.double(), wide_gamma.grad, atol=5e-5, rtol=1e-5)


@pytest.mark.case("B05")
def test_three_dimensions_cut_from_a_wider_projection(free, device, same):
    """Flattened rows were paired with one stride only; a view of swapped leading dimensions failed."""
    x = torch.arange(1.0, 49, device=device).reshape(2, 3, 8)[:, :2, :4].requires_grad_()
    gamma = torch.arange(1.0, 5, device=device, requires_grad=True)
    y = rms_norm(x, gamma, impl=free)
    dx, dgamma = torch.autograd.grad(y.sum(), (x, gamma))
    same(y[1, 1], [0.95601986, 1.96998033, 3.04188139, 4.17172305])
    same(dx[1, 0], [-0.05273500, -0.01865018, 0.01543463, 0.04951945])
    same(dgamma, [3.11605064, 3.64257434, 4.16909804, 4.69562174])
    swapped = torch.arange(0.0, 24, device=device).reshape(3, 2, 4).transpose(0, 1)
    same(rms_norm(swapped, impl=free)[1, 0], [0.71269663, 0.89087079, 1.06904495, 1.24721911])
    ones, leaf = torch.ones(4, device=device, requires_grad=True), swapped.detach().requires_grad_()
    (dgamma,) = torch.autograd.grad(rms_norm(leaf, ones, impl=free).sum(), ones)
    same(dgamma, [4.27628906, 5.27082411, 6.26535916, 7.25989420])


@pytest.mark.case("B05")
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_the_teaching_kernel_refuses_further_dimensions(rank, device):
    with pytest.raises(ContractError, match=r"takes 2 dimensions; reshape x"):
        rms_norm(ramp(*range(2, 2 + rank), device=device), ramp(rank + 1, device=device), impl="rowwise")


@pytest.mark.case("B07")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("of", "offset"), [("x", 1), ("gamma", 3), ("dy", 7), ("x", 4), ("all", 1), ("all", 2)])
def test_a_misaligned_start_gives_the_bits_of_an_aligned_copy(offset, of, dtype, impl, device, gradients):
    """A vector load from an odd address is a fault, or the neighbour's numbers."""
    values = {"x": ramp(3, 64, dtype=dtype), "gamma": ramp(64, dtype=dtype), "dy": ramp(3, 64, dtype=dtype) * 0.5}

    def placed(name):
        tensor = values[name]
        if of not in (name, "all"):
            return tensor.to(device)
        buffer = torch.full((offset + tensor.numel() + 9,), float("nan"), dtype=dtype, device=device)
        return buffer[offset:][: tensor.numel()].view(tensor.shape).copy_(tensor)

    moved = [placed(name) for name in values]
    got = gradients(*moved, impl)
    aligned = gradients(*(tensor.to(device) for tensor in values.values()), impl)
    unit = torch.finfo(dtype).eps
    for left, right in zip(got, aligned, strict=True):
        torch.testing.assert_close(left, right, atol=unit if impl == "fused" else 0, rtol=unit)


@pytest.mark.case("B07")
def test_what_was_planned_for_an_aligned_start_is_not_done_at_a_misaligned_one(device, gradients):
    """Same shape, strides and dtype, called before and after: wide loads belong to the one start alone."""
    buffer = ramp(3 * 64 + 9, device=device, dtype=torch.float16)
    gamma, dy = ramp(64, device=device, dtype=torch.float16), ramp(3, 64, device=device, dtype=torch.float16)
    fused._forward_plans.clear()
    fused._backward_plans.clear()
    for offset in (0, 1, 0, 8, 3):
        before = len(fused._forward_plans), len(fused._backward_plans)
        x = buffer[offset:][: 3 * 64].view(3, 64)
        y, dx, _ = gradients(x, gamma, dy, "fused")
        torch.testing.assert_close(y.double(), reference.forward(x.double(), gamma.double(), 1e-6), atol=0, rtol=2e-3)
        assert dx.isfinite().all()
        if offset in (1, 3):
            assert (len(fused._forward_plans), len(fused._backward_plans)) == (before[0] + 1, before[1] + 1)


@pytest.mark.case("B07")
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_misaligned_rows_of_equal_numbers_are_one(offset, impl, device):
    buffer = torch.empty(offset + 3 * 64, dtype=torch.float16, device=device)
    x = buffer[offset:].view(3, 64)
    x.copy_(torch.arange(1, 4, device=device)[:, None].expand(3, 64))
    y = rms_norm(x, torch.ones(64, dtype=torch.float16, device=device), impl=impl)
    assert torch.equal(y, torch.ones_like(y))


@pytest.mark.case("B08")
@pytest.mark.parametrize("N", [1, 2, 3, 127, 513, 769, 4095])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_tail_of_an_odd_row_does_not_touch_the_next_one(N, dtype, impl, device):
    """Column 0 and the last column have a gamma of their own, so that either's number in the other's place shows."""
    gamma = torch.ones(N, dtype=dtype, device=device)
    gamma[0] = 5
    gamma[-1] = -3
    x = torch.arange(1, 8, device=device)[:, None].expand(7, N).to(dtype).contiguous()
    for _ in range(100 if x.is_cuda else 2):
        y = rms_norm(x, gamma, impl=impl)
        torch.testing.assert_close(y, gamma.expand(7, N), atol=0, rtol=1e-6)


@pytest.mark.case("B08", "B14", "B19")
@pytest.mark.parametrize("name", ["rowwise", "fused"])
@pytest.mark.parametrize("shape", [(7, 1), (7, 3), (7, 127), (5, 513), (3, 769), (2, 4095)], ids=str)
def test_nothing_is_written_beside_the_outputs_and_everything_within(name, shape, device):
    """Guards around every allocation stay as they were, two poisons give the same bits, inputs are untouched."""
    execution = "cuda" if device.startswith("cuda") else "interpreter"
    case = cases.case(shape, "float16", "aligned", 1e-6, 0)
    verdicts = memory.check(implementation(name), case, execution, device, DECLARED)
    assert {verdict.status for verdict in verdicts} == {"passed"}, [verdict.detail for verdict in verdicts]


@pytest.mark.case("B01", "B05")
def test_a_copy_is_never_made_in_silence(device):
    """What two strides reach is read where it lies; more strides cost one copy, which the counter shows."""
    base = ramp(2, 6, 4, 24, device=device)
    for x, copies in ((base[:, ::2], 0), (base.transpose(1, 2), 0), (base[:, ::5, ::3, ::2], 1)):
        reset_counters()
        rms_norm(x, impl="fused")
        assert counters()["fused"]["copies"] == copies
