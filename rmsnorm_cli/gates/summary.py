"""From single verdicts to the `scopes` of the JSON document: one entry per implementation, scope, gate and dtype."""

from collections.abc import Iterable
from typing import Any

from rmsnorm_cli.results import CaseResult, count


def scopes(results: Iterable[CaseResult]) -> list[dict[str, Any]]:
    """Return impl, execution, scope, gate, dtype, cases, the count of each status, and the worst error with its case.

    `worst` holds the largest error as a fraction of its tolerance; `value` is None where a failure has no such number
    (a wrong shape, a NaN out of place) and the whole entry is None where the gate measures none.
    """
    groups: dict[tuple[str, ...], list[CaseResult]] = {}
    for result in results:
        key = (result.impl, result.execution, result.scope, result.gate, result.dtype)
        groups.setdefault(key, []).append(result)
    names = ("impl", "execution", "scope", "gate", "dtype")
    return [
        dict(zip(names, key, strict=True)) | {"cases": len(group), **count(group), "worst": _worst(group)}
        for key, group in groups.items()
    ]


def _worst(group: list[CaseResult]) -> dict[str, Any] | None:
    measured = [result for result in group if result.worst is not None]
    unmeasured = [result for result in group if result.worst is None and result.status == "failed"]
    over = [result for result in measured if result.status == "failed"]
    pick = max(over or measured, key=lambda result: result.worst or 0.0, default=None)
    if unmeasured and not over:
        pick = unmeasured[0]
    return None if pick is None else {"value": pick.worst, "case": pick.case}
