"""What is printed where: plain text when piped, one JSON document, annotations, and a reader that may leave."""

import io
import json
import os
import subprocess
import sys

import pytest

from rmsnorm_cli.console import Console
from rmsnorm_cli.results import CaseResult, Outcome, Table, count, overall, strict_json

TABLE = Table("a title", ("name", "value"), (("long name", "1"), ("[a.b]", "22")), "a caption")


def failed(detail="got 1, want 2", hint="the mask"):
    return CaseResult("mine", "cpu", "dx", "declared tolerance", "float32", "3x257", "failed", 2.5, detail, hint)


def outcome(*results):
    counts = count(results)
    return Outcome(overall(counts), "cpu", counts, tables=(TABLE,), notes=("a note",), results=results)


def test_a_piped_table_is_aligned_plain_text_with_its_brackets(capsys):
    Console().table(TABLE)
    assert capsys.readouterr().out.splitlines() == [
        "a title", "name       value", "long name  1", "[a.b]      22", "a caption", "",
    ]  # fmt: skip


SEEN = "first wrong element [0, 0]: got -1.307815670967102e-06, want -0.9265696950650807 (6.4e+06 ULP), " * 3
FAILURES = Table("failed", ("impl", "case", "seen"), (("mine", "float32/3x257", SEEN), ("mine", "f", "2")), prose=True)
VERDICTS = Table(
    "verify", ("implementation", "scope", "gate", "cases", "worst"),
    (("rowwise (interpreter)", "properties", "declared tolerance", "77", "0.0023 float32/67x1025/spread/contiguous"),),
)  # fmt: skip


def on_terminal(monkeypatch, capsys, width, show):
    """Return the lines that a terminal of this width gets, without colours."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console()
    console.terminal = True
    show(console)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_failure_on_a_terminal_is_a_paragraph_whose_words_and_numbers_stay_whole(monkeypatch, capsys, width):
    lines = on_terminal(monkeypatch, capsys, width, lambda console: console.table(FAILURES))
    assert max(map(len, lines)) <= width
    assert lines[1] == "mine  float32/3x257"
    assert all(line.startswith("    ") for line in lines[2:-3]), "what was seen hangs under its row"
    assert " ".join(lines[2:-3]).split() == SEEN.split()


def test_what_hangs_under_an_indented_note_is_indented_further(monkeypatch, capsys):
    lines = on_terminal(monkeypatch, capsys, 60, lambda console: console.note(f"  {SEEN}"))
    assert lines[0].startswith("  first")
    assert all(line.startswith("    ") and line[4] != " " for line in lines[1:])


@pytest.mark.parametrize(
    ("typed", "shown"), [("257\n", "how many?\n> "), ("", "how many?\n> \n"), ("257", "how many?\n> \n")]
)
def test_a_question_has_a_prompt_and_what_follows_begins_a_line(monkeypatch, capsys, typed, shown):
    """Enter ends the line on a terminal; the end of the input does not."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert Console().ask("how many?") == typed
    assert capsys.readouterr().out == shown


def test_an_interrupted_question_ends_its_line(monkeypatch, capsys):
    class Interrupting(io.StringIO):
        def readline(self, size=-1):
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        Console().ask("how many?")
    assert capsys.readouterr().out == "how many?\n> \n"


def test_a_byte_that_is_no_text_is_an_answer_that_cannot_be_read_and_no_crash(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert Console().ask("how many?") == "\\xff\n"


def test_a_failure_in_a_pipe_is_one_line(capsys):
    Console().table(FAILURES)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(FAILURES.rows) + 1


@pytest.mark.parametrize("width", [60, 62, 80, 108, 120])
def test_a_table_that_is_wider_than_the_terminal_loses_nothing_and_cuts_no_word(monkeypatch, capsys, width):
    lines = on_terminal(monkeypatch, capsys, width, lambda console: console.table(VERDICTS))
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert words >= {word for cell in VERDICTS.rows[0] for word in cell.split()}
    assert any(line.startswith(("┏", "┌")) for line in lines) == (width == 120)


def test_a_note_on_a_terminal_is_wrapped_with_a_hanging_indent_and_in_a_pipe_is_not(monkeypatch, capsys):
    lines = on_terminal(monkeypatch, capsys, 80, lambda console: console.note(SEEN))
    assert max(map(len, lines)) <= 80
    assert {line[:2] for line in lines[1:]} == {"  "}
    Console().note(SEEN)
    assert capsys.readouterr().out == SEEN + "\n"


def test_quiet_keeps_the_verdict_and_silent_keeps_errors_alone(capsys):
    for console, expected in ((Console(quiet=True), "verdict\n"), (Console(silent=True), "")):
        console.note("note")
        console.table(TABLE)
        console.verdict("verdict")
        assert capsys.readouterr().out == expected
    Console(silent=True).error("broken")
    assert capsys.readouterr().err == "error: broken\n"


@pytest.mark.case("B86")
def test_json_owns_stdout_and_people_read_stderr(capsys):
    console = Console(json=True)
    console.note("a note")
    console.table(TABLE)
    with console.progress("working", 2) as progress:
        progress.advance()
    console.outcome(outcome(failed()))
    console.document({"status": "failed", "worst": float("nan")})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"status": "failed", "worst": "nan"}
    assert "a note" in err
    assert "working: 2 done" in err


def test_annotations_are_escaped_and_at_most_ten(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    Console().outcome(outcome(*[failed("100 % wrong\nsecond line")] * 12))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::error")]
    assert len(lines) == 10
    assert lines[0].startswith("::error title=mine dx (declared tolerance)::3x257: 100 %25 wrong%0Asecond line")
    summary = (tmp_path / "summary.md").read_text()
    assert "### rmsnorm: failed" in summary
    assert "| long name | 1 |" in summary


def test_a_summary_that_cannot_be_written_is_a_warning(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "such" / "folder.md"))
    Console().outcome(outcome(failed()))
    assert "warning: the step summary could not be written" in capsys.readouterr().err


@pytest.mark.case("B88")
def test_a_stream_of_a_narrow_encoding_shows_what_it_cannot_write(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    Console().note("rstd³")
    sys.stdout.flush()
    assert raw.getvalue() == b"rstd\\xb3\n"


def test_a_reader_that_leaves_silences_the_stream_and_nothing_else(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console = Console()
        for _ in range(3):
            console.note("into the void" * 1000)


@pytest.mark.case("B68")
@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ((), "inconclusive"),
        (("skipped", "refused"), "inconclusive"),
        (("passed", "refused"), "passed"),
        (("passed", "inconclusive"), "inconclusive"),
        (("passed", "error"), "error"),
        (("passed", "error", "failed"), "failed"),
    ],
)
def test_the_worst_verdict_is_the_whole_and_nothing_passed_is_never_a_pass(statuses, verdict):
    results = [CaseResult("mine", "cpu", "dx", "g", "float32", "c", status) for status in statuses]
    made = outcome(*results)
    assert made.status == verdict
    assert made.exit_code == (0 if verdict == "passed" else 1)


def test_json_has_no_literals_that_are_no_json():
    text = strict_json({"a": [float("inf"), {"b": float("-inf")}], "c": (float("nan"), 1.5)})
    assert json.loads(text) == {"a": ["inf", {"b": "-inf"}], "c": ["nan", 1.5]}


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_is_closed_from_the_start_is_silent(name, monkeypatch):
    """`>&-` leaves Python with None for the stream."""
    monkeypatch.setattr(sys, name, None)
    for json_mode in (True, False):
        console = Console(json=json_mode)
        console.note("note")
        console.table(TABLE)
        console.error("error")
        console.document({"status": "passed"})
        with console.progress("working", 1) as progress:
            progress.advance()


@pytest.mark.case("B86")
def test_what_anybody_prints_beside_the_document_is_on_stderr():
    """Python, C and a child process, buffered or not, while a command works; afterwards stdout is stdout again."""
    program = """
import ctypes, os, subprocess
from rmsnorm_cli.console import Console
console = Console(json=True)
with console.reserved():
    print("python")
    ctypes.CDLL(None).puts(b"buffered C")
    os.write(1, b"unbuffered C\\n")
    subprocess.run(["echo", "child"])
console.document({"one": 1})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert json.loads(done.stdout) == {"one": 1}
    assert set(done.stderr.split("\n")) == {"python", "buffered C", "unbuffered C", "child", ""}
