"""`rmsnorm report [RUN...]`: figures and one self-contained HTML page of finished runs, from their own files alone."""

import importlib
import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.results import Outcome
from rmsnorm_cli.rundir import atomic, history
from rmsnorm_cli.rundir.history import RunInfo

if TYPE_CHECKING:
    from rmsnorm_cli.console import Console

PAGE = "report.html"
FIGURES = "figures"
COMMANDS = ("bench", "exercise", "gradcheck", "train", "verify")


def report(runs: list[str], output: Path | None, runs_dir: Path, console: "Console") -> Outcome:
    """Write page and figures into the run's directory, or of one or several runs into `output`.

    Raises ConfigError where a run is not there, or where several are named without `output`.
    """
    from rmsnorm_cli.page import html

    found = [_readable(history.find(name, runs_dir)) for name in runs or ["latest"]]
    if len(found) > 1 and output is None:
        raise ConfigError(f"{len(found)} runs make one page that belongs to none of them: name a folder with --output")
    folder = output or found[0].dir
    if output is None:
        history.refuse_links(folder, "figures", "report.html")
    with atomic.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    drawn: list[str] = []
    several = len(found) > 1
    sections: list[Any] = []
    for info in found:
        with history.unaltered(info):
            sections += _section(info, folder, several, drawn)
    title = f"rmsnorm {found[0].command}: {found[0].dir.name}" if not several else f"rmsnorm: {len(found)} runs"
    head = [html.element("h1", title)]
    if several:
        links = [html.element("li", [html.element("a", i.dir.name, href=f"#{i.dir.name}")]) for i in found]
        head.append(html.element("nav", [html.element("ul", links)]))
    atomic.write(folder / PAGE, html.document(title, [*head, *sections]))
    console.note(f"page: {folder / PAGE}; figures: {len(drawn)} in {folder / FIGURES}")
    return Outcome(
        status="passed",
        execution="",
        counts={"passed": len(found)},
        summary={
            "page": str(folder / PAGE),
            "figures": [str(folder / FIGURES / f"{name}.{kind}") for name in drawn for kind in ("svg", "png")],
            "runs": [info.dir.name for info in found],
        },
    )


def _readable(info: RunInfo) -> RunInfo:
    if info.command not in COMMANDS:
        raise ConfigError(
            f"{info.dir.name}: a run of {info.command} has no page; expected one of {', '.join(COMMANDS)}"
        )
    if info.status == "running":
        raise ConfigError(f"{info.dir.name}: this run is not finished; its page can be made when it is")
    return info


def _section(info: RunInfo, folder: Path, several: bool, drawn: list[str]) -> "Iterator[Any]":
    """Yield a run's part of the page and save its figures on the way."""
    from rmsnorm_cli import figures
    from rmsnorm_cli.page import html

    if several:
        yield html.element("h2", f"{info.command}: {info.dir.name}", id=info.dir.name)
    yield html.facts(_facts(info))
    summary = info.facts.get("summary") or {}
    if not summary:
        why = f"The run ended as {info.status} and holds no results. {info.facts.get('message', '')}"
        yield html.element("p", why, class_="failed")
        return
    module = importlib.import_module(f"rmsnorm_cli.page.{info.command}")
    device = (info.facts.get("device") or {}).get("name", "")
    parts = module.parts({**summary, "device": device}, history.read_records(info.dir))
    for is_drawing, group in groupby(parts, key=lambda part: isinstance(part, figures.Drawing)):
        if not is_drawing:
            yield from group
            continue
        pictures = []
        for drawing in group:
            if several:
                drawing = figures.renamed(drawing, f"{info.dir.name}-{drawing.name}")
            drawn.append(drawing.name)
            pictures.append(html.picture(figures.save(drawing, folder / FIGURES), drawing.caption))
        yield html.element("div", pictures, class_="figures")


def _facts(info: RunInfo) -> Mapping[str, str]:
    """Return what says where a run comes from: status, device, versions, command."""
    environment = _environment(info.dir)
    versions = environment.get("versions") or {}
    git = environment.get("git") or {}
    counts = ", ".join(f"{number} {status}" for status, number in (info.facts.get("counts") or {}).items() if number)
    device = (info.facts.get("device") or {}).get("name", "")
    return {
        "status": f"{info.status} ({counts})" if counts else info.status,
        "device": f"{device} ({info.facts.get('execution')})",
        "driver": str(environment.get("driver") or ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": f"{git['commit']}{', with changes' if git.get('dirty') else ''}" if git.get("commit") else "",
        "started": str(info.facts.get("started") or ""),
        "seed": str(info.facts.get("seed", "")),
        "command": " ".join(Path(word).name if i == 0 else word for i, word in enumerate(info.facts.get("argv") or [])),
    }


def _environment(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / "env.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
