"""Run directories with a file cut short, flipped, swapped or gone: refused by name, nothing executed, nothing lost.

Hypothesis draws which file, which damage and which command; `just fuzz` draws many more.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rmsnorm_cli import checkpoint, cli, config, environment
from rmsnorm_cli.commands import train
from rmsnorm_cli.console import Console
from rmsnorm_cli.kernels import implementation
from rmsnorm_cli.results import Outcome
from rmsnorm_cli.rundir.history import checksums
from rmsnorm_cli.rundir.run import open_run

SHARE = max(settings.default.max_examples // 3, 1)  # one of these takes as long as several others
SMALL = {
    "data.train": 24,
    "data.validation": 6,
    "data.test": 6,
    "train.width": 19,
    "train.steps": 4,
    "train.batch": 5,
    "train.twins": 1,
    "train.seed_noise_runs": 0,
    "train.checkpoint_every": 2,
    "train.keep": 9,
    "train.optimizers": ["sgd"],
    "run.impl": ["torch"],
}
CELL = {"cell": "6x33 float32", "perimeter": "forward", "measure": "calls", "cache": "loop"}
NO_STREAM = {"stream": None, "control": None}
TIMED = {
    "cells": [
        {"cell": CELL["cell"], "tables": [{**CELL, "rows": [{"impl": "torch", "status": "passed"}], **NO_STREAM}]}
    ],
    "card": "a card",
    "driver": "1",
    "clock": "events",
    "versions": {"torch": "2", "triton": "3"},
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Return a finished run of train and one of bench, side by side."""
    folder = tmp_path_factory.mktemp("originals")
    device = environment.choose_device("auto", folder)
    chosen = config.load("train", options=SMALL | {"run.dir": str(folder), "run.name": "whole"})
    with open_run(chosen, ["rmsnorm", "train"], device, environment.snapshot(device)) as run:
        run.finish(train.run(chosen, run, Console(quiet=True), device, implementation("torch")))
    timed = config.load("bench", options={"run.dir": str(folder)})
    with open_run(timed, ["rmsnorm", "bench"], device, {}) as bench:
        bench.record({"kind": "samples", **CELL, "impl": "torch", "seconds": [1e-6 * (1 + i / 50) for i in range(40)]})
        bench.finish(Outcome("passed", "cuda", {"passed": 1}, TIMED))
    return {"train": run.dir, "bench": bench.dir}


VALUES = [None, 3, -1.5, "x", [], {}, [1], {"a": 1}, True]
FILES = ("run.json", "config.toml", "metrics.jsonl", "SHA256SUMS", "env.json", "log.txt", "checkpoint", "older")
BOMB = b"cposix\nsystem\n(S'touch executed'\ntR."
damages = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("flip"), st.floats(0, 1), st.integers(0, 7)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("replace"), st.sampled_from([b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 9000, BOMB])),
    st.tuples(st.just("remove")),
    st.tuples(st.just("folder")),
    st.tuples(st.just("link")),
    st.tuples(st.just("value"), st.integers(0, 200), st.sampled_from(VALUES)),
)


def pick(directory: Path, name: str) -> Path:
    """Return the file that a drawn name stands for."""
    if name in ("checkpoint", "older"):
        found = checkpoint.listing(directory / "checkpoints")
        return found[-1 if name == "checkpoint" else 0] if found else directory / "run.json"
    return directory / name


def places(value, path=()):
    """Yield the path of every value inside nested JSON."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


def damage(path: Path, what: tuple) -> None:
    """Do to a file what was drawn."""
    content = path.read_bytes()
    at = int(len(content) * what[1]) if what[0] in ("cut", "flip", "insert") else 0
    if what[0] == "value":  # one value of a JSON file becomes another
        try:
            data = json.loads(content.splitlines()[0] if path.suffix == ".jsonl" else content)
        except (ValueError, IndexError):
            return
        found = list(places(data))
        if not found:
            return
        *above, last = found[what[1] % len(found)]
        target = data
        for key in above:
            target = target[key]
        target[last] = what[2]
        lines = content.splitlines(keepends=True)
        content = b"".join([json.dumps(data).encode() + b"\n", *(lines[1:] if path.suffix == ".jsonl" else [])])
    elif what[0] == "cut":
        content = content[:at]
    elif what[0] == "flip" and content:
        at = min(at, len(content) - 1)
        content = content[:at] + bytes([content[at] ^ (1 << what[2])]) + content[at + 1 :]
    elif what[0] == "insert":
        content = content[:at] + what[2] + content[at:]
    elif what[0] == "replace":
        content = what[1]
    elif what[0] in ("remove", "folder", "link"):
        path.unlink()
        if what[0] == "folder":
            path.mkdir()
        if what[0] == "link":
            path.symlink_to(path.parent.parent / "elsewhere")
        return
    path.write_bytes(content)


def content_of(folder: Path) -> dict[str, str]:
    """Return what there is: name -> hash of a file, target of a link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def ask(words, folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
    finally:
        os.chdir(before)
    return ended.value.code


COMMANDS = {
    "audit": ["audit", "{run}"],
    "clean": ["clean", "--dry-run"],
    "resume": ["train", "--resume", "{run}"],
    "report": ["report", "{run}"],
    "compare": ["bench", "--compare", "{run}", "--dry-run"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_runs_that_nothing_happened_to_are_taken(command, originals, tmp_path):
    """Otherwise the test below could not tell what damage does."""
    source = originals["bench" if command == "compare" else "train"]
    shutil.copytree(source, tmp_path / "runs" / source.name)
    words = [word.format(run=source.name) for word in COMMANDS[command]]
    assert ask([*words, "--runs-dir", str(tmp_path / "runs")], tmp_path) in (0, 1 if command == "resume" else 0)


@pytest.mark.parametrize("which", ["train", "bench"])
def test_no_value_of_a_summary_that_another_took_the_place_of_is_a_fault_of_ours(which, originals, tmp_path, capsys):
    """Each part in turn is a number where more was: a page without it, or a refusal that names the run and audit."""
    codes = set()
    command = {"train": "report", "bench": "compare"}[which]
    summary = json.loads((originals[which] / "run.json").read_text())["summary"]
    some = [path for path in places(summary) if which == "bench" or len(path) == 1]  # a page takes half a second
    for number, path in enumerate(some[:8]):
        directory = shutil.copytree(originals[which], tmp_path / str(number) / originals[which].name)
        facts = json.loads((directory / "run.json").read_text())
        target = facts["summary"]
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = 3
        (directory / "run.json").write_text(json.dumps(facts))
        words = [word.format(run=directory.name) for word in COMMANDS[command]]
        code = ask([*words, "--runs-dir", str(directory.parent)], tmp_path)
        said = capsys.readouterr().err
        assert code in (0, 2), (path, said)
        codes.add(code)
        if code:
            assert "rmsnorm audit says which were altered" in said or "bench.compare" in said
    assert codes == {0, 2}


@pytest.mark.case("B76", "B85")
@pytest.mark.parametrize(
    ("command", "entry"),
    [("resume", name) for name in ("checkpoints", "declared", "metrics.jsonl", "config.toml")]
    + [("report", "figures")],
)
def test_nothing_is_written_or_pruned_behind_a_link(command, entry, originals, tmp_path, capsys):
    """A folder of another disk in the place of a run's own: its files are somebody's, whatever they are called."""
    directory = shutil.copytree(originals["train"], tmp_path / "runs" / originals["train"].name)
    other = tmp_path / "elsewhere" / entry
    other.parent.mkdir()
    if (directory / entry).exists():
        shutil.move(directory / entry, other)
    else:
        other.mkdir()
    (directory / entry).symlink_to(other)
    before = content_of(tmp_path)
    words = [word.format(run=directory.name) for word in COMMANDS[command]]
    assert ask([*words, "--runs-dir", str(tmp_path / "runs")], tmp_path) == 2
    assert f"{directory / entry} is a link to {other}" in capsys.readouterr().err
    assert content_of(tmp_path) == before


@pytest.mark.case("B85", "B80")
@pytest.mark.parametrize("command", ["audit", "resume", "report"])
@pytest.mark.parametrize("entry", ["config.toml", "metrics.jsonl", "SHA256SUMS", "checkpoints", "a pipe of mine"])
def test_a_pipe_or_a_device_is_no_file_to_wait_for(entry, command, originals, tmp_path, capsys):
    directory = shutil.copytree(originals["train"], tmp_path / "runs" / originals["train"].name)
    if (directory / entry).exists():
        shutil.move(directory / entry, tmp_path / "aside")
    if entry == "metrics.jsonl":
        (directory / entry).symlink_to("/dev/zero")
    else:
        os.mkfifo(directory / entry)
    words = [word.format(run=directory.name) for word in COMMANDS[command]]
    assert ask([*words, "--runs-dir", str(tmp_path / "runs")], tmp_path) == 2
    assert f"{directory / entry} is neither a file nor a folder" in capsys.readouterr().err
    assert not checksums(directory).endswith(f"  {entry}\n")  # nor waits a run that finds one when it ends


@pytest.mark.case("B74", "B76", "B80")
@given(command=st.sampled_from(list(COMMANDS)), file=st.sampled_from(FILES), what=damages)
@example(command="report", file="run.json", what=("value", 30, 3))
@example(command="resume", file="checkpoint", what=("replace", BOMB))
@example(command="audit", file="run.json", what=("cut", 0.5))
@example(command="report", file="env.json", what=("replace", b"[" * 9000))
@example(command="resume", file="config.toml", what=("replace", b""))
@settings(max_examples=SHARE)
def test_a_damaged_file_is_told_and_costs_nothing_else(command, file, what, originals, tmp_path_factory, capsys):
    """Exit 0, 1, 2 or 4 in sentences; audit, clean's list and every refusal leave each byte as it was."""
    folder = tmp_path_factory.mktemp("damaged")
    source = originals["bench" if command == "compare" else "train"]
    directory = shutil.copytree(source, folder / "runs" / source.name)
    damaged = pick(directory, file)
    damage(damaged, what)
    before = content_of(folder)
    words = [word.format(run=directory.name) for word in COMMANDS[command]]
    code = ask([*words, "--runs-dir", str(folder / "runs")], folder)
    said = capsys.readouterr().err
    assert code in (0, 1, 2, 4), said
    assert "Traceback" not in said
    assert "internal error" not in said
    assert not (folder / "executed").exists()
    after = content_of(folder)
    if command in ("audit", "clean", "compare") or code == 2:
        assert after == before
    elif command == "report":
        added = {name for name in after if before.get(name) != after[name]}
        assert all("/figures/" in name or name.endswith("report.html") for name in added)
    else:  # a resumed run rewrites its records, and in time the checkpoint that was torn; the others stay
        kept = {name: digest for name, digest in before.items() if name.endswith(".pt")}
        kept.pop(str(damaged.relative_to(folder)), None)
        assert kept.items() <= after.items()
    if command == "audit" and before != content_of_original(originals["train"], directory, folder):
        assert code != 0 or file in ("log.txt",), said


def content_of_original(source: Path, directory: Path, folder: Path) -> dict[str, str]:
    """Return what a faithful copy of a run would hold, by the names of the copy."""
    return {f"{directory.relative_to(folder)}/{name}": digest for name, digest in content_of(source).items()}
