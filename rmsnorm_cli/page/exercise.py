"""A run of `exercise` on the page: one mistake as it was shown, or which check catches which mistake."""

from collections.abc import Iterator, Mapping
from typing import Any

from rmsnorm_cli import figures
from rmsnorm_cli.figures import Drawing
from rmsnorm_cli.page import html
from rmsnorm_cli.page.html import Markup
from rmsnorm_cli.results import Table

USUAL = "usual test"
LIMITS = (
    "The score counts the mistakes of this catalogue; a mistake that is not in it was not tried.",
    "A mistake that a check does not catch here may still fail it on other inputs; each ran on the inputs of its page.",
    "Changes listed as equivalent alter no result and are not counted.",
)


def parts(summary: Mapping[str, Any], records: list[dict[str, Any]]) -> Iterator[Markup | Drawing]:
    """Yield what stands on the page, from the run's summary."""
    if "matrix" not in summary:
        yield from _one(summary["exercise"])
        return
    found, score = summary["matrix"], summary["score"]
    yield html.element("h3", "Which check catches which mistake")
    yield html.element(
        "p",
        f"{score['caught']} of {score['of']} mistakes are caught by a check; the usual test catches {score['naive']}.",
    )
    for kernel in dict.fromkeys(map(_kernel, found["faults"])):
        yield _matrix(found, kernel)
    survivors = [entry["name"] for entry in found["faults"] if entry["name"] in score["survivors"]]
    if survivors:
        yield html.element("p", f"Not caught by any check: {', '.join(survivors)}.")
    aside = [
        (
            entry["name"],
            "no mistake" if entry["equivalent"] else "not run here",
            entry["equivalent"] or entry["not_run"],
        )
        for entry in found["faults"]
        if entry["equivalent"] or entry["not_run"]
    ]
    if aside:
        yield html.table(Table("not in the score", ("change", "standing", "why"), tuple(aside)))
    yield html.element("h3", "What this matrix does not show")
    yield html.bullets(LIMITS)


def _one(found: Mapping[str, Any]) -> Iterator[Markup]:
    """Yield one mistake as the command showed it: what it is, the change, the tables, what there is to say."""
    shown = found.get("shown")
    yield html.element("h3", f"The mistake: {found['fault']}")
    if not shown:
        yield html.element("p", "An earlier version of the tool ran this and kept nothing to show; run it again.")
        return
    yield from (html.element("p", text) for text in shown["texts"])
    yield html.scrolling(html.element("pre", shown["diff"]), "what is changed")
    for table in shown["tables"]:
        made = Table(**table)
        yield html.element("h3", made.title)
        yield html.table(made)
    yield html.element("h3", "In words")
    yield html.bullets(shown["notes"])


def _kernel(entry: Mapping[str, Any]) -> str:
    return str(entry.get("kernel", "rowwise"))


def _matrix(found: Mapping[str, Any], kernel: str) -> Drawing:
    mistakes = [
        entry
        for entry in found["faults"]
        if _kernel(entry) == kernel and not entry["equivalent"] and not entry["not_run"]
    ]
    cells = {}
    for entry in mistakes:
        cells[entry["name"], USUAL] = "caught" if entry["naive"] == "caught" else "passed"
        for gate in found["gates"]:
            asked = gate in entry["caught_by"] or gate in entry["asked"]
            caught = "caught" if gate in entry["caught_by"] else "passed"
            cells[entry["name"], gate] = caught if asked else "not asked"
    return figures.matrix(
        "mistakes" if kernel == "rowwise" else f"mistakes-{kernel}",
        f"Mistakes in {kernel} against the checks, executed on {found['execution']}. Filled: caught; outlined: passes; "
        "empty: not asked.",
        f"mistakes in {kernel} against checks ({found['execution']})",
        [entry["name"] for entry in mistakes],
        [USUAL, *found["gates"]],
        cells,
    )
