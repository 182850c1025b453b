"""The declared tolerances: one frozen table, written before any comparison, importable without torch.

A result passes where |got - want| <= atol + rtol * |want|, with want in float64. A user may only tighten a bound.
They hold for rows whose rms lies between 1e-3 and 1e2, gamma of order one, and dy scaled like a mean loss (1/sqrt(M)).
"""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Tolerance(NamedTuple):
    """Absolute and relative bound of one dtype."""

    atol: float
    rtol: float


DECLARED: Mapping[str, Tolerance] = MappingProxyType(
    {
        "float32": Tolerance(atol=1e-5, rtol=1e-4),
        "float16": Tolerance(atol=3e-3, rtol=3e-3),  # 6.1 unit roundoffs (2^-11)
        "bfloat16": Tolerance(atol=2.4e-2, rtol=2.4e-2),  # float16's, by the ratio of unit roundoffs (2^-8 / 2^-11)
        # The oracle computes in float64 too, so the difference is two rounding errors of sums of up to 131072 terms and
        # not one. A sequential sum of n terms is off by at most n * 2^-53 (1.5e-11 there) and by sqrt(n) * 2^-53 as a
        # rule (4e-14): 1e-12 leaves room for the rule, 25 times, and is 1e7 to 1e8 below anything computed in float32.
        "float64": Tolerance(atol=1e-12, rtol=1e-12),
    }
)


def canonical_json(table: Mapping[str, Tolerance] = DECLARED) -> str:
    """Write a table of tolerances in the one form that is hashed: sorted keys, no spaces, shortest floats."""
    return json.dumps({dtype: row._asdict() for dtype, row in table.items()}, sort_keys=True, separators=(",", ":"))


def digest(table: Mapping[str, Tolerance] = DECLARED) -> str:
    """Return the sha256 of a table's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(table).encode("utf-8")).hexdigest()


DECLARED_SHA256 = digest()
