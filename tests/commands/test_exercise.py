"""`rmsnorm exercise`: predictions read and compared, the changed kernel really run, the matrix scored and written."""

import io
import json
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from rmsnorm_cli import config, environment, faults, gates
from rmsnorm_cli.commands import exercise
from rmsnorm_cli.console import Console
from rmsnorm_cli.errors import ConfigError, EnvironmentProblem
from rmsnorm_cli.exercise import gates_page, lesson, matrix, pool, questions
from rmsnorm_cli.exercise.matrix import UNCHANGED, Row
from rmsnorm_cli.faults import apply
from rmsnorm_cli.rundir.run import open_run

ON_GPU = torch.cuda.is_available()
DEVICE = environment.Device("auto", "cuda" if ON_GPU else "interpreter", "cuda:0" if ON_GPU else "cpu", "test device")
RIGHT = ("sum=257", "mean=257/512", "denominator=too small", "output=1.41", "at256=1", "mended=no")


def settings(folder: Path, **options: Any) -> config.Settings:
    given = {"run.dir": str(folder), **{f"exercise.{key}": value for key, value in options.items()}}
    return config.load("exercise", options=given)


def perform(folder: Path, console: Console | None = None, **options: Any):
    """Run the command in a run directory of its own; return the outcome and that directory."""
    chosen = settings(folder, **options)
    with open_run(chosen, ["rmsnorm", "exercise"], DEVICE, {}) as run:
        outcome = exercise.run(chosen, run, console or Console(quiet=True), DEVICE)
        run.finish(outcome)
    return outcome, run.dir


def said(outcome) -> str:
    """Return what the notes say, as one line."""
    return " ".join(" ".join(outcome.notes).split())


# --- the lesson -------------------------------------------------------------------------------------------------------


def test_the_lesson_measures_what_arithmetic_gives(tmp_path):
    """257 ones: mean 257/512, denominator 0.708487, y 1.411458 instead of 0.9999995; at 256 nothing shows."""
    outcome, folder = perform(tmp_path, predict=list(RIGHT))
    forward, backward, noticed = (table.rows for table in outcome.tables)
    by_hand = {row[0]: row[2:] for row in forward}
    assert outcome.status == "passed"
    assert by_hand["sum of squares"] == ("257", "257", "257")
    mean_square = by_hand["mean square"]
    assert mean_square[0] == "0.501953125"
    assert float(mean_square[1]) == pytest.approx(257 / 512, rel=2**-21), (
        "read off rstd, which each rsqrt rounds its way"
    )
    assert by_hand["sqrt(mean + eps)"][:2] == ("0.708487 small", "0.708487 small")
    assert by_hand["y"] == ("1.411458", "1.411458", "0.9999995")
    assert by_hand["y at N = 256"] == ("0.9999995", "0.9999995", "0.9999995")
    mended = {row[0]: row for row in backward}["backward's"]
    assert mended[1:3] == ("0.9999995", "0.9999995"), "with the forward mended y is right"
    assert mended[3][:5] == mended[4][:5] == "0.498", "and dx is not"
    assert [row[1] for row in noticed] == ["passes", "passes", "fails: y, dx, dgamma"]
    assert "At N = 256 all four give y = 0.9999995" in outcome.tables[1].caption
    assert (folder / "faults" / "divide-by-block" / "rowwise.py").exists()
    assert (folder / "faults" / "backward-divides-by-block" / "change.diff").exists()


def test_every_prediction_is_laid_beside_arithmetic(tmp_path):
    outcome, _ = perform(tmp_path, predict=list(RIGHT))
    told = outcome.summary["exercise"]["predictions"]
    assert [entry["verdict"] for entry in told.values()] == ["right"] * 6
    assert "Predictions: 6 of 6 as arithmetic has it." in outcome.notes
    assert outcome.said == "19 of 19 measurements and 6 of 6 predictions are what arithmetic gives"
    measured = [entry["measured"] for entry in told.values()]
    assert measured == pytest.approx([257, 257 / 512, 0.708487, 1.411458, 1.0, 0.498047], rel=1e-5)


def test_a_wrong_prediction_is_shown_and_is_no_failure(tmp_path):
    outcome, _ = perform(tmp_path, predict=["output=0.7", "mended=yes"])
    told = outcome.summary["exercise"]["predictions"]
    assert outcome.exit_code == 0
    assert told["output"]["verdict"] == told["mended"]["verdict"] == "not so"
    assert told["sum"]["verdict"] == "not predicted"
    assert "output: you said 0.7, it is 1.411458." in said(outcome)


def test_without_a_prediction_the_lesson_runs_and_says_how_to_make_one(tmp_path):
    outcome, _ = perform(tmp_path)
    assert outcome.status == "passed"
    assert "To say first what you expect: rmsnorm exercise --predict sum=...,mean=..." in said(outcome)


def test_a_measurement_that_arithmetic_does_not_explain_fails(tmp_path, monkeypatch):
    """The command vouches for the kernel, not for the reader: a kernel that does something else is a failure."""
    honest = lesson.launch

    def launch(name, n, *rest):
        seen = honest(name, n, *rest)
        return lesson.Seen(seen.rstd, seen.y * 1.0001, seen.dx) if name == lesson.BOTH else seen

    monkeypatch.setattr(lesson, "launch", launch)
    outcome, _ = perform(tmp_path)
    assert outcome.status == "failed"
    assert {result.impl for result in outcome.results if result.status == "failed"} == {"both-divide-by-block"}


def test_arithmetic_follows_eps():
    assert lesson.arithmetic(3.0)["at256"] == 0.5
    assert lesson.expected(lesson.RIGHT, 257, 3.0).dx == 0.375  # ½ · (1 − ½ · ½)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_predictions_are_read_as_numbers_fractions_and_words():
    found = questions.read_predictions(["mean = 257/512", "sum=2.57e2", "denominator=Smaller", "mended=n"])
    assert found == {"mean": 257 / 512, "sum": 257.0, "denominator": "small", "mended": "no"}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("outptu=1", "did you mean output"),
        ("1.41", "expected KEY=VALUE"),
        ("output", "'output' has no answer, expected output= and a number"),
        ("mean=half", "expected a number"),
        ("mean=1/0", "expected a number"),
        ("denominator=1", "expected small or large"),
    ],
)
def test_an_answer_that_cannot_be_read_is_told_with_what_is_expected(entry, said):
    with pytest.raises(ConfigError, match=said):
        questions.read_predictions([entry])


def test_all_unreadable_answers_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        questions.read_predictions(["a=1", "mean=x", "sum=1", "sum=2"])
    assert len(caught.value.problems) == 3


def test_a_terminal_is_asked_until_it_answers_or_skips(monkeypatch, capsys):
    """Not a number: asked again. An empty line: skipped. The end of the input: nothing more is asked."""
    monkeypatch.setattr("sys.stdin", io.StringIO("many\n257\n\nlarge\n"))
    answers = questions.ask(Console(), {"output": 1.0})
    assert answers == {"output": 1.0, "sum": 257.0, "denominator": "large"}
    shown = capsys.readouterr().out
    assert "'many' is not a number" in shown
    assert re.findall(r"(\d)/6 \w+:", shown) == ["1", "1", "2", "3", "5"]
    assert "within 1% of arithmetic's is right" in shown


def test_nothing_is_said_about_questions_where_all_are_answered(capsys):
    questions.ask(Console(), questions.read_predictions(RIGHT))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("terminal", "no_input", "json", "asked"),
    [(True, False, False, True), (False, False, False, False), (True, True, False, False), (True, False, True, False)],
)
def test_nobody_is_asked_without_a_terminal_or_beside_json(monkeypatch, terminal, no_input, json, asked):
    console = Console(json=json)
    console.terminal = terminal
    stdin = io.StringIO()
    stdin.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", stdin)
    assert questions.can_ask(console, no_input) is asked
    monkeypatch.setattr("sys.stdin", None)  # closed by the shell: <&-
    assert questions.can_ask(console, no_input) is False


# --- one mistake ------------------------------------------------------------------------------------------------------


def test_the_page_of_a_mistake_shows_both_tests_and_the_predicted_value(tmp_path, capsys):
    outcome, _ = perform(tmp_path, Console(), fault="backward-divides-by-block")
    who, by_gate, values = outcome.tables
    assert outcome.status == "passed"
    assert [row[2].split()[0] for row in who.rows] == ["right", "right", "wrong"]
    assert "exposing: float32/7x258/aligned/contiguous" in who.caption
    assert {row[0]: row[1] for row in by_gate.rows}["declared tolerance"] == "caught"
    assert "declared tolerance: float32/7x258/aligned/contiguous: first wrong element" in said(outcome)
    (value,) = values.rows
    assert float(value[3]) == pytest.approx(float(value[4]), rel=1e-5)
    assert abs(float(value[2]) - float(value[3])) > 0.1
    assert "+        mean_ux_hat = tl.sum(u * x_hat, axis=0) / BLOCK" in capsys.readouterr().out


def test_a_mistake_that_does_something_else_than_predicted_fails(tmp_path, monkeypatch):
    real = faults.find("gamma-ignored")
    wrong = faults.fault.Fault(**{**vars(real), "predicted": lambda t: {"y": t.xhat * 2}})
    monkeypatch.setattr(faults, "CATALOGUE", (wrong,))
    outcome, _ = perform(tmp_path, fault="gamma-ignored")
    assert outcome.status == "failed"
    assert any(note.startswith("y: not what algebra predicts") for note in outcome.notes)


def test_a_mistake_in_fused_has_its_page_too(tmp_path, capsys):
    outcome, folder = perform(tmp_path, Console(), fault="second-tile-replaces-sum")
    assert outcome.status == "passed"
    assert [row[1].split()[0] for row in outcome.tables[0].rows] == ["right", "right", "wrong"]
    assert "Every element is what algebra predicts" in said(outcome)
    assert "+        square_sum = row_sum(xb * xb, ROWS)" in capsys.readouterr().out
    assert sorted(p.name for p in (folder / "faults/second-tile-replaces-sum").iterdir()) == [
        "change.diff",
        "forward.py",
    ]


def test_an_equivalent_change_passes_because_nobody_objects(tmp_path):
    outcome, _ = perform(tmp_path, fault="gamma-padding-of-ones")
    assert outcome.status == "passed"
    assert "caught by no gate" in outcome.results[0].detail
    assert outcome.said == "caught by 0 of 9 gates"


@pytest.mark.skipif(ON_GPU, reason="it runs on a GPU")
def test_a_mistake_that_needs_a_gpu_is_refused_without_one(tmp_path):
    """It is shown, and then it is the machine that is missing something: exit 4, not a verdict."""
    with pytest.raises(
        EnvironmentProblem, match="atomic-sum needs a GPU: the interpreter runs programs one after the other"
    ):
        perform(tmp_path, fault="atomic-sum")
    with pytest.raises(EnvironmentProblem, match=r"flag-of-a-step-before needs a GPU: .* on a machine with a GPU"):
        perform(tmp_path, fault="flag-of-a-step-before")


def test_a_mistake_that_a_gpu_is_not_asked_for_is_refused_there(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.DEVICE", environment.Device("cuda", "cuda", "cuda:0", "a GPU"))
    with pytest.raises(EnvironmentProblem, match="last-chunk-not-written needs the interpreter: a GPU takes this"):
        perform(tmp_path, fault="last-chunk-not-written")


# --- all mistakes -----------------------------------------------------------------------------------------------------


RUN_HERE = [fault for fault in faults.CATALOGUE if not fault.elsewhere(DEVICE.execution)]


def rows(**changed: Row) -> list[Row]:
    """Return what a perfect run of the catalogue gives, with some rows replaced."""
    found = []
    for name in [*UNCHANGED, *(fault.name for fault in RUN_HERE)]:
        innocent = name in UNCHANGED or faults.find(name).equivalent
        caught = (
            {} if innocent else {"declared tolerance": {"case": "c", "status": "failed", "detail": "d", "hint": ""}}
        )
        found.append(changed.get(re.sub(r"\W", "_", name), Row(name, "passes", caught, {"declared tolerance": 1})))
    return found


def scored(tmp_path, monkeypatch, found):
    monkeypatch.setattr(pool, "examined", lambda *arguments: iter(found))
    return perform(tmp_path, all=True)


def test_all_caught_and_nothing_else_is_a_score_of_everything(tmp_path, monkeypatch):
    outcome, folder = scored(tmp_path, monkeypatch, rows())
    score = outcome.summary["score"]
    assert outcome.status == "passed"
    assert score["caught"] == score["of"] == sum(not fault.equivalent for fault in RUN_HERE)
    assert score["naive"] == 0
    entries = outcome.summary["matrix"]["faults"]
    assert {"name", "pass", "naive", "caught_by", "expected", "equivalent"} <= set(entries[0])
    assert len(entries) == len(faults.CATALOGUE)
    shown = {row[0]: row[1:] for row in outcome.tables[0].rows}
    declared = [gate.NAME for gate in gates.GATES].index("declared tolerance")
    assert shown["divide-by-block"].index("x") == 1 + declared
    assert "x" not in shown["row-offset-in-32-bits"]
    assert set(shown["atomic-sum"]) == {""} or ON_GPU
    assert json.loads((folder / "run.json").read_text())["summary"]["score"]["of"] == score["of"]
    assert f"**{score['of']} of {score['of']} mistakes are caught." in (folder / "gates.md").read_text()


def test_a_survivor_is_named_and_fails_the_run(tmp_path, monkeypatch):
    outcome, folder = scored(tmp_path, monkeypatch, rows(eps_forgotten=Row("eps-forgotten", "passes")))
    assert outcome.status == "failed"
    assert outcome.summary["score"]["survivors"] == ["eps-forgotten"]
    assert "survivors: eps-forgotten" in said(outcome)
    assert outcome.tables[1].rows == (("eps-forgotten", "survives: none of 0 questions showed it"),)
    assert "Survivors: eps-forgotten." in (folder / "gates.md").read_text()


@pytest.mark.parametrize("name", [*UNCHANGED, "row-offset-in-32-bits", "masks-that-mask-nothing"])
def test_an_objection_to_what_is_right_fails_the_run(tmp_path, monkeypatch, name):
    """A false alarm discredits every catch, so it is a failure and not a point."""
    false = Row(name, "passes", {"memory": {"case": "c", "status": "failed", "detail": "d", "hint": ""}})
    outcome, _ = scored(tmp_path, monkeypatch, rows(**{re.sub(r"\W", "_", name): false}))
    assert outcome.status == "failed"
    assert outcome.tables[1].rows == ((name, "no mistake, but memory objects"),)
    assert f"{name}: memory: c: d" in said(outcome)


def test_a_mistake_caught_elsewhere_than_expected_is_told(tmp_path, monkeypatch):
    elsewhere = Row("dx-over-dy", "passes", {"autograd": {"case": "c", "status": "failed", "detail": "d", "hint": ""}})
    outcome, _ = scored(tmp_path, monkeypatch, rows(dx_over_dy=elsewhere))
    assert outcome.status == "passed"
    assert outcome.summary["score"]["elsewhere"]["dx-over-dy"] == ["memory"]


def test_a_mistake_meets_every_gate_until_each_objects(tmp_path):
    """Early stop within a gate, none across gates; the usual test passes what verify catches."""
    apply.write(faults.find("divide-by-block"), tmp_path)
    row = matrix.examine("divide-by-block", tmp_path, settings(tmp_path), DEVICE)
    assert row.naive == "passes"
    assert set(row.asked) == {gate.NAME for gate in gates.GATES}
    assert "declared tolerance" in row.caught
    assert row.asked["declared tolerance"] == 1, "its exposing input is asked first"
    assert "memory" not in row.caught


@pytest.mark.parametrize("name", UNCHANGED)
def test_an_unchanged_kernel_is_objected_to_by_no_gate(name, tmp_path):
    assert matrix.examine(name, tmp_path, settings(tmp_path), DEVICE).caught == {}


def test_gates_are_not_asked_any_more_once_a_mistake_has_cost_the_gpu(tmp_path, monkeypatch):
    """What every later call says then is no finding about the mistake."""
    lost = {"case": "c", "status": "error", "detail": "AcceleratorError: CUDA error: misaligned address"}
    monkeypatch.setattr(matrix, "first_objection", lambda gate, *rest: (lost if gate.NAME == "memory" else None, 1))
    apply.write(faults.find("gamma-ignored"), tmp_path)
    row = matrix.examine("gamma-ignored", tmp_path, settings(tmp_path), DEVICE)
    assert (list(row.asked), list(row.caught)) == (["contract", "memory"], ["memory"])


def test_a_mistake_that_can_cost_the_gpu_is_first_put_to_the_gate_that_must_catch_it(tmp_path, monkeypatch):
    """Behind a crash nobody is asked any more, so it must not be another gate that meets it first."""
    monkeypatch.setattr(matrix, "first_objection", lambda *rest: (None, 1))
    fault = next(f for f in faults.CATALOGUE if f.crashes)
    apply.write(fault, tmp_path)
    row = matrix.examine(fault.name, tmp_path, settings(tmp_path), DEVICE)
    first, *others = row.asked
    assert (first,) == fault.expected
    assert others == [gate.NAME for gate in gates.GATES if gate.NAME not in fault.expected]


def test_mistakes_that_can_cost_the_gpu_have_processes_of_their_own_there(tmp_path, monkeypatch):
    pools: list[int] = []

    class Executor:
        def __init__(self, size, **_):
            pools.append(0)

        def submit(self, *_):
            pools[-1] += 1
            done = Future()
            done.set_result(Row("any", "passes"))
            return done

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(pool, "ProcessPoolExecutor", Executor)
    names = ["gamma-ignored", "rows-taken-as-aligned", "eps-forgotten", "row-offset-past-2-31"]
    gpu = environment.Device("cuda", "cuda", "cuda:0", "a GPU")
    assert len(list(pool.examined(names, tmp_path, settings(tmp_path), gpu))) == 4
    assert pools == [2, 1, 1]


@pytest.mark.parametrize(
    ("fault", "width"),
    [("", 60), ("", 80), ("", 120), ("divide-by-block", 80), ("second-tile-at-zero", 80), ("output-in-fp32", 80)],
)
def test_a_page_fits_a_terminal_without_cutting_anything(fault, width, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    console = Console()
    console.terminal = True
    monkeypatch.setattr("sys.stderr", io.StringIO())  # no bar
    outcome, folder = perform(tmp_path, console, fault=fault)
    console.outcome(outcome)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = [line for line in shown.splitlines() if not line.startswith(("+", "-", " ")) and str(folder) not in line]
    assert "…" not in shown
    assert max(map(len, lines)) <= width
    if not fault:
        story = shown[shown.index("A row of") : shown.index("numbers:")].splitlines()
        assert all(width - 15 < len(line) <= width for line in story[:-1]), "it is broken where the terminal ends"


def test_the_processes_of_the_pool_return_the_rows(tmp_path):
    apply.write(faults.find("gamma-ignored"), tmp_path)
    found = list(pool.examined(["gamma-ignored"], tmp_path, settings(tmp_path), DEVICE))
    assert [(row.name, row.naive, "declared tolerance" in row.caught) for row in found] == [
        ("gamma-ignored", "passes", True)
    ]


def test_the_page_of_the_gates_has_a_row_for_each_mistake(tmp_path):
    summary = matrix.summarised({row.name: row for row in rows()}, DEVICE)
    text = gates_page.text(summary, settings(tmp_path), DEVICE)
    for fault in faults.CATALOGUE:
        assert f"`{fault.name}`" in text
    assert "Written by `rmsnorm exercise --all` on 20" in text
    assert "Objections to the unchanged kernel: none." in text


def test_the_committed_page_knows_every_mistake_of_the_catalogue():
    """A mistake that was added or renamed since asks for a new `rmsnorm exercise --all`."""
    page = Path(__file__).parents[2] / "docs" / "gates.md"
    named = set(re.findall(r"^\| `([a-z0-9-]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {fault.name for fault in faults.CATALOGUE if not fault.equivalent}


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exercise.fault": "divide-by-blok"}, "did you mean divide-by-block"),
        ({"exercise.fault": "DIVIDE_BY_BLOCK"}, "did you mean divide-by-block"),
        ({"run.impl": ["fused"]}, "expected rowwise or nothing: a mistake has its kernel"),
        ({"run.rounding": "llama"}, "expected fp32 or nothing"),
        ({"operator.eps": 1e3}, "expected at most 10 in the default exercise"),
        ({"exercise.all": True, "exercise.predict": ["sum=1"]}, "only the default exercise asks"),
    ],
)
def test_what_the_command_cannot_do_is_refused_before_anything_runs(options, said):
    with pytest.raises(ConfigError, match=said):
        exercise.plan(config.load("exercise", options=options))


@pytest.mark.parametrize("beside", [{"all": True}, {"fault": "layernorm"}, {"predict": ["sum=1"]}])
def test_a_list_beside_something_to_run_is_refused(beside, tmp_path):
    with pytest.raises(ConfigError, match=f"--list: it runs nothing; leave out exercise.{next(iter(beside))}"):
        exercise.listing(settings(tmp_path, **beside))


def test_the_list_has_every_mistake_with_its_inputs(tmp_path):
    outcome = exercise.listing(settings(tmp_path))
    names = [row[0] for table in outcome.tables for row in table.rows]
    assert names == [fault.name for fault in faults.CATALOGUE]
    assert [table.title.split(":")[0] for table in outcome.tables] == ["rowwise", "fused"]
    assert outcome.exit_code == 0
    assert outcome.summary["faults"][0]["changes"][0]["before"]
