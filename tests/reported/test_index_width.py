"""Reports about indices that are too narrow and rows that are too wide."""

import pytest
import torch

from rmsnorm_cli.kernels import fused, reference
from rmsnorm_cli.kernels.contract import CallSpec, fused_refusal, rowwise_refusal

WIDE = [  # N, then y and dx of the last column, in float64
    (16385, 127.8875, 0.0774678),
    (32769, 180.6934, 0.2185060),
    (65537, 255.0749, 0.6146665),
    (131073, 359.4322, 1.7198364),
    pytest.param(1048577, 969.1012, 33.7088273, marks=pytest.mark.gpu),  # five seconds in the interpreter
]


@pytest.mark.case("B10")
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "N"),
    [(2**31 // N + 5, N) for N in (64, 769, 5120, 16384, 20000, 32768, 65537, 131072, 1048577)],
    ids=str,
)
def test_every_path_counts_beyond_two_to_the_31_elements(M, N, device):
    """Zeros but for the last row: y, dx and dgamma of that row are right whichever launch its width leads to."""
    if torch.cuda.mem_get_info()[0] < 8 * M * N:
        pytest.skip("not enough memory on this GPU")
    x = torch.zeros(M, N, device=device, dtype=torch.bfloat16)
    x[-1] = 1
    gamma = torch.ones(N, device=device, dtype=torch.bfloat16)
    y, rstd = fused.forward(x, gamma, 1e-6)
    dy = torch.ones((), device=device, dtype=torch.bfloat16).expand(M, N)
    dx, dgamma = fused.backward(dy, x, gamma, rstd)
    assert bool((y[-1] == 1).all())
    assert not y[:-1].any()
    assert bool((dgamma == 1).all())
    assert bool((dx[:-1] == 1000).all())
    assert float(dx[-1].abs().max()) <= 1e-5


@pytest.fixture
def far(device, tmp_path):
    """Return a maker of an (M, N) view whose rows lie `stride` fp16 elements apart; on a CPU the memory is a file."""

    def make(M, N, stride):
        count = (M - 1) * stride + N
        if device != "cpu":
            whole = torch.empty(count, dtype=torch.float16, device=device)
        else:  # sparse: what lies between the rows takes no room
            whole = torch.from_file(str(tmp_path / f"{stride}.bin"), shared=True, size=count, dtype=torch.float16)
        return whole.as_strided((M, N), (stride, 1))

    return make


@pytest.mark.case("B10")
@pytest.mark.parametrize("operand", ["x", "dy"])
@pytest.mark.parametrize("N", [40, 257, 5000, 16384, 20000])
def test_rows_more_than_two_to_the_31_elements_apart(N, operand, far, device):
    """Three rows in 8 GB of address space: an offset in 32 bits wraps in front of the buffer, without any large M."""
    values = torch.randn(3, N, generator=torch.Generator().manual_seed(N)).half()
    dense = {"x": values.to(device), "dy": (values.flip(0) / 4).to(device)}
    given = dict(dense)
    given[operand] = far(3, N, 2**30 + 8)
    given[operand].copy_(dense[operand])
    gamma = torch.linspace(-1, 2, N).half().to(device)
    y, rstd = fused.forward(given["x"], gamma, 1e-6)
    dx, dgamma = fused.backward(given["dy"], given["x"], gamma, rstd)
    right_y, right_rstd = fused.forward(dense["x"], gamma, 1e-6)
    right_dx, right_dgamma = fused.backward(dense["dy"], dense["x"], gamma, right_rstd)
    for got, want in ((y, right_y), (dx, right_dx), (dgamma, right_dgamma)):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


@pytest.mark.case("B10")
def test_columns_more_than_two_to_the_31_elements_apart(far, device):
    """A transposed view of far rows: its column stride is beyond 32 bits."""
    x = far(3, 5, 2**30 + 8).t()
    x.copy_(torch.arange(15.0).reshape(5, 3))
    gamma = torch.ones(3, dtype=torch.float16, device=device)
    y, rstd = fused.forward(x, gamma, 1e-6)
    dx, _ = fused.backward(torch.ones_like(y), x, gamma, rstd)
    right = reference.backward(torch.ones(5, 3), x.cpu().float(), gamma.cpu().float(), 1e-6)[0]
    torch.testing.assert_close(y.cpu().float(), reference.forward(x.cpu().float(), None, 1e-6), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(dx.cpu().float(), right, atol=1e-3, rtol=1e-3)


@pytest.mark.case("B10", "B11")
@pytest.mark.parametrize(
    ("M", "N", "says"),
    [
        (1, 4097, "x has 4097 columns: rowwise takes at most 4096"),
        (2**23 + 16, 256, "8,589,950,976 bytes: rowwise takes at most 67,108,864"),
        (524289, 4096, "8,589,950,976 bytes: rowwise takes at most 67,108,864"),
    ],
)
def test_the_teaching_kernel_refuses_what_its_indices_do_not_reach(M, N, says, device):
    """Long before 2^31 elements, by the size of its partial sums; asked of the contract, which needs no tensor."""
    spec = CallSpec((M, N), torch.float16, torch.float16, True, 1e-6, torch.device(device).type)
    assert str(rowwise_refusal(spec)).endswith(says)


@pytest.mark.case("B11")
def test_a_row_wider_than_the_counter_is_refused_with_the_limit(device):
    spec = CallSpec((1, 2**30 + 1), torch.float16, None, True, 1e-6, torch.device(device).type)
    assert "at most 1,073,741,824" in str(fused_refusal(spec))


@pytest.mark.case("B11")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("N", "y_last", "dx_last"), WIDE, ids=lambda value: f"{value:g}")
def test_the_last_column_of_a_wide_row_counts(N, y_last, dx_last, dtype, free, device, gradients):
    """All zeros but the last column: a sum that stops at a block gives 3000 for y."""
    x = torch.zeros(1, N, dtype=dtype, device=device)
    x[0, -1] = 3
    gamma, dy = torch.ones(N, dtype=dtype, device=device), torch.ones(1, 1, dtype=dtype, device=device).expand(1, N)
    y, dx, dgamma = gradients(x, gamma, dy, free)
    unit = max(torch.finfo(dtype).eps, 1e-6)
    assert float(y[0, -1]) == pytest.approx(y_last, rel=unit)
    assert float(dx[0, -1]) == pytest.approx(dx_last, rel=unit, abs=1e-6 * y_last / 3)  # y / 3 is rstd
    assert float(dgamma[-1]) == pytest.approx(y_last, rel=unit)
    assert not y[0, :-1].any()
    assert not dgamma[:-1].any()
