"""The kinds of value a key can hold: names, counts, shapes, seeds, each with its range and its own refusal."""

import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rmsnorm_cli.inputs.cases import DISTRIBUTIONS, LAYOUTS

IMPLEMENTATIONS = ("reference", "rowwise", "fused", "torch", "compile", "liger", "quack", "fla")

SMALLEST_EPS = 1.18e-38  # just above the smallest normal fp32; below, eps is zero to a kernel and a zero row is 0 / 0
LARGEST_EPS = 3.4e38  # just under the largest fp32
LARGEST_SEED = 2**32 - 1
LARGEST_COUNT = 2**31 - 1
LARGEST_WIDTH = 2**24
LARGEST_START = 15  # numbers of a byte in 16 bytes, less one

Dtype = Literal["float32", "float16", "bfloat16", "float64"]
TimedDtype = Literal["float32", "float16", "bfloat16"]
Scope = Literal["forward", "dx", "dgamma", "contract", "properties"]
Perimeter = Literal["forward", "forward_train", "backward", "forward_backward"]
Measure = Literal["whole", "gpu", "host"]
Optimizer = Literal["adam", "sgd"]


@dataclass(frozen=True)
class Says:
    """Put beside a type whose constraints do not read as words: what messages say is expected, a range apart."""

    text: str


def refusal(wrong: str, expected: str = "", nearest: str = "") -> PydanticCustomError:
    """Make the error of a validator of ours; an empty `expected` means what the type says."""
    parts = {"wrong": wrong, "expected": expected, "nearest": nearest}
    return PydanticCustomError("refused", "{wrong}, expected {expected}", parts)


def _distinct(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse a list that names one thing twice: its cases would count as more evidence than they are."""
    for index, item in enumerate(items):
        if item in items[:index]:
            raise refusal(f"item {index + 1} repeats item {items.index(item) + 1}", "every item once")
    return items


def _implementation(name: str) -> str:
    """Accept a known name or the form of a callable's address; whether that is there is found out when it is loaded."""
    place, colon, attribute = name.rpartition(":")
    if name in IMPLEMENTATIONS or (colon and place and attribute.isidentifier()):
        return name
    nearest = get_close_matches(name, IMPLEMENTATIONS, n=1)
    raise refusal("no such implementation", nearest=nearest[0] if nearest else "")


def _among(names: Collection[str]) -> AfterValidator:
    """Accept the names of a table that another module keeps."""

    def check(name: str) -> str:
        if name not in names:
            nearest = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
            raise refusal("no such name", nearest=nearest[0] if nearest else "")
        return name

    return AfterValidator(check)


def _no_parent(word: str) -> str:
    """Refuse two dots in a row: a word becomes part of a folder's name."""
    if ".." in word:
        raise refusal("two dots in a row")
    return word


def _draw(seed: Any) -> Any:
    """Turn the word random into a fresh seed, so that everything after this holds the integer."""
    return secrets.randbelow(2**31) if seed == "random" else seed


class Sizes(NamedTuple):
    """A shape in parts: M rows, N columns, how many numbers after 16 bytes x and dy start, and the dtype.

    The dtype is None where the shape is timed in each one asked for.
    """

    M: int
    N: int
    start: int
    dtype: str | None

    @property
    def rows(self) -> str:
        """Return the shape as it is written without its dtype."""
        return f"{self.M}x{self.N}" + (f"+{self.start}" if self.start else "")


def sizes(shape: str) -> Sizes:
    """Take a shape of the form that `Shape` accepts apart."""
    M, N, start, dtype = _SHAPE.fullmatch(shape).groups()  # type: ignore[union-attr]
    return Sizes(int(M), int(N), int(start or 0), dtype)


_SHAPE = re.compile(r"([0-9]{1,12})[xX]([0-9]{1,12})(?:\+([0-9]{1,2}))?(?::([a-z0-9]+))?")


def _shape(value: Any) -> Any:
    """Write a shape as 128x257, 128x257+1 or 128x257:float16, whether it came as such a text or as a list."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(size) is int for size in value):
        value = f"{value[0]}x{value[1]}"
    if not (isinstance(value, str) and _SHAPE.fullmatch(value)):
        raise refusal("no shape")
    shape = sizes(value)
    for size, what, most in ((shape.M, "rows", LARGEST_COUNT), (shape.N, "columns", LARGEST_WIDTH)):
        if not 1 <= size <= most:
            raise refusal(f"{size} {what}")
    if shape.start > LARGEST_START:
        raise refusal(f"{shape.start} numbers after 16 bytes, which hold {LARGEST_START + 1} at most")
    dtype = shape.dtype
    if dtype is not None and dtype not in get_args(TimedDtype):
        nearest = get_close_matches(dtype, get_args(TimedDtype), n=1)
        raise refusal(f"no such dtype as {dtype}", nearest=f"{shape.rows}:{nearest[0]}" if nearest else "")
    return shape.rows + (f":{dtype}" if dtype else "")


Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], Field(min_length=1), AfterValidator(_distinct)]

Text = Annotated[
    str,
    Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$"),
    Says("text that is not empty and has no control characters"),
]
Word = Annotated[
    str,
    Field(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9._+-]*)?$"),
    AfterValidator(_no_parent),
    Says("up to 64 letters, digits and . _ + - that begin with a letter or digit and hold no .."),
]
Device = Annotated[
    str, Field(pattern=r"^(auto|interpreter|cuda(:[0-9]{1,3})?)$"), Says("auto, cuda, cuda:N or interpreter")
]
Implementation = Annotated[
    Text,
    AfterValidator(_implementation),
    Says(f"{', '.join(IMPLEMENTATIONS)}, package.module:callable or path/file.py:callable"),
]

Distribution = Annotated[str, _among(DISTRIBUTIONS), Says(f"one of {', '.join(DISTRIBUTIONS)}")]
Layout = Annotated[str, _among(LAYOUTS), Says(f"one of {', '.join(LAYOUTS)}")]

Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED), BeforeValidator(_draw), Says('"random" or an integer')]
Rows = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Cols = Annotated[int, Field(ge=1, le=LARGEST_WIDTH)]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Repeats = Annotated[int, Field(ge=2, le=100_000)]
Features = Annotated[int, Field(ge=1, le=65_536)]
Shape = Annotated[
    str,
    BeforeValidator(_shape),
    Says(
        'rows x cols as "128x257" or [128, 257], as "128x257:float16" for that dtype alone, '
        'as "128x257+1" for x and dy that start one number after 16 bytes; '
        f"both from 1, cols to {LARGEST_WIDTH}"
    ),
]

Eps = Annotated[float, Field(ge=SMALLEST_EPS, le=LARGEST_EPS), Says("a finite number above 0 that fp32 can hold:")]
Tightened = Annotated[float, Field(ge=0), Says("a finite number that may only be tightened:")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Rate = Annotated[float, Field(gt=0, le=10)]
