"""The sketch of a backward for rows of an odd number of 16-bit columns gives what float64 gives."""

import pytest
import torch
from sketch_odd_walk import odd_walk_kernel

from rmsnorm_cli.kernels import reference
from rmsnorm_cli.kernels.contract import INTERPRETED
from rmsnorm_cli.kernels.tables import cover

DEVICE = "cpu" if INTERPRETED else "cuda"


def gradients(dy, x, gamma, programs):
    """Return dx and dgamma, the sums of the programs added."""
    M, N = x.shape
    rstd = reference.statistics(x.float(), 1e-6)[:, 0].contiguous()
    memory = torch.full((M * N + 4,), 7.0, dtype=x.dtype, device=x.device)
    dx, partial = memory[2:-2].view(M, N), torch.empty(programs, N, device=x.device)
    A, B = cover(N // 2 + 1)
    layout = (M, 0, dy.stride(0), dy.stride(1), M, 0, x.stride(0), x.stride(1), gamma.stride(0))
    odd_walk_kernel[(programs,)](
        dy, x, gamma, rstd, dx, partial, M, N, *layout, A=A, B=B, FULL=2 * (A + B) == N + 1, STAGES=3,
        DY_TWO=False, DY_UNIT=dy.stride(1) == 1, TWO=False, UNIT=x.stride(1) == 1, GAMMA=True, DX=True, DGAMMA=True,
        DEPENDENT=False,
    )  # fmt: skip
    assert memory[[0, 1, -2, -1]].tolist() == [7.0] * 4, "something is written beside dx"
    return dx, partial.sum(0)


def drawn(M, N, dtype, x_first=0, dy_first=0):
    """Return dy, x and gamma; x and dy begin so many numbers after a whole word."""
    generator = torch.Generator().manual_seed(M * 10_000 + N)

    def rows(first):
        return torch.randn(M * N + first, generator=generator).to(DEVICE, dtype)[first:].view(M, N)

    return rows(dy_first), rows(x_first), torch.randn(N, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [1, 3, 5, 257, 769, 1001, 4099])
@pytest.mark.parametrize("M", [1, 2, 7])
def test_as_float64(M, N, dtype):
    """Rows in both halves of a word, x and dy alike and not, and a last tile that is full or not."""
    for x_first, dy_first in ((0, 0), (1, 0), (0, 1), (1, 1)):
        dy, x, gamma = drawn(M, N, dtype, x_first, dy_first)
        dx, dgamma = gradients(dy, x, gamma, min(M, 3))
        want_dx, want_dgamma = reference.backward(dy.double(), x.double(), gamma.double(), 1e-6)
        unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        size = want_dx.abs().mean(-1, keepdim=True) + reference.statistics(x.double(), 1e-6) * dy.double().abs()
        assert bool(((dx.double() - want_dx).abs() <= unit * 2 * want_dx.abs() + 1e-5 * size).all())
        torch.testing.assert_close(dgamma.double(), want_dgamma, atol=1e-5, rtol=1e-5)


def test_a_row_keeps_its_bits_in_both_halves_of_a_word():
    """Moved by one number, so that it starts in the other half, or alone, a row has the same dx; columns apart too."""
    dy, x, gamma = drawn(5, 1001, torch.float16)
    dx, _ = gradients(dy, x, gamma, 2)
    moved = [torch.cat([part.new_zeros(1), part.reshape(-1)])[1:].view(5, 1001) for part in (dy, x)]
    apart = [torch.stack([part, part], 2)[:, :, 0] for part in (dy, x)]
    assert torch.equal(gradients(*moved, gamma, 2)[0], dx)
    assert torch.equal(gradients(*apart, gamma, 2)[0], dx)
    for row in range(5):
        alone = gradients(dy[row : row + 1].clone(), x[row : row + 1].clone(), gamma, 1)[0]
        assert torch.equal(alone[0], dx[row])
