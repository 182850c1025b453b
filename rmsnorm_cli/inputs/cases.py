"""What is asked of an implementation: a Case names it, `tensors` makes it, `oracle` knows the right answer.

This module imports no torch, so that the configuration can read the names. The values behind a distribution are in
`distributions.py`, the memory behind a layout in `layouts.py`, the float64 answer in `oracle.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmsnorm_cli.inputs.layouts import Inputs
    from rmsnorm_cli.judging.oracle import Oracle

DISTRIBUTIONS: dict[str, str] = {
    # name: methodology's letter, then why it is asked; strong ones first, so that few shapes meet the best of them
    "spread": "F: rows whose rms runs from 1e-3 to 1e2, shuffled; the best single class, also for mixed-up rows",
    "tiny": "D: rms 1e-3, so that mean(x²) is near eps: every mistake about eps, wrong powers of rstd",
    "aligned": "L: gamma·dy = x̂ + z/2, so that mean(u·x) is of order one and its mistakes are large",
    "offset": "G: mean 4, deviation 0.25: subtracting a mean, cancellation",
    "parallel": "I: dy parallel to x̂/gamma: dx is almost zero and every error of its second term stands alone",
    "large": "E: rms 30: wrong powers of rstd, 16-bit intermediates",
    "zero_rows": "H: rows of zeros between others: eps forgotten, 0/0, values leaking between rows",
    "spike": "K: one 30 among 0.01: mean of |x| for mean of x², partial reductions",
    "exact": "X: x = ±1, eps = 3, paired columns: rstd and mean(u·x̂) are exactly one half in every dtype",
    "fp16_range": "Q: rows of 200, 256, 300, 6e4, 1e-4 and 6e-7: squares that leave fp16 in either direction",
    "nonfinite": "P: ±inf (odd widths) or NaN (even widths) in x, NaN in dy, a row each: other rows keep their values",
    "stalling": "O: all ones, eps = 3, one large contribution first: a 16-bit sum stops growing",
    "normal": "A: unit normal with gamma = 1, kept to show how little it sees",
}
LAYOUTS: dict[str, str] = {
    "contiguous": "every tensor dense",
    "sliced_rows": "x is a slice of wider rows, NaN around it",
    "transposed_heads": "x with the two dimensions before its last swapped in memory; a matrix: its rows and columns",
    "misaligned": "x, gamma and dy start one element behind an aligned address",
    "expanded_dy": "dy is one number with zero strides, as y.sum().backward() makes it",
    "sliced_dy": "dy is a slice of wider rows, NaN around it",
    "transposed_dy": "dy lies in memory as transposed_heads says of x",
    "1d": "dense, a single row without a leading dimension",
    "3d": "dense, two leading dimensions",
    "4d": "dense, three and four leading dimensions",
}
ROWS = (1, 17, 67)
COLS = (1, 2, 3, 31, 33, 127, 256, 257, 1000, 1023, 1024, 1025, 4096)
WIDE_COLS = (5120, 8191, 16384, 65537, 131072)  # beyond the teaching kernel; asked of the others
EXACT_EPS = 3.0  # with x = ±1: mean square + eps = 4, rstd exactly one half
_ELEMENT_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class Case:
    """One question: the shape of x, dtypes by torch's names, a layout, a distribution, eps and the run's seed.

    `gamma_dtype` None means x's dtype, "none" means no gamma at all.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    gamma_dtype: str | None = None
    layout: str = "contiguous"
    distribution: str = "spread"
    eps: float = 1e-6
    seed: int = 0

    @property
    def N(self) -> int:
        """Return the number of columns: the length of a row."""
        return self.shape[-1]

    @property
    def M(self) -> int:
        """Return the number of rows over all leading dimensions."""
        return math.prod(self.shape[:-1])

    @property
    def id(self) -> str:
        """Return the name that tables, JUnit and metrics show; it tells everything but the run's seed."""
        parts = [self.dtype, "x".join(map(str, self.shape)), self.distribution, self.layout]
        if self.gamma_dtype is not None:
            parts.append(f"gamma={self.gamma_dtype}")
        if self.eps != 1e-6:
            parts.append(f"eps={self.eps:g}")
        return "/".join(parts)

    @property
    def generator_seed(self) -> int:
        """Return the seed of this case's values: sha256 of run seed and id, the same in every process."""
        digest = hashlib.sha256(f"{self.seed}/{self.id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


def tensors(case: Case, device: str = "cpu") -> Inputs:
    """Make x, gamma and dy of a case on `device`: drawn on the CPU, rounded to the dtype, then laid out."""
    from rmsnorm_cli.inputs.distributions import draw
    from rmsnorm_cli.inputs.layouts import arrange

    return arrange(case, *draw(case), device)


def oracle(inputs: Inputs, eps: float, rounding: str = "fp32") -> Oracle:
    """Return y, dx, dgamma and rstd in float64 for already rounded inputs; `rounding` as in `oracle.answer`."""
    from rmsnorm_cli.judging.oracle import answer

    return answer(inputs, eps, rounding)


def case(
    shape: tuple[int, ...],
    dtype: str,
    distribution: str,
    eps: float,
    seed: int,
    *,
    layout: str = "contiguous",
    gamma_dtype: str | None = None,
) -> Case:
    """Make a Case; the two distributions that are exact only for eps = 3 get that eps whatever was asked."""
    own = EXACT_EPS if distribution in ("exact", "stalling") else eps
    return Case(shape, dtype, gamma_dtype, layout, distribution, own, seed)


def grid(
    rows: Sequence[int],
    cols: Sequence[int],
    dtypes: Sequence[str],
    distributions: Sequence[str],
    eps: float,
    seed: int,
) -> list[Case]:
    """Return rows × cols × dtypes; the shapes take the distributions in turn, the same in every dtype.

    Odd and even widths each rotate on their own, so that every distribution meets widths off a power of two.
    """
    odd, even = cycle(distributions), cycle(distributions)
    shapes = sorted(product(rows, cols), key=lambda shape: (-shape[0] * shape[1], shape))
    turns = [(shape, next(odd if shape[1] % 2 else even)) for shape in shapes]
    return [case(shape, dtype, name, eps, seed) for dtype in dtypes for shape, name in turns]


def by_distribution(dtypes: Sequence[str], distributions: Sequence[str], eps: float, seed: int) -> list[Case]:
    """Return each distribution at an odd width past a power of two and at an even one, with several rows."""
    shapes = ((17, 257), (7, 258))  # where the padded block is nearly twice the width, and cheap in the interpreter
    return [case(shape, dtype, name, eps, seed) for dtype in dtypes for name in distributions for shape in shapes]


def by_eps(dtypes: Sequence[str], distributions: Sequence[str], seed: int) -> list[Case]:
    """Return rows of zeros and of rms 1e-3 with an eps far below and far above the usual one."""
    names = [name for name in ("zero_rows", "tiny") if name in distributions]
    return [case((5, 129), dtype, name, eps, seed) for dtype in dtypes for name in names for eps in (1e-8, 1e-3)]


_RANKS: dict[str, tuple[tuple[int, ...], ...]] = {
    "1d": ((257,), (1024,)),
    "3d": ((3, 5, 129),),
    "4d": ((2, 3, 5, 65), (2, 2, 1, 3, 33)),
    "transposed_heads": ((5, 257), (3, 5, 129), (2, 3, 5, 65), (2, 1, 2, 3, 33)),
    "misaligned": ((5, 257), (3, 5, 128)),  # of rows that would be read in vectors, were they aligned
    "contiguous": ((5, 257),),
}


def by_layout(dtypes: Sequence[str], layouts: Sequence[str], eps: float, seed: int) -> list[Case]:
    """Return each layout, in two and three dimensions unless it is about one rank."""
    made: list[Case] = []
    for dtype, layout in product(dtypes, layouts):
        shapes = _RANKS.get(layout, ((5, 257), (3, 5, 129)))
        made += [case(shape, dtype, "spread", eps, seed, layout=layout) for shape in shapes]
    return made


def by_gamma(dtypes: Sequence[str], eps: float, seed: int) -> list[Case]:
    """Return cases without gamma, and with an fp32 gamma beside a 16-bit x."""
    made = [case((17, 257), dtype, "spread", eps, seed, gamma_dtype="none") for dtype in dtypes]
    narrow = [dtype for dtype in dtypes if _ELEMENT_BITS[dtype] == 16]
    return made + [case((17, 257), dtype, "spread", eps, seed, gamma_dtype="float32") for dtype in narrow]


def unique(cases: Iterable[Case]) -> list[Case]:
    """Return the cases without repetitions, in order."""
    return list(dict.fromkeys(cases))
