"""Drawn shapes, strides, offsets, dtypes and scales: each of ours gives float64's answer, or refuses by its contract.

Hypothesis draws what a case is, never its elements: those come from the drawn seed. `just fuzz` draws thousands.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmsnorm_cli.kernels import ContractError, reference, rms_norm
from rmsnorm_cli.kernels.contract import INTERPRETED

DTYPES = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8, "float64": 2**-53}
WIDTHS = st.integers(1, 40) | st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 511, 513, 1025])
WIDE = st.sampled_from([2049, 4097, 5000, 8193, 16384, 20000])  # beyond the teaching kernel; a few rows of them
LARGEST = 4000  # elements: the interpreter goes through them one program at a time


@dataclass(frozen=True)
class Lie:
    """How a tensor lies in memory: the order of its dimensions, a step for each, where it starts; `expanded` ones."""

    order: tuple[int, ...]
    steps: tuple[int, ...]
    start: int
    expanded: tuple[bool, ...]

    def place(self, values, device):
        """Return a tensor of these values and this lie, NaN wherever it has no element."""
        shape = [min(size, 1) if thin else size for thin, size in zip(self.expanded, values.shape, strict=True)]
        strides = [0] * len(shape)
        reach = 1
        for dimension in self.order:  # the innermost first
            strides[dimension] = reach * self.steps[dimension]
            reach = strides[dimension] * max(shape[dimension], 1) + self.steps[dimension] - 1
        buffer = torch.full((self.start + reach + 8,), math.nan, dtype=values.dtype, device=device)
        view = buffer.as_strided(shape, strides, self.start)
        first = values[tuple(slice(0, size) for size in shape)]
        view.copy_(first)
        return view.expand(values.shape)


@st.composite
def lies(draw, rank, may_expand=True):
    plain = Lie(tuple(reversed(range(rank))), (1,) * rank, 0, (False,) * rank)
    if draw(st.booleans()):
        return plain
    steps = draw(st.tuples(*[st.sampled_from([1, 1, 1, 2, 3])] * rank))
    expanded = draw(st.tuples(*[st.sampled_from([False, False, False, may_expand])] * rank))
    return Lie(tuple(draw(st.permutations(range(rank)))), steps, draw(st.integers(0, 9)), expanded)


@dataclass(frozen=True)
class Drawn:
    """One call: what it is made of and how large its numbers are (powers of ten)."""

    impl: str
    shape: tuple[int, ...]
    dtype: str
    gamma_dtype: str | None
    x: Lie
    gamma: Lie
    dy: Lie
    scales: tuple[float, float, float]
    spread: float
    eps: float
    seed: int


@st.composite
def calls(draw):
    impl = draw(st.sampled_from(["fused", "fused", "rowwise", "reference"]))
    N = draw(WIDTHS if impl == "rowwise" else st.one_of(WIDTHS, WIDTHS, WIDTHS, WIDE))
    leading = (
        draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)) if impl != "rowwise" else [draw(st.integers(0, 40))]
    )
    while math.prod(leading) * N > max(LARGEST, 3 * N):
        leading = [size // 2 for size in leading] if max(leading) > 1 else []
    dtype = draw(st.sampled_from(["float32", "float16"] if impl == "rowwise" else list(DTYPES)))
    beside = [dtype] if impl == "rowwise" or dtype in ("float32", "float64") else [dtype, "float32"]
    gamma_dtype = draw(st.sampled_from(beside + ([None] if impl != "rowwise" else [])))
    rank = len(leading) + 1
    dense = impl == "rowwise"
    plain = Lie(tuple(reversed(range(rank))), (1,) * rank, 0, (False,) * rank)
    near = st.floats(-1, 1) if dtype == "float16" else st.floats(-6, 6)
    return Drawn(
        impl,
        (*leading, N),
        dtype,
        gamma_dtype,
        plain if dense else draw(lies(rank)),
        Lie((0,), (1,), 0, (False,)) if dense else draw(lies(1)),
        draw(lies(rank)),
        (draw(near), draw(st.floats(-1, 1)), draw(st.floats(-1, 1))),
        draw(st.sampled_from([0.0, 1.0, 3.0])),
        draw(st.sampled_from([1e-12, 1e-8, 1e-6, 1e-3, 1.0])),
        draw(st.integers(0, 2**31)),
    )


def made(call, device):
    """Return x, gamma and dy of a drawn call, in their memory."""
    draws = torch.Generator().manual_seed(call.seed)
    dtype = getattr(torch, call.dtype)

    def normal(*shape):
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    rows = 10.0 ** (call.spread * (torch.rand(*call.shape[:-1], 1, generator=draws, dtype=torch.float64) - 0.5))
    x = (normal(*call.shape) * rows * 10.0 ** call.scales[0]).to(dtype)
    dy = (normal(*call.shape) * 10.0 ** call.scales[2]).to(dtype)
    gamma = None
    if call.gamma_dtype is not None:
        gamma = (normal(call.shape[-1]) * 10.0 ** call.scales[1]).to(getattr(torch, call.gamma_dtype))
        gamma = call.gamma.place(gamma, device)
    return call.x.place(x, device), gamma, call.dy.place(dy, device)


def close(got, want, size, what):
    """Assert one rounding at the store and a few of the arithmetic, whose errors scale with `size`."""
    assert got.shape == want.shape, what
    info = torch.finfo(got.dtype)
    store = DTYPES[str(got.dtype).removeprefix("torch.")] * (2 if INTERPRETED and got.dtype == torch.bfloat16 else 1)
    own = 32 * DTYPES["float64" if got.dtype == torch.float64 else "float32"]
    limit = store * want.abs() + own * size + info.smallest_normal * info.eps
    inside = want.abs() < 0.99 * info.max
    off = torch.where(inside, (got.double() - want).abs() / limit, 0.0)
    assert bool((off <= 1).all()), (what, float(off.nan_to_num(math.inf).max()))
    assert not got[~inside].isnan().any(), what


@pytest.mark.case("B01", "B05", "B07", "B14", "B25", "B28", "B37")
@given(call=calls())
def test_every_drawn_call_has_float64s_answer_and_leaves_its_inputs_alone(call, device):
    x, gamma, dy = made(call, device)
    kept = [None if tensor is None else tensor.clone() for tensor in (x, gamma, dy)]
    leaves = [x.detach().requires_grad_()] + ([] if gamma is None else [gamma.detach().requires_grad_()])
    y = rms_norm(leaves[0], leaves[1] if len(leaves) > 1 else None, call.eps, call.impl)
    dx, *rest = torch.autograd.grad(y, leaves, dy)
    for now, before in zip((x, gamma, dy), kept, strict=True):
        assert now is None or torch.equal(now, before)
    assert (y.dtype, dx.dtype) == (x.dtype, x.dtype)
    wide_x, wide_dy = x.double(), dy.double()
    weights = torch.ones((), dtype=torch.float64, device=device) if gamma is None else gamma.double()
    rstd = reference.statistics(wide_x, call.eps)
    x_hat, u = wide_x * rstd, wide_dy * weights
    want_y = x_hat * weights
    want_dx = rstd * (u - x_hat * (u * x_hat).mean(-1, keepdim=True))
    close(y.detach(), want_y, want_y.abs(), "y")
    close(dx, want_dx, rstd * (u.abs() + x_hat.abs() * (u * x_hat).abs().mean(-1, keepdim=True)), "dx")
    if gamma is not None:
        shape = (-1, call.shape[-1])
        terms = (wide_dy * x_hat).reshape(shape) if x.numel() else wide_x.new_zeros(0, call.shape[-1])
        assert rest[0].dtype == gamma.dtype
        close(rest[0], terms.sum(0), terms.abs().sum(0) * (1 if call.impl != "reference" else 4), "dgamma")


@pytest.mark.case("B01", "B37", "B62")
@given(call=calls(), name=st.sampled_from(["rowwise", "fused", "reference"]))
def test_an_implementation_takes_a_drawn_call_or_refuses_it_in_one_sentence(call, name, device):
    """Whatever was drawn for another one: the right numbers, or a ContractError of one line; never anything else."""
    x, gamma, _ = made(call, device)
    said = ""
    try:
        y = rms_norm(x, gamma, call.eps, name)
    except ContractError as refusal:
        said = str(refusal)
    if said:
        assert name == "rowwise"
        assert "\n" not in said
        return
    wide = x.double()
    want = wide * reference.statistics(wide, call.eps) * (1.0 if gamma is None else gamma.double())
    close(y, want, want.abs(), "y")
