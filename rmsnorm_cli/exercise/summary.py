"""What a run of one mistake keeps of what it showed, so that `report` can set the same on a page."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rmsnorm_cli.faults import Fault, apply
from rmsnorm_cli.results import Table

LETTERS = "u = dy · gamma, x̂ = x · rstd"


def kept(fault: Fault, texts: Sequence[str], tables: Sequence[Table], notes: Sequence[str]) -> dict[str, Any]:
    """Return texts, change, tables and notes as plain values for the run's summary."""
    return {"texts": texts, "diff": apply.diff(fault), "tables": [asdict(table) for table in tables], "notes": notes}
