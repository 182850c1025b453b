"""A run of `gradcheck` on the page: every question with its verdict and error."""

from collections.abc import Iterator, Mapping
from typing import Any

from rmsnorm_cli.figures import Drawing
from rmsnorm_cli.page import html
from rmsnorm_cli.page.html import Markup
from rmsnorm_cli.results import Table

LIMITS = (
    "Derivatives were checked at these float64 inputs, of the program each row names; a kernel that takes no float64 "
    "is the matter of verify.",
    "The reference's derivatives are evidence about the oracle, not about a kernel.",
)


def parts(summary: Mapping[str, Any], records: list[dict[str, Any]]) -> Iterator[Markup | Drawing]:
    """Yield what stands on the page, from the run's summary."""
    checks = summary["checks"]
    yield html.element("h3", "Questions and answers")
    rows = tuple((c["impl"], f"{c['status']}: {c['detail']}", c["scope"], c["gate"], c["case"]) for c in checks)
    yield html.table(Table("questions", ("program", "verdict", "scope", "gate", "case"), rows))
    yield html.element("h3", "The synthetic partitions")
    yield html.facts({name: f"sha256 {digest}" for name, digest in summary["partitions"].items()})
    yield html.element("h3", "What this does not show")
    yield html.bullets(LIMITS)
