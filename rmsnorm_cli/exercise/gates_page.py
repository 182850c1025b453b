"""The page of what each gate catches, in Markdown, made from a run of the whole catalogue."""

import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rmsnorm_cli import faults

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.environment import Device

COMMAND = "rmsnorm exercise --all"
EVIDENCE = {
    "cuda": "The kernels were compiled and run on this GPU.",
    "interpreter": "The kernels' own source was run program by program on the CPU: that is evidence about arithmetic "
    "and addresses, and none about races, speed or the GPU's own code.",
}


def text(summary: dict[str, Any], settings: "Settings", device: "Device") -> str:
    """Return the page; `summary` is that of the run."""
    return "\n".join(_lines(summary, settings, device)) + "\n"


def _lines(summary: dict[str, Any], settings: "Settings", device: "Device") -> Iterator[str]:
    from rmsnorm_cli import environment

    gates, entries, score = summary["matrix"]["gates"], summary["matrix"]["faults"], summary["score"]
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions().items() if version)
    yield "# What each gate catches"
    yield ""
    yield from _paragraph(
        f"Written by `{COMMAND}` on {datetime.now(UTC):%Y-%m-%d}: {device.name} ({device.execution}); {versions}; "
        f"seed {settings.seed}. Not edited by hand: the command writes it, as `gates.md`, into its run directory."
    )
    yield from _paragraph(EVIDENCE[device.execution])
    yield from _paragraph(
        "Each mistake is a change of one or two expressions in the source of a kernel, `rowwise` or `fused`, or of "
        "what launches it, and is shown to every gate. A gate is asked small questions that `verify` asks by default, "
        "until it objects. "
        "The usual test is 64 x 4096 unit-normal numbers with gamma 1: y, dx and dgamma by the declared tolerance."
    )
    yield f"**{score['caught']} of {score['of']} mistakes are caught. The usual test catches {score['naive']}.**"
    yield f"Survivors: {', '.join(score['survivors']) or 'none'}."
    objecting = ", ".join(score["unchanged"])
    yield f"Objections to the unchanged kernel: {objecting or 'none'}."
    yield ""
    yield from _by_gate(gates, entries)
    yield from _matrix(gates, entries)
    yield from _inputs()
    yield from _others(entries)


def _paragraph(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, 118)
    yield ""


def _by_gate(gates: list[str], entries: list[dict[str, Any]]) -> Iterator[str]:
    yield "## By gate"
    yield ""
    yield from _row("gate", "mistakes caught", "caught by no other gate")
    yield from _row("---", "---:", "---")
    for gate in gates:
        caught = [entry for entry in entries if gate in entry["caught_by"] and not entry["equivalent"]]
        alone = [f"`{entry['name']}`" for entry in caught if len(entry["caught_by"]) == 1]
        yield from _row(gate, str(len(caught)), ", ".join(alone) or "none")
    yield ""


def _matrix(gates: list[str], entries: list[dict[str, Any]]) -> Iterator[str]:
    yield "## By mistake"
    yield ""
    yield "x: caught. An empty cell: the gate objected to nothing."
    yield ""
    yield from _row("mistake", "kernel", "pass", "usual test", *gates)
    yield from _row(*(["---"] * (4 + len(gates))))
    for entry in entries:
        if entry["equivalent"] or entry["not_run"]:
            continue
        marks = ("x" if gate in entry["caught_by"] else "" for gate in gates)
        usual = "x" if entry["naive"] == "caught" else ""
        yield from _row(f"`{entry['name']}`", entry["kernel"], entry["pass"], usual, *marks)
    yield ""


def _inputs() -> Iterator[str]:
    yield "## What shows a mistake, and what hides it"
    yield ""
    yield from _row("mistake", "what is wrong", "shown by", "hidden by", "seen in")
    yield from _row(*(["---"] * 5))
    for fault in faults.CATALOGUE:
        if not fault.equivalent:
            yield from _row(f"`{fault.name}`", fault.story, fault.shown_by, fault.hidden_by, ", ".join(fault.seen))
    yield ""


def _others(entries: list[dict[str, Any]]) -> Iterator[str]:
    equivalent = [entry for entry in entries if entry["equivalent"]]
    yield "## Changes that are no mistakes"
    yield ""
    yield "They are run too, no gate may object to them, and the score leaves them out."
    yield ""
    yield from (f"- `{entry['name']}`: {entry['equivalent']}" for entry in equivalent)
    left_out = [entry for entry in entries if entry["not_run"]]
    if left_out:
        yield ""
        yield "Not run here, and not counted:"
        yield ""
        yield from (f"- `{entry['name']}`: {entry['not_run']}" for entry in left_out)


def _row(*cells: str) -> Iterator[str]:
    yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
