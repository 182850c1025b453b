"""The values of x, gamma and dy, one function a distribution: float64 on the CPU, from the case's own generator.

`draw` rounds x and gamma to their dtypes before dy is made from them, so that "dy parallel to x̂/gamma" holds for the
numbers the kernel sees. dy is scaled like the gradient of a mean loss (1/√M), so that dgamma stays of order one.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rmsnorm_cli.inputs.cases import Case

Generator = torch.Generator
RANGE = (300.0, 6e4, 1e-4, 256.0, 200.0, 6e-7)  # a single row takes the first: its square leaves fp16


def draw(case: Case) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return x (M, N), gamma (N,) or None, dy (M, N): float64 holding values of the case's dtypes exactly."""
    generator = torch.Generator().manual_seed(case.generator_seed)
    dtype = getattr(torch, case.dtype)
    gamma_dtype = dtype if case.gamma_dtype in (None, "none") else getattr(torch, case.gamma_dtype)
    x = _rounded(_X[case.distribution](case, generator), dtype)
    gamma = _rounded(_GAMMA.get(case.distribution, _weights)(case, generator), gamma_dtype)
    if case.gamma_dtype == "none":
        gamma = torch.ones_like(gamma)
    dy = _DY.get(case.distribution, _upstream)(case, generator, x, gamma)
    if case.layout == "expanded_dy":  # one number serves every element
        dy = torch.full_like(dy, 0.75 / math.sqrt(max(case.M, 1)))
    return x, None if case.gamma_dtype == "none" else gamma, _rounded(dy, dtype)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).double()


def _normal(case: Case, generator: Generator) -> Tensor:
    return torch.randn(case.M, case.N, generator=generator, dtype=torch.float64)


def _signs(generator: Generator, *shape: int) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1


# x, (M, N)


def _spread(case: Case, generator: Generator) -> Tensor:
    if case.M == 1:
        exponents = torch.rand(1, generator=generator, dtype=torch.float64) * 5 - 3
    else:
        exponents = torch.linspace(-3, 2, case.M, dtype=torch.float64)
        exponents = exponents[torch.randperm(case.M, generator=generator)]
    return _normal(case, generator) * 10.0 ** exponents[:, None]


def _graded(case: Case, generator: Generator) -> Tensor:
    """Rows whose rms runs in even steps from 0.3 √eps, where eps is most of what is under the root, to 30.

    In float16 not below 1e-4, so that dx, which grows as 1/rms, stays finite.
    """
    root = math.sqrt(case.eps)
    low, high = max(0.3 * root, 1e-4 if case.dtype == "float16" else 0.0), 30 * max(root, 1)
    exponents = torch.linspace(math.log10(low), math.log10(high), case.M, dtype=torch.float64)
    return _normal(case, generator) * 10.0 ** exponents[torch.randperm(case.M, generator=generator), None]


def _scaled(rms: float) -> Callable[[Case, Generator], Tensor]:
    return lambda case, generator: _normal(case, generator) * rms


def _offset(case: Case, generator: Generator) -> Tensor:
    return 4 + 0.25 * _normal(case, generator)


def _zero_rows(case: Case, generator: Generator) -> Tensor:
    x = _normal(case, generator)
    x[1 if case.M > 1 else 0 :: 2] = 0  # never the last of an odd number of rows: dropping it must show
    return x


def _spike(case: Case, generator: Generator) -> Tensor:
    x = 0.01 * _normal(case, generator)
    columns = torch.randint(0, case.N, (case.M, 1), generator=generator)
    return x.scatter(1, columns, 30 * _signs(generator, case.M, 1))


def _ones_of_both_signs(case: Case, generator: Generator) -> Tensor:
    return _signs(generator, case.M, case.N)


def _range(case: Case, generator: Generator) -> Tensor:
    magnitude = torch.tensor(RANGE, dtype=torch.float64).repeat(-(-case.M // len(RANGE)))[: case.M, None]
    jitter = 0.95 + 0.05 * torch.rand(case.M, case.N, generator=generator, dtype=torch.float64)
    return magnitude * jitter * _signs(generator, case.M, case.N)


def _nonfinite(case: Case, generator: Generator) -> Tensor:
    """NaN makes all of dgamma NaN, an infinity only its own column: so one or the other, by the parity of N."""
    x = _normal(case, generator)
    if case.M == 0:
        return x
    x[case.M // 2, case.N // 2] = math.inf if case.N % 2 else math.nan
    if case.N % 2 and case.M > 2:
        x[-1, -1] = -math.inf
    return x


def _all_ones(case: Case, generator: Generator) -> Tensor:
    return torch.ones(case.M, case.N, dtype=torch.float64)


# gamma, (N,)


def _weights(case: Case, generator: Generator) -> Tensor:
    """Both signs, away from one, and one exact zero for kernels that recover x̂ as y/gamma."""
    gamma = _nonzero_weights(case, generator)
    if case.N > 2:
        gamma[case.N // 2] = 0
    return gamma


def _nonzero_weights(case: Case, generator: Generator) -> Tensor:
    return _signs(generator, case.N) * (0.25 + 1.5 * torch.rand(case.N, generator=generator, dtype=torch.float64))


def _all_one_weights(case: Case, generator: Generator) -> Tensor:
    return torch.ones(case.N, dtype=torch.float64)


def _powers_of_two(case: Case, generator: Generator) -> Tensor:
    return _signs(generator, case.N) * 2.0 ** torch.randint(0, 2, (case.N,), generator=generator)


# dy, (M, N)


def _upstream(case: Case, generator: Generator, x: Tensor, gamma: Tensor) -> Tensor:
    return _normal(case, generator) / math.sqrt(max(case.M, 1))


def _xhat(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _parallel(case: Case, generator: Generator, x: Tensor, gamma: Tensor) -> Tensor:
    return _xhat(x, case.eps) / gamma / math.sqrt(max(case.M, 1))


def _aligned(case: Case, generator: Generator, x: Tensor, gamma: Tensor) -> Tensor:
    u = _xhat(x, case.eps) + 0.5 * _normal(case, generator)
    return u / gamma / math.sqrt(max(case.M, 1))


def _exact(case: Case, generator: Generator, x: Tensor, gamma: Tensor) -> Tensor:
    """Columns in pairs whose u·x are 1 + 2s and 1 − 2s (s = ±1), an odd last one 1: mean(u·x̂) is exactly ½."""
    pairs = case.N // 2
    s = _signs(generator, case.M, pairs)
    products = torch.ones(case.M, case.N, dtype=torch.float64)
    products[:, 0 : 2 * pairs : 2] += 2 * s
    products[:, 1 : 2 * pairs : 2] -= 2 * s
    return products * x / gamma  # x is ±1, so u = products · x


def _nonfinite_upstream(case: Case, generator: Generator, x: Tensor, gamma: Tensor) -> Tensor:
    """NaN in the first row, which no other may take over; of dgamma it spoils its own column alone."""
    dy = _upstream(case, generator, x, gamma)
    if case.M > 2:
        dy[0, 0] = math.nan
    return dy


def _stalling(case: Case, generator: Generator, x: Tensor, gamma: Tensor) -> Tensor:
    """Make the first row contribute what the dtype's spacing is ½ at, each later one ⅛: such a sum loses them."""
    first = 64.0 if case.dtype == "bfloat16" else 512.0
    dy = torch.full((case.M, case.N), 0.25, dtype=torch.float64)
    dy[:1] = 2 * first
    return dy


_X: dict[str, Callable[[Case, Generator], Tensor]] = {
    "spread": _spread,
    "graded": _graded,  # of the fit gate, which regresses rows: not among the distributions that can be named
    "tiny": _scaled(1e-3),
    "aligned": _normal,
    "offset": _offset,
    "parallel": _normal,
    "large": _scaled(30.0),
    "zero_rows": _zero_rows,
    "spike": _spike,
    "exact": _ones_of_both_signs,
    "fp16_range": _range,
    "nonfinite": _nonfinite,
    "stalling": _all_ones,
    "normal": _normal,
}
_GAMMA: dict[str, Callable[[Case, Generator], Tensor]] = {
    "graded": _nonzero_weights,
    "aligned": _nonzero_weights,
    "parallel": _nonzero_weights,
    "exact": _powers_of_two,
    "stalling": _powers_of_two,
    "normal": _all_one_weights,
}
_DY: dict[str, Callable[[Case, Generator, Tensor, Tensor], Tensor]] = {
    "graded": _aligned,
    "aligned": _aligned,
    "parallel": _parallel,
    "exact": _exact,
    "nonfinite": _nonfinite_upstream,
    "stalling": _stalling,
}
