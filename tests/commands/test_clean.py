"""`rmsnorm clean`: what this tool made goes, and nothing else, however the folder is set with traps."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rmsnorm_cli import environment
from rmsnorm_cli.commands import clean as module
from rmsnorm_cli.commands.clean import clean
from rmsnorm_cli.console import Console
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.results import Outcome
from rmsnorm_cli.rundir import history, liveness

QUIET = Console(json=False, quiet=True)


def make(folder: Path, hour: int, command: str = "verify", **facts: Any) -> Path:
    """Make a run directory as `open_run` leaves one, of an hour of 2 January 2026."""
    directory = folder / f"20260102T{hour:02}0000Z-{command}"
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "checkpoints" / "step-1.pt").write_bytes(b"weights")
    (directory / "metrics.jsonl").write_text("{}\n")
    moment = datetime(2026, 1, 2, hour, tzinfo=UTC).isoformat()
    told = {"schema": 1, "tool": "rmsnorm", "command": command, "status": "passed"}
    (directory / "run.json").write_text(json.dumps(told | {"started": moment, "finished": moment} | facts))
    history.point_latest(folder, directory.name, command)
    return directory


def swept(folder: Path, **options: Any) -> Outcome:
    return clean(runs_dir=folder, console=QUIET, **({"yes": True} | options))


def tree(folder: Path) -> dict[str, str]:
    """Return every path below a folder with what it is: a link's target, a file's content, a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = f"-> {os.readlink(path)}" if path.is_symlink() else "folder" if path.is_dir() else path.read_text()
        found[str(path.relative_to(folder))] = kind
    return found


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / ".gitkeep").touch()
    return folder


@pytest.mark.case("B85")
def test_a_folder_of_traps_loses_only_what_the_tool_made(tmp_path, runs):
    """Links out of the folder, from inside runs, in place of run.json, loops, look-alikes: nothing outside changes."""
    outside = tmp_path / "outside"
    lure = make(outside, 1)
    (outside / "precious.txt").write_text("precious")
    ours = make(runs, 2)
    (ours / "data").symlink_to(outside)
    (ours / "absolute").symlink_to(outside / "precious.txt")
    (ours / "dangling").symlink_to("nowhere")
    (ours / "up").symlink_to("../..")
    (ours / "checkpoints" / "deep").symlink_to(outside, target_is_directory=True)
    os.link(outside / "precious.txt", ours / "hard-link")
    (runs / "link-to-run").symlink_to(lure)
    (runs / "20260102T050000Z-verify").symlink_to(lure)
    (runs / "users-dangling-link").symlink_to("nowhere")
    for name in ("foreign", "fake", "linked", "no-run"):
        (runs / name).mkdir()
    (runs / "foreign" / "run.json").write_text('{"tool": "another", "schema": 1}')
    (runs / "fake" / "run.json").mkdir()
    (runs / "linked" / "run.json").symlink_to(ours / "run.json")
    (runs / "no-run" / "notes.txt").write_text("mine")
    (runs / "file").write_text("mine")
    before, kept = tree(outside), tree(runs)
    outcome = swept(runs)
    assert tree(outside) == before
    gone = {name for name in kept if name.split("/")[0] == ours.name} | {"latest", "latest-verify"}
    assert tree(runs) == {name: kind for name, kind in kept.items() if name not in gone}
    assert (outcome.status, outcome.exit_code) == ("passed", 0)
    assert outcome.summary["removed"] == [ours.name, "latest", "latest-verify"]


@pytest.mark.case("B85")
def test_the_dry_run_lists_exactly_what_goes(runs):
    """The list of --dry-run is the list of what the same call then removes, and it changes nothing itself."""
    for hour in (1, 2, 3, 4):
        make(runs, hour, "train" if hour < 3 else "bench")
    environment.mark_cache(runs / ".cache" / "triton")
    (runs / ".cache" / "triton").mkdir()
    before = tree(runs)
    planned = swept(runs, scope="all", keep=2, dry_run=True, yes=False)
    assert tree(runs) == before
    assert planned.exit_code == 0
    done = swept(runs, scope="all", keep=2)
    assert planned.summary["listed"] == done.summary["listed"] == done.summary["removed"]
    assert done.summary["listed"] == ["20260102T010000Z-train", "20260102T020000Z-train", ".cache", "latest-train"]
    assert planned.summary["bytes"] == done.summary["bytes"] > 0
    assert planned.summary["removed"] == []


def test_the_latest_links_follow_what_is_left(runs):
    """A link whose run went points at the newest one left of its command, or goes; a link out of the folder stays."""
    old, new = make(runs, 1, "train"), make(runs, 2, "train")
    bench = make(runs, 3, "bench")
    (runs / "latest-elsewhere").symlink_to("/")
    change(new, finished="2026-01-02T02:00:00Z")
    change(old, finished=datetime.now(UTC).isoformat())
    change(bench, finished="2026-01-02T02:00:00Z")
    outcome = swept(runs, older_than="1d")
    assert outcome.summary["removed"] == [new.name, bench.name, "latest", "latest-bench", "latest-train"]
    assert os.readlink(runs / "latest") == os.readlink(runs / "latest-train") == old.name
    assert not os.path.lexists(runs / "latest-bench")
    assert os.readlink(runs / "latest-elsewhere") == "/"


def change(directory: Path, **facts: Any) -> None:
    path = directory / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_a_draft_of_a_link_that_a_killed_process_left_goes_too(runs):
    (runs / ".latest.4711.tmp").symlink_to("20260102T010000Z-verify")
    assert swept(runs).summary["removed"] == [".latest.4711.tmp"]
    assert not os.path.lexists(runs / ".latest.4711.tmp")


@pytest.mark.parametrize(("keep", "left"), [(0, 0), (1, 1), (2, 2), (4, 4), (9, 4)])
def test_keep_leaves_the_newest_whatever_their_command(runs, keep, left):
    """--keep N counts over all runs together, by time, and more than there are is all of them."""
    made = [make(runs, hour, command) for hour, command in ((1, "train"), (2, "bench"), (3, "train"), (4, "verify"))]
    outcome = swept(runs, keep=keep)
    assert [path.exists() for path in made] == [False] * (4 - left) + [True] * left
    assert outcome.counts["skipped"] == left


def test_the_tenth_run_of_a_second_is_newer_than_the_ninth(runs):
    """Equal times are told apart by the number at the end, read as a number."""
    first = make(runs, 1)
    for number in (2, 9, 10):
        shutil.copytree(first, runs / f"{first.name}-{number}")
    swept(runs, keep=1)
    assert [info.dir.name for info in history.list_runs(runs)] == [f"{first.name}-10"]


@pytest.mark.parametrize(("text", "age", "goes"), [("30m", 31, True), ("30m", 29, False), ("1h", 61, True)])
def test_older_than_counts_from_the_end_of_a_run(runs, text, age, goes):
    """The age is that of the end, not of the start: a long run that has just ended is young."""
    ended = datetime.now(UTC) - timedelta(minutes=age)
    made = make(runs, 1, started="2020-01-01T00:00:00Z", finished=ended.isoformat())
    swept(runs, older_than=text)
    assert made.exists() is not goes


@pytest.mark.parametrize("text", ["", "7", "d", "7 days", "-1d", "1.5h", "7w", "99999999d", "٧d"])
def test_a_duration_that_is_none_is_a_usage_error(runs, text):
    made = make(runs, 1)
    with pytest.raises(ConfigError, match="--older-than"):
        swept(runs, older_than=text)
    assert made.exists()


@pytest.mark.parametrize("options", [{"scope": "everything"}, {"keep": -1}])
def test_wrong_words_are_usage_errors(runs, options):
    made = make(runs, 1)
    with pytest.raises(ConfigError, match="--"):
        swept(runs, **options)
    assert made.exists()


def test_a_live_run_stays_and_a_killed_one_goes(runs):
    """Status running with a working process stays; with a dead one it is a leftover."""
    mine = make(runs, 1, status="running", finished=None, process=liveness.identity())
    child = subprocess.Popen([sys.executable, "-c", ""])
    dead = liveness.identity() | {"pid": child.pid, "start_time": 1}
    child.wait()
    killed = make(runs, 2, status="running", finished=None, process=dead)
    outcome = swept(runs, scope="all")
    assert mine.exists()
    assert not killed.exists()
    assert outcome.summary["kept"] == [{"name": mine.name, "reason": "still running"}]
    assert os.readlink(runs / "latest") == mine.name


def test_a_run_of_unknown_process_stays_until_it_has_been_silent_for_a_day(runs):
    """A run of another machine or of before a reboot may go once nothing has been written for a day."""
    elsewhere = liveness.identity() | {"boot_id": "another"}
    made = make(runs, 1, status="running", finished=None, process=elsewhere)
    assert swept(runs).summary["kept"][0]["reason"].startswith("may be running on another machine")
    yesterday = (datetime.now(UTC) - timedelta(days=1, minutes=1)).timestamp()
    for path in (made / "metrics.jsonl", made):
        os.utime(path, (yesterday, yesterday))
    assert swept(runs).summary["removed"] == [made.name, "latest", "latest-verify"]


@pytest.mark.case("B85")
@pytest.mark.parametrize("disturb", ["lock", "swap", "foreign", "gone"])
def test_what_changes_between_list_and_removal_is_safe(tmp_path, runs, monkeypatch, disturb):
    """A run taken up, replaced or removed after the list was made: what has taken its place is not touched."""
    made, other = make(runs, 1), make(runs, 2)
    real = module.remove_all

    def disturbed(folder: int, going: Any) -> Any:
        with ExitStack() as stack:
            if disturb == "lock":
                stack.callback(liveness.release, liveness.hold(made))
            elif disturb == "swap":
                made.rename(tmp_path / "moved")
                make(runs, 1)
            elif disturb == "foreign":
                (made / "run.json").write_text("{}")
            else:
                shutil.rmtree(made)
            return real(folder, going)

    monkeypatch.setattr(module, "remove_all", disturbed)
    outcome = swept(runs)
    assert not other.exists()
    if disturb == "gone":
        assert outcome.status == "passed"
    else:
        assert (made / "checkpoints" / "step-1.pt").read_bytes() == b"weights"
        assert [problem["name"] for problem in outcome.summary["problems"]] == [made.name]
        assert (outcome.status, outcome.exit_code) == ("error", 1)


def test_a_link_that_was_not_listed_stays(runs, monkeypatch):
    """What becomes removable after the list was shown waits for the next time."""
    make(runs, 1)
    real = module.remove_all

    def late(folder: int, going: Any) -> Any:
        (runs / "latest-bench").symlink_to("gone")
        return real(folder, going)

    monkeypatch.setattr(module, "remove_all", late)
    outcome = swept(runs)
    assert outcome.summary["listed"] == outcome.summary["removed"]
    assert os.path.lexists(runs / "latest-bench")


@pytest.mark.case("B85")
def test_a_file_system_mounted_inside_a_run_is_not_emptied(runs):
    """A mount is as good as a link: what it holds lies elsewhere, so the run stays and says why."""
    made = make(runs, 1)
    (made / "data").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "none", str(made / "data")], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting needs more rights")
    try:
        (made / "data" / "precious.txt").write_text("precious")
        outcome = swept(runs)
        assert (made / "data" / "precious.txt").exists()
        assert outcome.summary["kept"] == [{"name": made.name, "reason": "another file system is mounted in it"}]
    finally:
        subprocess.run(["umount", str(made / "data")], check=True)


def test_a_removal_cut_short_can_be_taken_up_again(runs, monkeypatch):
    """run.json goes last: after an error in the middle the rest is still known as a run, and goes the next time."""
    made = make(runs, 1)
    real = os.unlink

    def stubborn(path: Any, **options: Any) -> None:
        if path == "metrics.jsonl":
            raise PermissionError(13, "Permission denied", path)
        real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", stubborn)
        outcome = swept(runs)
    assert (outcome.status, outcome.counts["error"]) == ("error", 1)
    assert "Permission denied" in outcome.notes[0]
    assert not (made / "checkpoints").exists()
    assert swept(runs).status == "passed"
    assert not made.exists()


@pytest.mark.case("B85")
@pytest.mark.parametrize("options", [{}, {"dry_run": True}, {"scope": "cache"}])
def test_a_runs_folder_that_is_a_link_is_refused(tmp_path, runs, options):
    """Nothing is listed or removed through a link; the sentence names the folder behind it."""
    made = make(runs, 1)
    (tmp_path / "link").symlink_to(runs)
    with pytest.raises(ConfigError, match=rf"is a link.*--runs-dir {runs}"):
        swept(tmp_path / "link", **options)
    assert made.exists()


def test_a_runs_folder_that_is_not_there_or_a_file(tmp_path):
    """Nothing there is nothing to do; a file is a usage error."""
    assert swept(tmp_path / "nothing").exit_code == 0
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not a folder"):
        swept(tmp_path / "file")


def test_a_runs_folder_swapped_for_a_link_meanwhile_is_not_followed(tmp_path, runs, monkeypatch):
    """The folder that was opened is the folder that is cleaned, whatever takes its name after that."""
    mine, victim = make(runs, 1), make(tmp_path / "victim", 2)
    real = module.make_plan

    def swapped(*arguments: Any) -> Any:
        runs.rename(tmp_path / "moved")
        runs.symlink_to(tmp_path / "victim")
        return real(*arguments)

    monkeypatch.setattr(module, "make_plan", swapped)
    swept(runs)
    assert victim.exists()
    assert not (tmp_path / "moved" / mine.name).exists()


# --- the cache --------------------------------------------------------------------------------------------------------


def own_cache(runs: Path) -> None:
    environment.mark_cache(runs / ".cache" / "triton")


def foreign_cache(runs: Path) -> None:
    (runs / ".cache").mkdir()
    (runs / ".cache" / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n# another program\n")


def linked_cache(runs: Path) -> None:
    own_cache(runs.parent)
    (runs / ".cache").symlink_to(runs.parent / ".cache")


def busy_cache(runs: Path) -> None:
    own_cache(runs)
    make(runs, 1, status="running", finished=None, process=liveness.identity())


@pytest.mark.parametrize(
    ("prepare", "goes"), [(own_cache, True), (foreign_cache, False), (linked_cache, False), (busy_cache, False)]
)
def test_only_the_tools_own_idle_cache_goes(runs, prepare: Callable[[Path], None], goes):
    """`runs/.cache` goes when this tool marked it and no run may be using it; ~/.cache of --runs-dir ~ never does."""
    prepare(runs)
    (runs / ".cache" / "kernel").write_text("binary")
    outcome = swept(runs, scope="cache")
    assert os.path.lexists(runs / ".cache" / "kernel") is not goes
    assert outcome.counts["passed"] == (1 if goes else 0)
    assert outcome.exit_code == 0


@pytest.mark.parametrize(("scope", "run_goes", "cache_goes"), [("generated", 1, 0), ("cache", 0, 1), ("all", 1, 1)])
def test_each_scope_is_its_own(runs, scope, run_goes, cache_goes):
    made = make(runs, 1)
    (runs / "latest-train").symlink_to("gone")
    own_cache(runs)
    swept(runs, scope=scope)
    assert made.exists() is not bool(run_goes)
    assert os.path.lexists(runs / "latest-train") is not bool(run_goes)
    assert (runs / ".cache").exists() is not bool(cache_goes)


# --- asking -----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A terminal: what is typed on it is read, what is said on it is kept."""

    def isatty(self) -> bool:
        """Return that this is one."""
        return True


@pytest.mark.parametrize(("line", "goes"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_on_a_terminal_clean_asks_and_silence_means_no(runs, monkeypatch, line, goes):
    """Only y or yes removes; enter, n and the end of input leave everything and exit 1."""
    made, screen = make(runs, 1), Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(line))
    monkeypatch.setattr(sys, "stderr", screen)
    outcome = swept(runs, yes=False)
    assert made.exists() is not goes
    assert outcome.exit_code == (0 if goes else 1)
    assert "[y/N]" in screen.getvalue()


def test_without_a_terminal_clean_removes_nothing_unless_told(runs):
    """A pipeline that forgot --yes gets exit 2 and the remedy; with nothing to remove there is nothing to ask."""
    assert swept(runs, yes=False).exit_code == 0
    made = make(runs, 1)
    with pytest.raises(ConfigError, match="--yes"):
        swept(runs, yes=False)
    assert made.exists()


def test_the_list_shows_no_control_codes(runs, capsys):
    """A name that would move the cursor is shown escaped, and the directory still goes."""
    made = make(runs, 1)
    strange = runs / "\x1b[2J"
    shutil.copytree(made, strange)
    clean(runs_dir=runs, yes=True, console=Console())
    assert "\x1b" not in capsys.readouterr().out
    assert not strange.exists()


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"tool": "rmsnorm"}', '{"tool": "another", "schema": 1}'])
def test_a_run_whose_record_is_damaged_stays_and_is_named(runs: Path, content: str | None) -> None:
    """It may be the only copy of something: nobody's list of what went should be silent about it."""
    damaged, good = make(runs, 1), make(runs, 2)
    (damaged / "run.json").unlink()
    if content is not None:
        (damaged / "run.json").write_text(content)
    (runs / "20260102T030000Z-notes").symlink_to(good)
    outcome = swept(runs)
    assert outcome.summary["kept"] == [
        {
            "name": damaged.name,
            "reason": "its run.json is missing, damaged or not readable: look, and remove it yourself",
        }
    ]
    assert (damaged / "checkpoints" / "step-1.pt").exists()
    assert not good.exists()
