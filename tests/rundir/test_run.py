"""The run directory: exclusive, self-contained, and finished with a status whatever ends the command."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rmsnorm_cli import config
from rmsnorm_cli.environment import Device
from rmsnorm_cli.errors import ConfigError, EnvironmentProblem, Interrupted, exit_code_of
from rmsnorm_cli.results import Outcome
from rmsnorm_cli.rundir import atomic, bookends, history, interrupts, liveness, run
from rmsnorm_cli.rundir.history import list_runs
from rmsnorm_cli.rundir.run import Run, open_run, reopen

DEVICE = Device("auto", "interpreter", "cpu", "CPU, Triton interpreter")
PASSED = Outcome("passed", "interpreter", {"passed": 3}, {"worst": 0.5})
START = """
import sys
from pathlib import Path
from rmsnorm_cli import config
from rmsnorm_cli.rundir import run
from rmsnorm_cli.environment import Device
from rmsnorm_cli.errors import exit_code_of
from rmsnorm_cli.results import Outcome
settings = config.load("train", options={"run.dir": sys.argv[1]})
device = Device("auto", "interpreter", "cpu", "CPU, Triton interpreter")
"""


def settings(folder: Path, command: str = "train", name: str = "") -> config.Settings:
    return config.load(command, options={"run.dir": str(folder), "run.name": name, "run.seed": 7})


def opened(folder: Path, command: str = "train", name: str = "") -> Any:
    return open_run(settings(folder, command, name), ["rmsnorm", command], DEVICE, {"versions": {}})


def resumed(folder: Path, which: str = "latest", command: str = "train") -> Any:
    return reopen(which, settings(folder, command), ["rmsnorm", command, "--resume", which], DEVICE, {})


def finished(folder: Path, command: str = "train", name: str = "") -> Path:
    with opened(folder, command, name) as made:
        made.finish(PASSED)
    return made.dir


def conduct(context: Any, work: Callable[[Run], object]) -> None:
    """Do `work` in a run, so that one statement holds all that may raise."""
    with context as made:
        work(made)


def only(folder: Path) -> Path:
    """Return the one run directory of a folder."""
    (info,) = list_runs(folder)
    return info.dir


def strict(text: str) -> Any:
    """Parse JSON and refuse the NaN literals that are not JSON."""

    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(text, parse_constant=refuse)


def facts(directory: Path) -> dict[str, Any]:
    return strict((directory / "run.json").read_text(encoding="utf-8"))


def hashes_hold(directory: Path) -> bool:
    """Return whether SHA256SUMS names every file but those that may come later, each with its right hash."""
    lines = (directory / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    listed = {line[66:]: line[:64] for line in lines}
    there = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()} - {"SHA256SUMS"}
    there = {name for name in there if name != "report.html" and not name.startswith("figures/")}
    right = all(hashlib.sha256((directory / name).read_bytes()).hexdigest() == sha for name, sha in listed.items())
    return set(listed) == there and right


def hidden(directory: Path) -> list[str]:
    """Return what a reader should not find: drafts, the reserve."""
    return [path.name for path in directory.rglob(".*")]


def test_a_finished_run_is_complete_and_self_contained(tmp_path):
    """Each file of the specification is there, says what it should, and is hashed last."""
    with opened(tmp_path, name="first") as made:
        assert facts(made.dir)["status"] == "running"
        made.record({"step": 1, "loss": 0.5})
        made.log("a line\nin two")
        made.write("junit.xml", "<testsuites/>")
        (made.checkpoints / "step-1.pt").write_bytes(b"weights")
        made.write("figures/later.svg", "<svg/>")
        made.finish(PASSED)
    told = facts(made.dir)
    assert made.dir.name.endswith("Z-train-first")
    assert (told["status"], told["exit_code"], told["command"], told["seed"]) == ("passed", 0, "train", 7)
    assert (told["execution"], told["argv"], told["summary"]) == ("interpreter", ["rmsnorm", "train"], {"worst": 0.5})
    assert told["started"].endswith("Z")
    assert told["finished"] >= told["started"]
    assert config.load("train", file=made.dir / "config.toml") == settings(tmp_path, name="first")
    assert made.records() == [{"step": 1, "loss": 0.5}]
    assert "a line in two" in (made.dir / "log.txt").read_text()
    assert hashes_hold(made.dir)
    assert not hidden(made.dir)


@pytest.mark.parametrize(
    ("ends", "status", "code"),
    [
        (lambda made: made.finish(Outcome("failed", "cuda", {})), "failed", 1),
        (lambda made: made.finish(Outcome("inconclusive", "cuda", {})), "inconclusive", 1),
        (lambda made: None, "error", 3),
        (lambda made: (_ for _ in ()).throw(ConfigError("wrong")), "error", 2),
        (lambda made: (_ for _ in ()).throw(EnvironmentProblem("no GPU")), "error", 4),
        (lambda made: (_ for _ in ()).throw(RuntimeError("bug")), "error", 3),
        (lambda made: (_ for _ in ()).throw(KeyboardInterrupt), "interrupted", 130),
        (lambda made: (_ for _ in ()).throw(Interrupted(signal.SIGTERM)), "interrupted", 143),
    ],
)
def test_the_status_says_how_the_command_ended(tmp_path, ends: Callable[[Run], object], status, code):
    """Whatever ends the block, run.json has its status and exit code, and the hashes hold."""
    with suppress(BaseException), opened(tmp_path) as made:
        ends(made)
    told = facts(made.dir)
    assert (told["status"], told["exit_code"]) == (status, code)
    assert hashes_hold(made.dir)
    assert not liveness.held(made.dir)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_a_status(tmp_path, number, code):
    """A process stopped by SIGTERM or SIGINT in the middle of its work completes its directory."""
    script = START + (
        "import time\n"
        "try:\n"
        "    with run.open_run(settings, [], device, {}) as made:\n"
        "        made.record({'step': 1})\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "except KeyboardInterrupt as stop: sys.exit(exit_code_of(stop))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (info,) = list_runs(tmp_path)
        assert (info.status, info.alive) == ("running", True)
        process.send_signal(number)
        assert process.wait(timeout=20) == code
    (info,) = list_runs(tmp_path)
    assert (info.status, info.alive, info.facts["exit_code"]) == ("interrupted", False, code)
    assert history.read_records(info.dir) == [{"step": 1}]
    assert hashes_hold(info.dir)


def test_a_killed_run_is_told_from_a_live_one(tmp_path):
    """SIGKILL leaves the status running; the lock and the process record show that nobody works there."""
    script = START + "import os\nwith run.open_run(settings, [], device, {}) as made: os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (info,) = list_runs(tmp_path)
    assert (info.status, info.alive) == ("running", False)


@pytest.mark.case("B82")
def test_eight_starts_in_one_second_get_eight_directories(tmp_path):
    """Eight processes at a barrier with a frozen clock: eight directories, each with its own config and metrics."""
    script = START + (
        "import os, multiprocessing\n"
        "from datetime import UTC, datetime\n"
        "run.now = lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)\n"
        "barrier = multiprocessing.get_context('fork').Barrier(8)\n"
        "def start(number):\n"
        "    own = config.load('train', options={'run.dir': sys.argv[1], 'run.seed': number})\n"
        "    barrier.wait()\n"
        "    with run.open_run(own, [], device, {}) as made:\n"
        "        made.record({'seed': number})\n"
        "        made.finish(Outcome('passed', 'interpreter', {}))\n"
        "context = multiprocessing.get_context('fork')\n"
        "all = [context.Process(target=start, args=(number,)) for number in range(8)]\n"
        "[process.start() for process in all]; [process.join() for process in all]\n"
        "sys.exit(any(process.exitcode for process in all))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    runs = list_runs(tmp_path)
    stem = "20260102T030405Z-train"
    assert [info.dir.name for info in runs] == [stem, *(f"{stem}-{number}" for number in range(2, 9))]
    assert {info.facts["seed"] for info in runs} == set(range(8))
    for info in runs:
        seed = info.facts["seed"]
        assert config.load("train", file=info.dir / "config.toml").seed == seed
        assert history.read_records(info.dir) == [{"seed": seed}]
        assert hashes_hold(info.dir)
    assert os.readlink(tmp_path / "latest") == os.readlink(tmp_path / "latest-train")
    assert (tmp_path / "latest" / "run.json").is_file()
    assert not list(tmp_path.glob(".*"))


def test_latest_links_are_relative_and_follow_the_newest(tmp_path, monkeypatch):
    """`latest` points at the newest run of all, `latest-<command>` at that command's; moving the folder breaks none."""
    folder = tmp_path / "runs"
    moment = iter(range(1, 10))
    monkeypatch.setattr(run, "now", lambda: datetime(2026, 1, 2, next(moment), tzinfo=UTC))
    monkeypatch.setattr(run, "stamp", lambda time: "")
    monkeypatch.setattr(run, "begin", lambda made, *_, sessions: made._facts.update(command="", status=""))
    train, verify = finished(folder, "train"), finished(folder, "verify")
    assert os.readlink(folder / "latest") == os.readlink(folder / "latest-verify") == verify.name
    assert os.readlink(folder / "latest-train") == train.name
    folder.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest-train").resolve().name == train.name


def test_an_older_start_that_comes_late_leaves_latest_at_the_newer_run(tmp_path):
    """Of two starts the one with the later time keeps `latest`, whoever writes it last; -10 is newer than -9."""
    for name in ("20260102T030405Z-train", "20260102T030406Z-train", "20260102T030406Z-train-9"):
        (tmp_path / name).mkdir()
    (tmp_path / "20260102T030406Z-train-10").mkdir()
    for name in ("20260102T030406Z-train", "20260102T030405Z-train"):
        history.point_latest(tmp_path, name, "train")
    assert os.readlink(tmp_path / "latest") == "20260102T030406Z-train"
    for name in ("20260102T030406Z-train-10", "20260102T030406Z-train-9"):
        history.point_latest(tmp_path, name, "train")
    assert os.readlink(tmp_path / "latest") == "20260102T030406Z-train-10"


def test_something_else_called_latest_is_left_alone(tmp_path):
    """A real folder or file of that name is somebody's own; a dangling link is ours to replace."""
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine.txt").write_text("mine")
    (tmp_path / "latest-train").symlink_to("nothing")
    made = finished(tmp_path)
    assert (tmp_path / "latest" / "mine.txt").read_text() == "mine"
    assert os.readlink(tmp_path / "latest-train") == made.name


@pytest.mark.case("B88")
def test_json_is_strict_and_text_is_utf8(tmp_path):
    """Numbers that are not finite become words, bytes that are not UTF-8 become escapes, Greek stays Greek."""
    with open_run(settings(tmp_path), ["rmsnorm", os.fsdecode(b"--config=\xff.toml")], DEVICE, {"a": -1e999}) as made:
        made.record({"worst": float("nan"), "list": [float("inf")], "text": "σ\n"})
        made.log("σ²")
        made.finish(Outcome("failed", "interpreter", {}, {"worst": float("inf")}))
    assert facts(made.dir)["summary"] == {"worst": "inf"}
    assert strict((made.dir / "env.json").read_text()) == {"a": "-inf"}
    (line,) = (made.dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert strict(line) == {"worst": "nan", "list": ["inf"], "text": "σ\n"}
    assert "σ²" in (made.dir / "log.txt").read_text(encoding="utf-8")


def test_the_home_folder_stays_out_of_run_json(tmp_path, monkeypatch):
    """The arguments are kept as given, but a home folder, which names a person, is written ~."""
    monkeypatch.setenv("HOME", "/home/somebody")
    words = [
        "/home/somebody/bin/rmsnorm",
        "--config",
        "/home/somebody/a.toml",
        "--runs-dir=/home/somebody",
        "/home/somebody2/b",
    ]
    with open_run(settings(tmp_path), words, DEVICE, {}) as made:
        made.finish(PASSED)
    assert facts(made.dir)["argv"] == ["rmsnorm", "--config", "~/a.toml", "--runs-dir=~", "/home/somebody2/b"]


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "", "a/../../outside"])
def test_no_file_leaves_the_directory(tmp_path, name):
    with opened(tmp_path) as made:
        with pytest.raises(ValueError, match="not a name inside"):
            made.write(name, "x")
        made.finish(PASSED)


def test_a_name_cannot_leave_the_runs_folder(tmp_path):
    """`--name ../x` is refused by the configuration, before any folder is made."""
    with pytest.raises(ConfigError, match="name"):
        settings(tmp_path / "runs", name="../x")
    assert not (tmp_path / "runs").exists()


# --- a disk that is full, a folder that is none -----------------------------------------------------------------------


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.case("B74")
@pytest.mark.parametrize(
    ("what", "work"),
    [
        ("write", lambda made: made.record({"step": 2})),
        ("write", lambda made: made.log("more")),
        ("fsync", lambda made: made.write("junit.xml", "<a/>")),
        ("replace", lambda made: made.write("junit.xml", "<a/>")),
        ("mkdir", lambda made: made.write("faults/one.py", "x = 1")),
        ("mkdir", lambda made: made.checkpoints),
    ],
)
def test_a_full_disk_at_any_write_is_one_sentence_and_no_half_file(tmp_path, monkeypatch, what, work):
    """At each kind of write: exit code 4 with the remedy, the status says so, what was there stays whole.

    The remedy is not another folder: this run is where it is.
    """

    def fill_up(made: Run) -> None:
        made.record({"step": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, what, full)
            work(made)

    with pytest.raises(EnvironmentProblem, match=r"no space is left.*; free some$") as caught:
        conduct(opened(tmp_path), fill_up)
    assert "\n" not in str(caught.value)
    made = only(tmp_path)
    assert (facts(made)["status"], facts(made)["exit_code"]) == ("error", 4)
    assert "no space" in facts(made)["message"]
    assert history.read_records(made) == [{"step": 1}]
    assert not (made / "junit.xml").exists()
    assert not hidden(made)
    assert hashes_hold(made)


@pytest.mark.case("B80")
def test_a_line_that_was_written_in_part_is_taken_back(tmp_path, monkeypatch):
    """A disk that accepts half a line and then no more leaves the file as it was, so that every line is whole."""
    path, real, calls = tmp_path / "metrics.jsonl", os.write, iter(range(9))
    atomic.append_line(path, '{"step": 1}')

    def half(handle: int, data: bytes) -> int:
        if next(calls):
            full()
        return real(handle, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(EnvironmentProblem, match="no space"):
        atomic.append_line(path, '{"step": 2}')
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_directory_that_cannot_be_begun_is_not_left(tmp_path, monkeypatch):
    """If run.json or its companions cannot be written at the start, no half directory stays and no link is set."""
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match="no space"), opened(tmp_path):
        pytest.fail("the command must not start")
    assert list(tmp_path.iterdir()) == []


def test_hashes_that_find_no_room_turn_a_pass_into_an_error(tmp_path, monkeypatch):
    """A run whose last file cannot be written has not passed: the caller sees exit 4, and so does run.json."""
    monkeypatch.setattr(bookends, "checksums", full)
    with pytest.raises(EnvironmentProblem, match="no space"):
        finished(tmp_path)
    made = only(tmp_path)
    assert (facts(made)["status"], facts(made)["exit_code"]) == ("error", 4)
    assert not (made / "SHA256SUMS").exists()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Mount a file system of 256 KiB, where that is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    with suppress(FileNotFoundError):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            yield folder
            subprocess.run(["umount", "-l", str(folder)], check=True)
            return
    pytest.skip("mounting a small disk needs more rights")


@pytest.mark.case("B74")
def test_a_disk_that_really_fills_up(small_disk):
    """On a real file system of 256 KiB: whole lines, a status with the reason, hashes, and an exit code of 4."""
    with pytest.raises(EnvironmentProblem, match="no space"):
        conduct(opened(small_disk), lambda made: [made.record({"step": step}) for step in range(100_000)])
    made = only(small_disk)
    steps = [record["step"] for record in history.read_records(made)]
    assert steps == list(range(len(steps)))
    assert len(steps) > 100
    assert (made / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert (facts(made)["status"], facts(made)["exit_code"]) == ("error", 4)
    assert hashes_hold(made)
    with pytest.raises(EnvironmentProblem, match="no space"):
        conduct(opened(small_disk), lambda made: made.write("large", bytes(1 << 20)))
    assert not hidden(small_disk)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_runs_folder_that_is_a_file_is_one_sentence(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(EnvironmentProblem, match=r"is a file, not a folder.*--runs-dir"), opened(tmp_path / name):
        pytest.fail("the command must not start")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.case("B74")
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    """A refused mkdir is an environment problem that names folder, reason and remedy."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refused)
    with pytest.raises(EnvironmentProblem, match=r"cannot be written \(Permission denied\).*--runs-dir"):
        open_run(settings(tmp_path / "no"), [], DEVICE, {}).__enter__()


# --- resuming --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_continues_in_its_directory(tmp_path):
    """Settings, records and history carry over; a line cut short is dropped, wanted records stay once and in order."""
    with suppress(KeyboardInterrupt), opened(tmp_path, name="one") as made:
        for step in (1, 2, 3):
            made.record({"step": step})
        raise KeyboardInterrupt
    with open(made.dir / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "lo')
    (made.dir / f".run.json.1{atomic.TEMPORARY}").write_text("{")
    with resumed(tmp_path) as again:
        assert again.resumed
        assert again.dir.resolve() == made.dir.resolve()
        assert again.settings.run.name == "one"
        assert facts(made.dir)["status"] == "running"
        assert not (made.dir / "SHA256SUMS").exists(), "hashes of files that change are no hashes"
        again.keep_records(lambda record: record["step"] <= 2)
        again.record({"step": 3})
        again.finish(PASSED)
    assert [record["step"] for record in again.records()] == [1, 2, 3]
    told = facts(made.dir)
    assert (told["status"], told["exit_code"]) == ("passed", 0)
    assert [(part["status"], part["exit_code"]) for part in told["sessions"]] == [("interrupted", 130)]
    assert hashes_hold(made.dir)
    assert not hidden(made.dir)


def test_a_killed_run_can_be_resumed(tmp_path):
    """After SIGKILL the status is still running, but its process is gone: that is what resuming is for."""
    script = START + "import os\nwith run.open_run(settings, [], device, {}) as made: os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    with open(only(tmp_path) / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 1}\n{"step": 2, "lo')
    with resumed(tmp_path) as again:
        again.record({"step": 2})
        again.finish(PASSED)
    assert again.records() == [{"step": 1}, {"step": 2}]
    assert "the earlier start was killed" in (again.dir / "log.txt").read_text()
    assert not hidden(again.dir)


def test_resuming_a_live_run_is_refused(tmp_path):
    with opened(tmp_path) as made:
        with pytest.raises(ConfigError, match="still working"), resumed(tmp_path):
            pytest.fail("two writers")
        assert facts(made.dir)["status"] == "running"
        made.finish(PASSED)
    change(made.dir, status="running", process=liveness.identity())  # as on a file system that has no locks
    with pytest.raises(ConfigError, match="still working"), resumed(tmp_path):
        pytest.fail("two writers")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda made: (made / "run.json").unlink(), "no run directory"),
        (lambda made: (made / "run.json").write_text("[" * 100_000), "run.json is damaged, or not one"),
        (
            lambda made: (made / "run.json").write_text('{"schema": 1, "tool": "other"}'),
            "run.json is damaged, or not one",
        ),
        (lambda made: change(made, summary=[1]), "run.json is damaged, or not one"),
        (lambda made: change(made, schema=True), "run.json is damaged, or not one"),
        (lambda made: change(made, schema=2), "newer rmsnorm"),
        (lambda made: change(made, command="bench"), "is of bench, not of train"),
        (lambda made: change(made, execution="cuda"), "executed on cuda, and this device is interpreter"),
        (lambda made: (made / "config.toml").write_text("[train]\nstps = 3\n"), "config.toml:2: "),
        (lambda made: (made / "config.toml").write_text(""), "config.toml is not as it was written"),
        (lambda made: (made / "metrics.jsonl").write_text('{"a": 1}\n{"a"\n'), "metrics.jsonl:2: "),
    ],
)
def test_what_cannot_be_continued_is_refused_and_untouched(tmp_path, spoil, said):
    """Each refusal is one sentence of usage, and the directory stays as it was."""
    made = finished(tmp_path)
    spoil(made)
    before = {path.name: path.read_bytes() for path in made.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=said), resumed(tmp_path):
        pytest.fail("must be refused")
    assert {path.name: path.read_bytes() for path in made.iterdir() if path.is_file()} == before
    assert not liveness.held(made)


def test_a_full_disk_at_a_resume_is_told_with_the_remedy_that_helps(tmp_path, monkeypatch):
    """Another folder would not: the run that is continued lies in this one. What was there is still to be continued."""
    made = finished(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(EnvironmentProblem, match=r"no space is left.*; free some$"), resumed(tmp_path):
            pytest.fail("must be refused")
    with resumed(tmp_path) as again:
        again.finish(PASSED)
    assert facts(made)["status"] == "passed"
    assert hashes_hold(made)


def change(directory: Path, **values: object) -> None:
    (directory / "run.json").write_text(json.dumps(facts(directory) | values))


def test_a_run_is_found_by_path_by_name_and_by_latest(tmp_path, monkeypatch):
    """A path goes before a name in the runs folder; what is neither is a usage error, a loop of links too."""
    made = finished(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in (str(made), made.name, "latest", "latest-train", f"./{made.name}/"):
        assert history.find(name, tmp_path).dir == made.resolve()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("loop", "nothing", "..", "", "\0"):
        with pytest.raises(ConfigError, match="no run directory"):
            history.find(name, tmp_path)


# --- listing and liveness ---------------------------------------------------------------------------------------------


def test_listing_passes_over_what_is_not_ours(tmp_path):
    """Links, files, foreign folders, pipes in place of run.json: none is a run, none stops the listing."""
    made = finished(tmp_path)
    (tmp_path / "link").symlink_to(made)
    (tmp_path / "file").write_text("x")
    for name in ("empty", "foreign", "linked", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "foreign" / "run.json").write_text('{"status": "running"}')
    (tmp_path / "linked" / "run.json").symlink_to(made / "run.json")
    os.mkfifo(tmp_path / "pipe" / "run.json")
    assert [info.dir.name for info in list_runs(tmp_path)] == [made.name]
    assert list_runs(tmp_path / "nothing") == []


def test_liveness_tells_a_reused_process_id_and_another_machine(tmp_path):
    """The id alone proves nothing: its start time must match; from another boot or container nothing is known."""
    me = liveness.identity()
    assert liveness.alive(tmp_path, me) is True
    assert liveness.alive(tmp_path, me | {"start_time": me["start_time"] - 1}) is False
    assert liveness.alive(tmp_path, me | {"pid": "1"}) is False
    assert liveness.alive(tmp_path, me | {"boot_id": "another"}) is None
    assert liveness.alive(tmp_path, me | {"namespace": "another"}) is None
    assert liveness.alive(tmp_path, {}) is None
    lock = liveness.hold(tmp_path)
    assert liveness.alive(tmp_path, {}) is True, "a lock shows life wherever the process is"
    assert liveness.hold(tmp_path) is None
    liveness.release(lock)
    assert liveness.alive(tmp_path, {}) is None


def test_a_dead_child_that_nobody_has_collected_is_not_alive():
    """A zombie has an entry in /proc and does no work."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        deadline = time.monotonic() + 20
        while liveness.start_time(child.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert Path(f"/proc/{child.pid}").exists()
        assert liveness.start_time(child.pid) is None
    finally:
        child.wait()


def test_ranks_other_than_the_first_leave_no_trace(tmp_path, monkeypatch):
    """Under torchrun one directory is made, by rank 0; the others' records and files go nowhere."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with opened(tmp_path) as made:
        made.record({"step": 1})
        made.log("x")
        made.write("junit.xml", "x")
        assert list(made.dir.iterdir()) == []
        made.finish(PASSED)
    assert list(tmp_path.iterdir()) == []
    assert not made.dir.exists()
    monkeypatch.setenv("RANK", "0")
    directory = finished(tmp_path)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in directory.iterdir())
    monkeypatch.setenv("RANK", "1")
    with resumed(tmp_path) as again:
        again.record({"step": 2})
        assert again.resumed
    assert sorted((path.name, path.stat().st_mtime_ns) for path in directory.iterdir()) == before


def test_hashes_leave_out_drafts_and_follow_no_link(tmp_path):
    """A draft of a killed process and a link are no part of what a run vouches for."""
    with opened(tmp_path / "runs") as made:
        (made.checkpoints / f".step-1.pt.1{atomic.TEMPORARY}").write_text("half")
        (tmp_path / "outside").write_text("x")
        made.path("link").symlink_to(tmp_path / "outside")
        made.finish(PASSED)
    assert not [name for name in (made.dir / "SHA256SUMS").read_text().split() if "step-1" in name or "link" in name]


def test_a_second_signal_does_not_wait():
    """The first signal waits for the end of the block, the second one ends it at once, with the first one's code."""
    reached = []

    def insistent() -> None:
        with interrupts.deferred() as waiting:
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(list(waiting))
            time.sleep(1.1 * interrupts.MOMENT)
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append([])

    with pytest.raises(Interrupted) as stop:
        insistent()
    assert (stop.value.exit_code, reached) == (130, [[signal.SIGINT]])


@pytest.mark.case("B77")
@pytest.mark.parametrize("burst", [(signal.SIGTERM, signal.SIGINT), (signal.SIGTERM, signal.SIGINT, signal.SIGINT)])
@pytest.mark.parametrize("outcome", [None, PASSED])
@pytest.mark.parametrize("moment", [0.0, 1.1 * interrupts.MOMENT])
def test_a_burst_of_signals_leaves_one_code_in_record_and_process(tmp_path, monkeypatch, burst, outcome, moment):
    """The first signal is the one that counts, wherever the others meet the last writes; no run is left `running`.

    Sent at once they are one request, with a moment between them each cuts off the answer to the one before.
    """
    left = list(burst)
    real = bookends.checksums

    def disturbed(directory: Path) -> str:
        while left:
            os.kill(os.getpid(), left.pop(0))
            time.sleep(moment)
        return real(directory)

    def work(made: Run) -> None:
        if outcome is None:
            os.kill(os.getpid(), left.pop(0))
        else:
            made.finish(outcome)

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    monkeypatch.setattr(bookends, "checksums", disturbed)
    with interrupts.handled(interrupt), pytest.raises(Interrupted) as stop:
        conduct(opened(tmp_path), work)
    said = facts(only(tmp_path))
    assert (said["status"], said["exit_code"]) == ("interrupted", exit_code_of(stop.value))
    assert exit_code_of(stop.value) == 143


def test_an_ignored_signal_stays_ignored():
    """A job started with SIGINT ignored (nohup, the background of a shell) is not stopped by it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.deferred() as waiting:
            os.kill(os.getpid(), signal.SIGINT)
        assert waiting == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_during_the_last_writes_waits_for_them(tmp_path, monkeypatch):
    """SIGTERM while the hashes are written: the directory is completed first, and says 143 as the process does."""
    real = bookends.checksums

    def disturbed(directory: Path) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(directory)

    monkeypatch.setattr(bookends, "checksums", disturbed)
    with pytest.raises(Interrupted) as stop:
        finished(tmp_path)
    assert stop.value.exit_code == 143
    said = facts(only(tmp_path))
    assert (said["status"], said["exit_code"], said["counts"]) == ("interrupted", 143, {"passed": 3})
    assert hashes_hold(only(tmp_path))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
