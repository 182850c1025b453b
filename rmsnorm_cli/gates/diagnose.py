"""What the failures of an implementation point to over all its cases: their pattern, and what it really used."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from rmsnorm_cli.results import CaseResult, Scope

NUMERIC: tuple[Scope, ...] = ("forward", "dx", "dgamma")
WHERE = {
    "forward": "the statistics of a row (mean square, eps, rstd), gamma, or the row address",
    "dx": "the rstd³ term, mean(u·x) or the saved rstd: forward and dgamma are right",
    "dgamma": "the partials, the second reduction, or a sum against a mean: forward and dx are right",
}
Facts = Callable[[CaseResult], bool]


def diagnose(results: Iterable[CaseResult]) -> str:
    """Return what the failures of one implementation have in common, and what it really used; "" if nothing failed.

    The first is the pattern over the cases of the declared tolerance, the second what the fit has read off the results.
    """
    results = list(results)
    judged = [result for result in results if result.status in ("passed", "failed") and "distribution" in result.extra]
    by_scope = {scope: [result for result in judged if result.scope == scope] for scope in NUMERIC}
    failing = [scope for scope in NUMERIC if any(result.status == "failed" for result in by_scope[scope])]
    return "\n".join([*(_of_scope(scope, by_scope[scope], failing) for scope in failing), *_read_off(results)])


def _read_off(results: Iterable[CaseResult]) -> Iterator[str]:
    """Yield what most failed fits of a scope say was really used, and what the next most say."""
    failed = [result for result in results if result.status == "failed" and "read" in result.extra]
    for scope in NUMERIC:
        said = Counter(result.extra["read"] for result in failed if result.scope == scope)
        if said:
            yield f"{scope}, read off the results: {'; elsewhere '.join(text for text, _ in said.most_common(2))}"


def _of_scope(scope: Scope, results: Sequence[CaseResult], failing: Sequence[Scope]) -> str:
    failed = [result for result in results if result.status == "failed"]
    clues = [_named(failed), *_conditions(results), _place(failed)]
    if not any(result.extra.get("regions") for result in failed):  # of numbers that were not compared none is wrong
        clues.append(Counter(result.detail for result in failed).most_common(1)[0][0])
    elif list(failing) == [scope] or scope == "forward":
        clues.append(WHERE[scope])
    elif "forward" in failing:
        clues.append("it may only follow from the forward")
    share = f"{scope}: {len(failed)} of {len(results)} cases fail"
    return "; ".join([share, *(clue for clue in clues if clue)])


def _named(failed: Sequence[CaseResult]) -> str:
    """Return the mistake that most failing cases fit, if half of them fit it; a case may fit several."""
    fitting = Counter(name for result in failed for name in result.extra.get("hypothesis", "").split("; or ") if name)
    if not fitting:
        return ""
    name, count = fitting.most_common(1)[0]
    return f"{count} of them are what this mistake gives: {name}" if 2 * count >= len(failed) else ""


def _conditions(results: Sequence[CaseResult]) -> list[str]:
    """Return what all failures have in common and some right cases have not.

    A condition that most of its cases fail under says much; without one, the narrowest is named.
    """
    strong, weak = [], []
    for text, holds in CONDITIONS:
        inside = [result for result in results if holds(result)]
        outside = [result for result in results if not holds(result)]
        failing = sum(result.status == "failed" for result in inside)
        if not failing or not outside or any(result.status == "failed" for result in outside):
            continue
        weak.append((len(inside), text))
        if 2 * failing >= len(inside):
            strong.append(text)
    return strong or [text for _, text in sorted(weak)[:1]]


_NARROW = ("float16", "bfloat16")


def _off_power_of_two(result: CaseResult) -> bool:
    N: int = result.extra["N"]
    return N & (N - 1) != 0


def _small_rows(result: CaseResult) -> bool:
    return result.extra["distribution"] in ("tiny", "spread", "zero_rows", "fp16_range", "exact", "stalling")


def _extreme(result: CaseResult) -> bool:
    return result.extra["distribution"] in ("fp16_range", "spread", "large", "spike") and result.dtype == "float16"


def _strided(result: CaseResult) -> bool:
    return result.extra["layout"] not in ("contiguous", "1d", "3d", "4d")


CONDITIONS: tuple[tuple[str, Facts], ...] = (
    ("only widths that are no power of two: the denominator, a mask or the row address", _off_power_of_two),
    ("only more than one row: the row address, or rows mixed up", lambda result: bool(result.extra["M"] > 1)),
    ("only rows of tiny, zero or mixed rms: where eps is added, or a power of rstd", _small_rows),
    ("only 16-bit dtypes: something is rounded or summed in x's dtype", lambda result: result.dtype in _NARROW),
    ("only infinities and NaN", lambda result: bool(result.extra["distribution"] == "nonfinite")),
    ("only fp16 values whose squares leave fp16: squares in x's dtype", _extreme),
    ("only layouts that are not dense: a stride is assumed", _strided),
    ("only layouts of dy: it is read as if it were dense", lambda result: "_dy" in result.extra["layout"]),
    ("only N > 1: a term that vanishes for one column", lambda result: bool(result.extra["N"] > 1)),
)


def _place(failed: Sequence[CaseResult]) -> str:
    """Return where in the tensors the wrong elements lie, if it is the same place in every failing case."""
    regions = [result.extra.get("regions") or {} for result in failed]
    if not regions or not all(regions):
        return ""

    def always(test: Callable[[dict[str, float]], bool]) -> bool:
        return all(test(dict(shares)) for shares in regions)

    if always(lambda s: "tail columns" in s and s["tail columns"] > 0 and s["full columns"] == 0):
        return "only columns past the last full block are wrong: a mask, or a loop that stops early"
    if always(lambda s: "last row" in s and s["last row"] > 0 and not s["first row"] and not s.get("rows between")):
        return "only the last row is wrong: the grid, or a bound on rows"
    if always(lambda s: "first row" in s and s["first row"] == 0 and s["last row"] > 0):
        return "the first row is right and later ones are not: the row's address or statistics"
    if always(lambda s: s["all"] == 1.0):
        return "every element is wrong"
    if always(lambda s: s["rows touched"] < 1 and s["columns touched"] == 1):
        return "whole rows are wrong and others right: the statistics of a row"
    return ""
