"""Reports about command lines and run directories, asked of the tool as a user asks it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmsnorm_cli import cli, config
from rmsnorm_cli.errors import ConfigError


def ask(words, capsys):
    """Run the command line in this process; return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


# --- keys and values --------------------------------------------------------------------------------------------------

WRONG = """\
[train]
learing_rate = 0.1
lr = { adm = 0.1 }
checkpoint-every = 5
steps = 10.5
batch = true
[run]
eps = 1e-6
[bench]
wall = "false"
[verify]
rows = [-1]
dtypes = ["bfloat"]
[tran]
steps = 3
[operator]
eps = "1e-6"
"""


@pytest.mark.case("B83", "B89")
@pytest.mark.parametrize("command", config.COMMANDS)
def test_all_wrong_keys_and_values_are_told_at_once_before_anything_is_made(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(WRONG)
    code, out, err = ask([command, "--config", "c.toml"], capsys)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert [line.split(":")[2] for line in lines] == ["2", "3", "4", "5", "6", "8", "10", "12", "13", "14", "17"]
    for word in (
        "train.learing_rate",
        "train.lr.adam",
        "train.checkpoint_every",
        "operator.eps",
        "bfloat16",
        "[train]",
    ):
        assert any(word in line for line in lines), word
    assert all(", expected " in line for line in lines)
    assert os.listdir(tmp_path) == ["c.toml"]


@pytest.mark.case("B83")
@pytest.mark.parametrize(
    "words",
    [
        ["--stepz", "3"],
        ["--set", "train.stepz=3"],
        ["--set", "steps=3"],
        ["--set", "nonsense"],
        ["stray"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("json_too", [False, True])
def test_an_unknown_override_is_refused_before_anything_is_made(json_too, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = ask(["train", *words, *(["--json"] if json_too else [])], capsys)
    assert code == 2
    assert err.startswith("error: ")
    assert json.loads(out)["errors"] if json_too else not out
    assert os.listdir(tmp_path) == []


@pytest.mark.case("B83")
@pytest.mark.parametrize("name", ["RMSNORM_TRAIN__STEPZ", "RMSNORM_STEPS", "RMSNORM_", "RMSNORM_TRAIN__STEPS__X"])
def test_an_unknown_variable_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "3")
    code, _, err = ask(["train", "--dry-run"], capsys)
    assert code == 2
    assert name in err


@pytest.mark.case("B89")
def test_an_integer_stands_for_a_float_and_for_nothing_else():
    assert config.load("verify", sets=["operator.eps=1"]).operator.eps == 1.0
    assert type(config.load("verify", options={"operator.eps": 1}).operator.eps) is float
    with pytest.raises(ConfigError, match=r"train\.steps: got 10\.0"):
        config.load("train", sets=["train.steps=10.0"])


# --- one document, in any locale --------------------------------------------------------------------------------------

DOCUMENTS = {
    "exercise --list": 0,
    "verify --dry-run": 0,
    "train --dry-run --quiet": 0,
    "clean --dry-run": 0,
    "audit nothing": 2,
    "report nothing": 2,
    "verify --eps nan": 2,
    "train --resume nothing": 2,
    "verify --nonsense": 2,
    "nonsense": 2,
}


@pytest.mark.case("B86")
@pytest.mark.parametrize("question", DOCUMENTS)
def test_stdout_is_one_document_and_nothing_else(question, tmp_path, monkeypatch, capsys):
    """Whatever is asked, and whatever comes of it: it parses whole, and holds no colour and no NaN literal."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = ask([*question.split(), "--json"], capsys)
    told = json.loads(out, parse_constant=lambda literal: pytest.fail(literal))
    assert code == DOCUMENTS[question] == told.get("exit_code", 0)
    assert "\x1b" not in out
    assert told["status"]


@pytest.mark.case("B86", "B88")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_no_encoding_of_the_streams_ends_a_command(encoding, tmp_path):
    """Greek in a name and in a path, a locale that has none: escaped on the streams, UTF-8 in the files."""
    folder = tmp_path / "γάμμα"
    folder.mkdir()
    (folder / "ρυθμός.toml").write_text("# γ\n[operator]\neps = 0\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-m", "rmsnorm_cli", "verify", "--config", "ρυθμός.toml", "--json"],
        cwd=folder,
        env=os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": encoding, "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2
    told = json.loads(done.stdout.decode(encoding))
    assert "operator.eps: got 0" in told["errors"][0]
    assert b"Traceback" not in done.stderr


# --- run directories --------------------------------------------------------------------------------------------------


def made_run(folder, name):
    directory = folder / name
    directory.mkdir(parents=True)
    facts = {"tool": "rmsnorm", "schema": 1, "command": "verify", "status": "passed", "started": "2026-01-01T00:00:00Z"}
    (directory / "run.json").write_text(json.dumps(facts | {"finished": "2026-01-01T00:00:01Z"}))
    return directory


@pytest.mark.case("B85")
def test_clean_removes_links_and_runs_and_nothing_behind_them(tmp_path, monkeypatch, capsys):
    """Links beside and inside a run, a dangling one, somebody's folder: what was listed goes, and nothing else."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    runs = tmp_path / "runs"
    a = made_run(runs, "20260101T000000Z-verify")
    b = made_run(runs, "20260101T000001Z-verify")
    (b / "data").symlink_to(outside)
    (runs / "link").symlink_to(outside)
    (runs / "dangling").symlink_to(tmp_path / "nowhere")
    (runs / "notes").mkdir()
    (runs / "notes" / "run.json").write_text('{"tool": "somebody"}')
    monkeypatch.chdir(tmp_path)
    code, out, _ = ask(["clean", "--dry-run", "--json"], capsys)
    listed = json.loads(out)["listed"]
    assert (code, sorted(listed)) == (0, [a.name, b.name])
    assert a.is_dir()
    code, out, _ = ask(["clean", "--yes", "--json"], capsys)
    assert (code, sorted(json.loads(out)["removed"])) == (0, sorted(listed))
    assert sorted(os.listdir(runs)) == ["dangling", "link", "notes"]
    assert (outside / "precious").read_text() == "x"


@pytest.mark.case("B85")
@pytest.mark.parametrize("name", ["../outside", "/etc", "..", ".", "a/../../outside"])
def test_no_name_leaves_the_runs_folder(name, tmp_path, monkeypatch, capsys):
    """A run's name is one word; nothing is made for another."""
    monkeypatch.chdir(tmp_path)
    code, _, err = ask(["verify", "--name", name], capsys)
    assert code == 2
    assert "--name" in err
    assert os.listdir(tmp_path) == []


@pytest.mark.case("B82")
def test_a_directory_of_the_same_second_and_name_is_never_taken_over(tmp_path, monkeypatch):
    """With the clock frozen, the second start of a name gets a number, also beside a folder of somebody else's."""
    from datetime import UTC, datetime

    from rmsnorm_cli.rundir import run

    monkeypatch.setattr(run, "now", lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    stem = "20260102T030405Z-train-x"
    (tmp_path / stem).mkdir()
    (tmp_path / stem / "kept").touch()
    made = [run.make_directory(tmp_path, "train", "x").name for _ in range(3)]
    assert made == [f"{stem}-2", f"{stem}-3", f"{stem}-4"]
    assert os.listdir(tmp_path / stem) == ["kept"]
    assert Path(tmp_path / f"{stem}-2").is_dir()
