"""The questions of the contract gate: calls that must be refused, and unusual calls that must work.

Small tensors, so that a refusal is the only thing tested. What `rowwise` and `fused` refuse is `spec`'s table, written
here a second time on purpose: an implementation's own `accepts` cannot vouch for itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rmsnorm_cli.inputs.layouts import place

Expected = Literal["refuse", "work", "either"]
M, N = 3, 8


@dataclass(frozen=True)
class Call:
    """The arguments of one call. `eps`, `x` and `gamma` may be anything, also what no implementation takes.

    With `dy` it is the backward launcher that is called: autograd itself checks what it hands to a backward.
    """

    x: Any
    gamma: Any
    eps: Any = 1e-6
    grad: bool = True
    dy: Tensor | None = None


@dataclass(frozen=True)
class ContractQuestion:
    """One call and what must come of it; `about` is the argument that a refusal has to name."""

    id: str
    dtype: str
    about: str
    expect: Expected
    make: Callable[[str], Call]


def questions(name: str, cuda: bool) -> list[ContractQuestion]:
    """Return what is asked of `rowwise`, of `fused`, or of any other implementation."""
    if name == "rowwise":
        asked = [*_expect("refuse", _SENSELESS + _ROWWISE_LIMITS + _GRADIENTS), *_expect("work", _EDGES)]
    elif name == "fused":
        asked = [*_expect("refuse", _SENSELESS), *_expect("work", _EDGES), *_expect("work", _FREEDOMS)]
    else:
        asked = [question for question in _expect("refuse", _SENSELESS) if question.id in _ASKED_OF_ANYONE]
        asked += [*_expect("work", _EDGES[:3]), *_expect("work", _FREEDOMS[:6]), *_expect("either", _EMPTY_ROWS)]
    elsewhere = _OTHER_DEVICE[: 2 if name in ("rowwise", "fused") else 1]
    return asked + (_expect("refuse", elsewhere) if cuda else [])


def _expect(expect: Expected, table: "list[ContractQuestion]") -> list[ContractQuestion]:
    return [replace(question, expect=expect) for question in table]


def values(*shape: int, dtype: str = "float32", device: str = "cpu") -> Tensor:
    """Return numbers from 0.5 to 2.5 that differ by position, the same on every device."""
    count = math.prod(shape)
    return (0.5 + torch.arange(count, dtype=torch.float64) % 17 / 8).reshape(shape).to(device, getattr(torch, dtype))


def _ask(
    id: str,
    about: str,
    x: Callable[[str], Any] | None = None,
    gamma: Callable[[str], Any] | None = None,
    *,
    dtype: str = "float32",
    **more: Any,
) -> ContractQuestion:
    def make(device: str) -> Call:
        plain_x = values(M, N, dtype=dtype, device=device)
        plain_gamma = values(N, dtype=dtype, device=device)
        given = {name: value(device) if callable(value) else value for name, value in more.items()}
        return Call(x(device) if x else plain_x, gamma(device) if gamma else plain_gamma, **given)

    return ContractQuestion(id, dtype, about, "refuse", make)


def _x_of(dtype: str) -> Callable[[str], Tensor]:
    return lambda device: values(M, N, device=device).to(getattr(torch, dtype))


def _gamma_of(dtype: str) -> Callable[[str], Tensor]:
    return lambda device: values(N, device=device).to(getattr(torch, dtype))


def _shaped(*shape: int, dtype: str = "float32") -> Callable[[str], Tensor]:
    return lambda device: values(*shape, dtype=dtype, device=device)


def _placed(layout: str, *shape: int) -> Callable[[str], Tensor]:
    return lambda device: place(values(*shape, device=device), layout)


def _zeros(rows: int, columns: int) -> Callable[[str], Tensor]:
    return lambda device: torch.zeros(rows, columns, dtype=torch.float16, device=device)


_EMPTY_ROWS = [_ask("x of no columns", "x", _shaped(M, 0), _shaped(0))]
_OTHER_DEVICE = [  # the second is a Triton kernel's: compiled, it has no CPU
    _ask("gamma on the CPU beside x on a GPU", "gamma", gamma=lambda _: values(N)),
    _ask("x and gamma on the CPU of a GPU machine", "x", lambda _: values(M, N), lambda _: values(N)),
]
_ASKED_OF_ANYONE = ("gamma one too short", "gamma one too long", "gamma on the meta device")

# No implementation can give these a meaning.
_SENSELESS = [
    _ask("gamma one too short", "gamma", gamma=_shaped(N - 1)),
    _ask("gamma one too long", "gamma", gamma=_shaped(N + 1)),
    _ask("gamma on the meta device", "gamma", gamma=lambda _: torch.empty(N, device="meta")),
    _ask("gamma of length 1", "gamma", gamma=_shaped(1)),
    _ask("gamma of two dimensions", "gamma", gamma=_shaped(1, N)),
    _ask("gamma of no dimension", "gamma", gamma=_shaped()),
    _ask("gamma of integers", "gamma", gamma=_gamma_of("int32")),
    _ask("gamma float16 beside x float32", "gamma", gamma=_gamma_of("float16")),
    _ask("gamma bfloat16 beside x float16", "gamma", gamma=_gamma_of("bfloat16"), dtype="float16"),
    _ask("x a list", "x", lambda _: [[1.0] * N]),
    _ask("x of integers", "x", _x_of("int32"), _gamma_of("int32")),
    _ask("x of booleans", "x", _x_of("bool"), _gamma_of("bool")),
    _ask("x complex", "x", _x_of("complex64"), _gamma_of("complex64")),
    _ask("x of no dimension", "x", _shaped(), _shaped(1)),
    *_EMPTY_ROWS,
    _ask("eps 0", "eps", eps=0.0),
    _ask("eps negative", "eps", eps=-1.0),
    _ask("eps NaN", "eps", eps=math.nan),
    _ask("eps infinite", "eps", eps=math.inf),
    _ask("eps a bool", "eps", eps=True),
    _ask("eps text", "eps", eps="1e-6"),
    _ask("eps None", "eps", eps=None),
]

# What `rowwise` leaves out, beyond the senseless.
_ROWWISE_LIMITS = [
    _ask("gamma None", "gamma", gamma=lambda _: None),
    _ask("gamma float32 beside x float16", "gamma", gamma=_gamma_of("float32"), dtype="float16"),
    _ask("gamma strided", "gamma", gamma=_placed("every_second", N)),
    _ask("x of one dimension", "x", _shaped(N)),
    _ask("x of three dimensions", "x", _shaped(2, M, N)),
    _ask("x sliced out of wider rows", "x", _placed("sliced_rows", M, N)),
    _ask("x transposed", "x", _placed("transposed_heads", M, N)),
    _ask("x float64", "x", dtype="float64"),
    _ask("x bfloat16", "x", dtype="bfloat16"),
    _ask("x of 4097 columns", "x", _shaped(1, 4097), _shaped(4097)),
    _ask(
        "4097 rows of 4096: partials past 64 MiB", "x", _zeros(4097, 4096), _shaped(4096, dtype="float16"),
        dtype="float16",
    ),
    _ask(
        "4097 rows of 4096 without gradient", "x", _zeros(4097, 4096), _shaped(4096, dtype="float16"),
        dtype="float16", grad=False,
    ),
]  # fmt: skip

# What `rowwise`'s backward launcher is never given by autograd, and must not take from anyone else either.
_GRADIENTS = [
    _ask("dy one column too wide", "dy", dy=_shaped(M, N + 1)),
    _ask("dy float16 beside x float32", "dy", dy=_shaped(M, N, dtype="float16")),
    _ask("dy on the meta device", "dy", dy=lambda _: torch.empty(M, N, device="meta")),
    _ask("dy transposed", "dy", dy=_placed("transposed_heads", M, N)),
]

# At the edge of what everybody should do, and right.
_EDGES = [
    _ask("one row", "x", _shaped(1, N)),  # first: who is wrong in its first call alone is not asked for nothing there
    _ask("no rows", "x", _shaped(0, N)),
    _ask("without gradient", "x", grad=False),
    _ask("eps an integer", "eps", eps=1),
    _ask("eps a 0-d tensor", "eps", eps=torch.tensor(1e-6, dtype=torch.float64)),
]

# What `fused` and PyTorch take and `rowwise` does not; the first six are asked of everybody.
_FREEDOMS = [
    _ask("x of one dimension", "x", _shaped(N)),
    _ask("x of three dimensions", "x", _shaped(2, M, N)),
    _ask("x sliced out of wider rows", "x", _placed("sliced_rows", M, N)),
    _ask("x transposed", "x", _placed("transposed_heads", M, N)),
    _ask("gamma strided", "gamma", gamma=_placed("every_second", N)),
    _ask("no rows in three dimensions", "x", _shaped(2, 0, N)),
    _ask("x float64", "x", dtype="float64"),
    _ask("gamma None", "gamma", gamma=lambda _: None),
    _ask("gamma float32 beside x float16", "gamma", gamma=_gamma_of("float32"), dtype="float16"),
    _ask("x of 4097 columns", "x", _shaped(1, 4097), _shaped(4097)),
]
