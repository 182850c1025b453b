"""The process and what is around it: a stdout that is full, closed or without reader, and signals at any moment."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rmsnorm_cli import cli, config, session
from rmsnorm_cli.environment import Device
from rmsnorm_cli.results import Outcome
from rmsnorm_cli.rundir import interrupts
from rmsnorm_cli.rundir.run import open_run

QUESTIONS = {  # what a command line asks for -> whether it prints a JSON document
    "exercise --list": False,
    "exercise --list --json": True,
    "verify --dry-run": False,
    "train --dry-run --json": True,
    "clean --dry-run --runs-dir none": False,
    "clean --dry-run --runs-dir none --json": True,
    "verify --eps 0 --json": True,
    "audit nothing": False,
}


def broken(number):
    """Return a stdout that fails at every write as a full disk, or a pipe without reader, does."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    return SimpleNamespace(write=fail, flush=lambda: None, isatty=lambda: False, fileno=fail)


def exit_code(question):
    with pytest.raises(SystemExit) as ended:
        cli.main(question.split())
    return ended.value.code


@pytest.mark.case("B86")
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_a_full_disk_swallowed_is_no_success_and_is_said(question, monkeypatch, capsys, tmp_path):
    """The code is 4 where it would have been 0, another one stays, and stderr says what is missing and why."""
    monkeypatch.chdir(tmp_path)
    healthy = exit_code(question)
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdout", broken(errno.ENOSPC))
    assert exit_code(question) == healthy or 4
    told = capsys.readouterr().err
    assert "Traceback" not in told
    if healthy == 0 or QUESTIONS[question]:
        assert told.rstrip().endswith("reached stdout: No space left on device") or "did not reach stdout" in told


@pytest.mark.case("B86")
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("gone", [True, False], ids=["no reader", "closed"])
def test_a_reader_who_left_misses_a_document_and_nothing_else(gone, question, monkeypatch, capsys, tmp_path):
    """Text that nobody reads any more is nobody's loss; a JSON document that did not arrive is."""
    monkeypatch.chdir(tmp_path)
    healthy = exit_code(question)
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdout", broken(errno.EPIPE) if gone else None)
    assert exit_code(question) == (4 if QUESTIONS[question] and healthy == 0 else healthy)
    assert ("did not reach stdout" in capsys.readouterr().err) == QUESTIONS[question]


@pytest.mark.case("B86")
@pytest.mark.parametrize("words", [["--help"], ["verify", "--help"], ["--version"]])
def test_a_real_full_device_and_a_real_pipe_without_reader(words, tmp_path):
    """Help is click's to print: full is exit 4 in one sentence, a reader who left is no failure."""
    start = [sys.executable, "-m", "rmsnorm_cli", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(start, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(start, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


# --- signals ----------------------------------------------------------------------------------------------------------

EARLY = """
import json, os, signal, sys
numbers = json.loads(sys.argv.pop(1))
during = os.environ.get("DURING", "rmsnorm_cli.cli")
class Import:  # signals arrive in the middle of the imports
    def find_spec(self, name, path=None, target=None):
        if name == during:
            while numbers:
                os.kill(os.getpid(), numbers.pop(0))
sys.meta_path.insert(0, Import())
from rmsnorm_cli import __main__
__main__.main()
"""


def started_with(signals, *words, during="rmsnorm_cli.cli"):
    command = [sys.executable, "-c", EARLY, json.dumps(signals), *words]
    environment = os.environ | {"DURING": during}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.case("B77")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("json_too", [False, True])
def test_a_signal_during_the_imports_is_one_sentence_with_its_code(json_too, number, code):
    done = started_with([number], "verify", *(["--json"] if json_too else []))
    assert (done.returncode, done.stderr) == (code, "error: interrupted\n")
    assert json.loads(done.stdout)["status"] == "interrupted" if json_too else not done.stdout


@pytest.mark.case("B77")
@pytest.mark.parametrize(
    ("command", "during"), [("verify", "numpy"), ("verify", "triton.knobs"), ("audit", "numpy")], ids=str
)
def test_a_signal_while_compiled_code_starts_is_not_lost(command, during, tmp_path):
    """What NumPy's import raises torch takes for a machine without NumPy, and goes on."""
    settings = config.load("train", options={"run.dir": str(tmp_path)})
    with open_run(settings, [], Device("auto", "interpreter", "cpu", "CPU"), {}) as made:
        made.finish(Outcome("passed", "cpu", {"passed": 1}))
    words = {"audit": (made.dir.name,), "verify": ("--impl", "reference", "--only", "forward", "--cols", "3")}
    done = started_with([signal.SIGTERM], command, *words[command], "--runs-dir", str(tmp_path), during=during)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (143, "error: interrupted")
    assert list(tmp_path.glob("2*")) == [made.dir]


@pytest.mark.case("B77")
def test_a_second_signal_during_the_imports_ends_the_process_at_once():
    done = started_with([signal.SIGTERM, signal.SIGINT], "verify")
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


LATE = """
import atexit, os, signal, sys
atexit.register(lambda: [os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM)])
class Last:
    def __del__(self):  # when the interpreter is almost gone
        os.kill(os.getpid(), signal.SIGINT)
sys.last = Last()
from rmsnorm_cli import __main__
__main__.main()
"""


@pytest.mark.case("B77")
def test_a_signal_after_the_last_word_changes_no_exit_code():
    """Python gives signals back their default while it takes itself down, which is to be killed by them."""
    done = subprocess.run([sys.executable, "-c", LATE, "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


SLOW_END = """
import atexit, threading, time
atexit.register(time.sleep, 100)
threading.Thread(target=time.sleep, args=(100,)).start()
"""


@pytest.mark.case("B77")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_whoever_asks_to_stop_does_not_wait_for_what_others_do_when_python_ends(number, code):
    """As torch.compile, which waits for its compilers; the document arrives whole all the same."""
    words = [json.dumps([number]), "verify", "--json"]
    done = subprocess.run([sys.executable, "-c", SLOW_END + EARLY, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "error: interrupted\n")
    assert json.loads(done.stdout)["exit_code"] == code


def test_signals_that_a_parent_ignores_stay_ignored_from_the_first_moment():
    """As under nohup, or in the background of a shell: the command runs to its end."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);" + EARLY
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([signal.SIGINT]), "--help"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_start_imports_nothing_but_what_takes_the_signals():
    """A handler that waits for a slow import would come too late."""
    code = "import sys, signal; was = set(sys.modules); import rmsnorm_cli.__main__; print(*set(sys.modules) - was)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == {"rmsnorm_cli", "rmsnorm_cli.__main__"}


@pytest.mark.case("B77")
@pytest.mark.parametrize("again", ["never", "while the first is answered", "while its sentence is printed"])
@pytest.mark.parametrize("later", [0.0, 1.1 * interrupts.MOMENT], ids=["at once", "a moment later"])
def test_of_several_signals_the_first_one_is_the_exit_code(later, again, monkeypatch):
    real = session._failed

    def printed(*given):
        if again == "while its sentence is printed":
            time.sleep(later)
            os.kill(os.getpid(), signal.SIGINT)
        return real(*given)

    def work():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            if again == "while the first is answered":
                time.sleep(later)
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(session, "_failed", printed)
    assert session.guarded(lambda: work, ["verify"]) == 143


@pytest.mark.case("B77")
def test_three_signals_at_once_leave_one_code_in_process_and_record(tmp_path):
    """SIGTERM and two SIGINT within a moment, in the middle of a real run."""
    words = ["verify", "--runs-dir", str(tmp_path), "--impl", "rowwise"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rmsnorm_cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in tmp_path.glob("2*/log.txt")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.002)
    _, told = process.communicate(timeout=120)
    (record,) = Path(tmp_path).glob("2*/run.json")
    said = json.loads(record.read_text())
    assert "Traceback" not in told
    assert (said["status"], said["exit_code"]) == ("interrupted", process.returncode), told
    assert process.returncode in (130, 143)  # signals that meet before one is answered have no order
