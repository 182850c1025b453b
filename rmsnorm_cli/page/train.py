"""A run of `train` on the page: loss curves, and how far the implementation's lies from one rounding's envelope."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from rmsnorm_cli import figures
from rmsnorm_cli.figures import Drawing
from rmsnorm_cli.page import html
from rmsnorm_cli.page.html import Markup
from rmsnorm_cli.results import Table

LIMITS = (
    "A loss that goes down proves no gradient: almost every mistake in a norm leaves it going down.",
    "This is one small network at one width and batch; other shapes and dtypes are the matter of verify.",
    "Beyond the horizon, where one rounding has grown to the noise of seeds, curves part for nobody's reasons.",
)


def parts(summary: Mapping[str, Any], records: list[dict[str, Any]]) -> Iterator[Markup | Drawing]:
    """Yield what stands on the page, from the run's summary and its records, one a step."""
    yield html.element("h3", "Loss curves")
    for optimizer in dict.fromkeys(record["optimizer"] for record in records if "optimizer" in record):
        drawing = _curves(optimizer, summary, [r for r in records if r.get("optimizer") == optimizer])
        if drawing is not None:
            yield drawing
    yield html.table(_verdicts(summary["curves"]))
    yield html.element("h3", "Error on the test partition")
    yield html.table(_errors(summary["test_mse"]))
    yield html.element("h3", "First step and later ones, from equal weights")
    yield html.table(_gradients(summary["gradients"]))
    failed = [check for check in summary.get("checks", []) if check["status"] not in ("passed", "skipped")]
    if failed:
        yield html.element("h3", "What did not pass")
        rows = tuple((c["case"], c["status"], c["scope"], c["gate"], c["detail"]) for c in failed)
        yield html.table(Table("what did not pass", ("case", "status", "scope", "gate", "seen"), rows))
    yield html.element("h3", "What these curves do not show")
    yield html.bullets(LIMITS)


def _curves(optimizer: str, summary: Mapping[str, Any], records: list[dict[str, Any]]) -> Drawing | None:
    """Draw losses and distances from the reference; a path that diverged is drawn as far as it has numbers."""
    paths: dict[str, dict[int, float]] = {}
    kinds: dict[str, str] = {}
    for record in records:
        if isinstance(record["loss"], (int, float)):
            paths.setdefault(record["path"], {})[record["step"]] = record["loss"]
            kinds[record["path"]] = record["kind"]
    reference = next((path for path, kind in kinds.items() if kind == "reference"), None)
    if reference is None:
        return None
    base = paths[reference]
    steps = sorted(base)
    apart = {
        path: [abs(loss[step] - base[step]) for step in steps if step in loss]
        for path, loss in paths.items()
        if kinds[path] in ("implementation", "seed")
    }
    twins = [loss for path, loss in paths.items() if kinds[path] == "twin"]
    spread = [max((abs(loss[s] - base[s]) for loss in twins if s in loss), default=0.0) for s in steps]
    envelope = list(accumulate(spread, max))
    declared = summary["limits"]["loss_curve"]
    limit = [
        declared["twin_factor"] * e + declared["floor_over_loss"] * abs(base[s])
        for e, s in zip(envelope, steps, strict=True)
    ]
    shown = {path: [loss[s] for s in steps if s in loss] for path, loss in paths.items() if kinds[path] != "twin"}
    several = f"the largest of {len(twins)} twins so far, which are"
    so_far = "the twin's largest so far, which is" if len(twins) == 1 else several
    return figures.losses(
        f"loss-{optimizer}",
        f"{optimizer}, {summary['implementation']} beside the reference, float32, {len(steps)} steps, on "
        f"{summary['device']}. Below: distance of each loss from the reference's; grey: {so_far} the reference with "
        "every output of the norm moved by one rounding; dashed: what the implementation may reach.",
        f"{optimizer}: {summary['implementation']} against the reference\nfloat32, {summary['device']}",
        shown,
        apart,
        envelope,
        limit,
    )


def _verdicts(curves: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = ("optimizer", "verdict", "steps judged", "largest |Δloss|", "largest of a twin", "share of the limit")
    rows = tuple(
        (
            optimizer,
            f"{curve['status']}: {curve['detail']}",
            f"{curve['horizon']} of {curve['steps']}",
            _short(curve["largest_difference"]),
            _short(curve["largest_twin"]),
            _short(curve["worst"]),
        )
        for optimizer, curve in curves.items()
    )
    return Table("verdicts on the loss curves", columns, rows)


def _errors(test_mse: Mapping[str, Mapping[str, float]]) -> Table:
    rows = tuple((path, optimizer, _short(mse, 9)) for optimizer, by in test_mse.items() for path, mse in by.items())
    return Table("error on the test partition", ("path", "optimizer", "mean squared error"), rows)


def _gradients(gradients: Mapping[str, list[Mapping[str, Any]]]) -> Table:
    columns = ("when", "quantity", "relative error", "of a twin", "norm ratio", "cosine")
    rows = tuple(
        (when, d["quantity"], _short(d["relative"]), _short(d["twin"]), _short(d["ratio"], 9), _short(d["cosine"], 9))
        for when, found in gradients.items()
        for d in found
    )
    return Table("output and gradients against the reference's", columns, rows)


def _short(value: Any, digits: int = 3) -> str:
    return f"{value:.{digits}g}" if isinstance(value, (int, float)) else str(value)
