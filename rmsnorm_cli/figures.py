"""All plotting: plain values in, a matplotlib figure out, saved as SVG and PNG. No number is computed here but limits.

A figure is narrow, for a phone, and grows downwards. Everything that is not a series is drawn in one
ink, which a page replaces by its own text colour, so that one SVG reads on light and on dark ground.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rmsnorm_cli.rundir import atomic

WIDTH = 4.8  # inches: on a phone the letters come out at 10 pixels, beside another figure on a desk at 14
INK = "#010203"  # no series has it; a page replaces it by currentColor
# Okabe and Ito's colours for the colour-blind, black left out, lightened or darkened to read on white and on near-black
COLOURS = ("#d55e00", "#2f8fd0", "#189b72", "#b8860b", "#c05a94", "#6f7fd6", "#8a8a8a", "#a0522d")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.titlesize": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Drawing:
    """A named figure with the sentence that says what it shows: card, dtype and perimeter among it."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Point:
    """A value with the limits of its interval and, where it has one, its dispersion, of one series at one place."""

    where: str
    series: str
    value: float
    low: float
    high: float
    spread: tuple[float, float] | None = None


def latency(
    name: str, caption: str, title: str, panels: Mapping[str, Sequence[Point]], series: Sequence[str]
) -> Drawing:
    """Draw times in µs on a log axis, shapes downwards; thick: interval of the median, thin: 10th to 90th percentile.

    `series` gives every implementation its colour, whether it is in this figure or not; each has a line of its own.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = downwards(panels, 0.085 * len(series) + 0.1)
        for axis, (_, points, names) in axes:
            for point in points:
                i = series.index(point.series)
                y = names.index(point.where) + (i - (len(series) - 1) / 2) * 0.8 / max(1, len(series))
                colour = COLOURS[i % len(COLOURS)]
                if point.spread is not None:
                    axis.hlines(y, *point.spread, color=colour, linewidth=1)
                axis.hlines(y, point.low, point.high, color=colour, linewidth=3.5)
                axis.plot(point.value, y, MARKS[i % len(MARKS)], color=colour, markersize=4.5)
            axis.set_xscale("log")
        limits = [axis.get_xlim() for axis, _ in axes]
        for axis, _ in axes:
            axis.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
            plain_ticks(axis.xaxis)
        axes[-1][0].set_xlabel("µs a call (log)")
        headed(figure, title, series)
    return Drawing(name, caption, figure)


def shares(
    name: str, caption: str, title: str, panels: Mapping[str, Sequence[Point]], series: Sequence[str]
) -> Drawing:
    """Draw shares of a plain stream's speed in percent, shapes downwards, the stream itself at 100."""
    furthest = max([108.0, *(point.high + 4 for points in panels.values() for point in points)])
    with matplotlib.rc_context(STYLE):
        figure, axes = downwards(panels, 0.3)
        for axis, (_, points, names) in axes:
            for i, line in enumerate(series):
                mine = [point for point in points if point.series == line]
                style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)], "markersize": 5}
                y = [names.index(point.where) for point in mine]
                axis.plot([point.value for point in mine], y, linewidth=0.8, **style)
                axis.hlines(y, [p.low for p in mine], [p.high for p in mine], color=style["color"], linewidth=3)
            axis.axvline(100, color=INK, linewidth=1, linestyle="--")
            axis.set_xlim(0, furthest)
        axes[-1][0].set_xlabel("% of the stream's speed")
        headed(figure, title, series, ("the plain stream",))
    return Drawing(name, caption, figure)


def downwards(
    panels: Mapping[str, Sequence[Point]], step: float
) -> tuple[Figure, list[tuple[Any, tuple[str, Sequence[Point], list[str]]]]]:
    """Return a figure with an axis for each panel, its places downwards, as a phone scrolls, `step` inches each."""
    named = [(key, points, list(dict.fromkeys(point.where for point in points))) for key, points in panels.items()]
    rows = [max(1, len(names)) for _, _, names in named]
    figure = Figure(figsize=(WIDTH, 1.5 + sum(step * count + 0.55 for count in rows)), layout="constrained")
    axes = figure.subplots(len(named), 1, squeeze=False, height_ratios=[step * count + 0.1 for count in rows])[:, 0]
    for axis, (key, _, names) in zip(axes, named, strict=True):
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.tick_params(axis="y", length=0)
        for between in range(1, len(names)):
            axis.axhline(between - 0.5, color=INK, alpha=0.15, linewidth=0.8)
        axis.set_title(key, loc="left")
        axis.grid(axis="x")
    return figure, list(zip(axes, named, strict=True))


def errors(
    name: str, caption: str, title: str, panels: Mapping[str, Mapping[str, Mapping[int, tuple[float, bool]]]]
) -> Drawing:
    """Draw panel (scope) -> dtype -> N -> (worst error over tolerance, passed), the limit at 1.

    Every N has a place of its own: 256 and 257 lie as far apart as 4 and 31, for that is where mistakes show.
    """
    widths = sorted({N for lines in panels.values() for found in lines.values() for N in found})
    series = list(dict.fromkeys(dtype for lines in panels.values() for dtype in lines))
    smallest = 1e-4  # an error of zero is drawn here
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.8 + 2.1 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axis, (scope, lines) in zip(axes, panels.items(), strict=True):
            for i, dtype in enumerate(series):
                found = sorted(lines.get(dtype, {}).items())
                colour, mark = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
                heights = [max(worst, smallest) for _, (worst, _) in found]
                axis.plot(
                    [widths.index(N) for N, _ in found], heights, color=colour, marker=mark, markersize=4, linewidth=1
                )
                wrong = [(widths.index(N), max(worst, smallest)) for N, (worst, passed) in found if not passed]
                axis.plot([x for x, _ in wrong], [h for _, h in wrong], "x", color=colour, markersize=9)
            axis.axhline(1, color=INK, linewidth=1, linestyle="--")
            axis.set_yscale("log")
            axis.set_title(scope, loc="left")
            axis.set_ylabel("error / tolerance")
            axis.grid()
        axes[-1].set_xlabel("N, columns of a row")
        axes[-1].set_xticks(range(len(widths)), [str(N) for N in widths], rotation=60 if len(widths) > 8 else 0)
        headed(figure, title, series, ("the limit",))
    return Drawing(name, caption, figure)


def losses(
    name: str,
    caption: str,
    title: str,
    curves: Mapping[str, Sequence[float]],
    apart: Mapping[str, Sequence[float]],
    envelope: Sequence[float],
    limit: Sequence[float],
) -> Drawing:
    """Draw loss by step for each path, and below it on a log axis how far each lies from the reference.

    `envelope` is the twins', `limit` what the implementation may reach; both by step.
    """
    from matplotlib.ticker import MaxNLocator

    series = list(dict.fromkeys([*curves, *apart]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 3])
        for axis, lines in ((above, curves), (below, apart)):
            for path, values in lines.items():
                i = series.index(path)
                steps = range(1, len(values) + 1)
                # the first is the reference, on which the others may lie: they must not hide it
                width = 4.0 if i == 0 else 0.8 if path.startswith("seed") else 1.4
                axis.plot(steps, values, color=COLOURS[i % len(COLOURS)], linewidth=width)
            axis.set_yscale("log")
            axis.grid()
        plain_ticks(above.yaxis)
        below.fill_between(range(1, len(envelope) + 1), envelope, step="mid", color=INK, alpha=0.18, linewidth=0)
        below.plot(range(1, len(limit) + 1), limit, color=INK, linewidth=1, linestyle="--")
        above.set_ylabel("training loss")
        below.set_ylabel("|loss − reference's|")
        below.set_xlabel("step")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        headed(figure, title, series, ("the limit", "grey: one rounding (twins)"), marked=False)
    return Drawing(name, caption, figure)


def matrix(
    name: str,
    caption: str,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], str],
) -> Drawing:
    """Draw a row for each mistake and a column for each check: filled where the check catches it."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.6 + 0.17 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for (row, column), state in cells.items():
            place = (columns.index(column), rows.index(row))
            if state == "caught":
                axis.plot(*place, "s", color=COLOURS[1], markersize=6)
            elif state == "passed":
                axis.plot(*place, "s", markerfacecolor="none", markeredgecolor=INK, alpha=0.35, markersize=6)
        axis.set_xticks(range(len(columns)), columns, rotation=40, ha="left", rotation_mode="anchor")
        axis.xaxis.tick_top()
        axis.set_yticks(range(len(rows)), rows, fontsize=7.5)
        axis.set_xlim(-0.6, len(columns) - 0.4)
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return Drawing(name, caption, figure)


def headed(
    figure: Figure, title: str, series: Sequence[str], lines: Sequence[str] = (), *, marked: bool = True
) -> None:
    """Give a figure its title and, under it and outside of the axes, a legend of series, dashed and grey lines."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            *([], []),
            color=COLOURS[i % len(COLOURS)],
            marker=MARKS[i % len(MARKS)] if marked else "",
            markersize=4.5,
            linewidth=1 if marked else 2,
            label=line,
        )
        for i, line in enumerate(series)
    ]
    for line in lines:
        style = {"linewidth": 6, "alpha": 0.18} if line.startswith("grey") else {"linestyle": "--", "linewidth": 1}
        handles.append(Line2D([], [], color=INK, label=line.removeprefix("grey: "), **style))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=max(1, min(4 if max(map(len, series), default=0) < 12 else 2, len(handles))),
        fontsize=8,
        title=title,
        title_fontsize=10,
        alignment="left",
        borderaxespad=0.2,
    )


def plain_ticks(axis: Axis) -> None:
    """Label a log axis with plain numbers at 1, 2 and 5 of each decade instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def renamed(drawing: Drawing, name: str) -> Drawing:
    """Return the drawing under another name, for a folder that holds those of several runs."""
    return replace(drawing, name=name)


def save(drawing: Drawing, folder: Path) -> str:
    """Write NAME.svg and NAME.png (white ground) into `folder` and return the SVG for a page."""
    import io

    FigureCanvasAgg(drawing.figure)
    picture, text = io.BytesIO(), io.StringIO()
    drawing.figure.savefig(picture, format="png", dpi=160, facecolor="white")
    with matplotlib.rc_context({"svg.hashsalt": drawing.name, "svg.fonttype": "none"}):
        drawing.figure.savefig(text, format="svg", metadata={"Date": None})
    with atomic.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    atomic.write(folder / f"{drawing.name}.png", picture.getvalue())
    atomic.write(folder / f"{drawing.name}.svg", text.getvalue())
    return inline(text.getvalue(), drawing.name)


def inline(svg: str, name: str) -> str:
    """Return an SVG as an element of a page: no prologue, no metadata, ids of its own, the page's ink."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    return svg.replace(INK, "currentColor")
