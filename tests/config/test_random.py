"""Random documents, texts, variables and command lines: the answer is settings or a ConfigError of clear lines.

Through the whole command line it is exit 2 with sentences on stderr, no traceback and no half-made run directory.
"""

import io
import json
import math
import os
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w
import typer
from hypothesis import example, given
from hypothesis import strategies as st

from rmsnorm_cli import cli
from rmsnorm_cli.config import COMMANDS, Settings, describe, load, to_toml
from rmsnorm_cli.config.lines import parse
from rmsnorm_cli.errors import ConfigError

KEYS = sorted({key.key for command in COMMANDS for key in describe(command)})
PARTS = sorted({part for key in KEYS for part in key.split(".")})

names = st.sampled_from(PARTS) | st.text(max_size=6)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 300)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.sampled_from(["rowwise", "float32", "dx", "128x257", "a.py:f", "auto", "random"])
).filter(lambda value: value is not None)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
documents = st.dictionaries(names, values | st.dictionaries(names, values, max_size=4), max_size=6)
words = st.text(st.characters(exclude_characters="\0"), max_size=12) | st.sampled_from(
    ["1", "-1", "1e-3", "true", "[1, 2]", "{a = 1}", "nan", "random", "cuda:0", "3x4", "float32,dx"]
)


def outcome(command: str, tmp: Path, **layers: Any) -> list[str]:
    """Return the problems; where there are none, check that the settings write and load to themselves."""
    try:
        found = load(command, **layers)
    except ConfigError as invalid:
        problems = invalid.problems
    else:
        return _reloads(command, found, tmp)
    assert problems
    for line in problems:
        assert ", expected " in line
        assert "\n" not in line
        assert len(line) < 2000
    return problems


def _reloads(command: str, found: Settings, tmp: Path) -> list[str]:
    file = tmp / "resolved.toml"
    file.write_text(to_toml(found), encoding="utf-8")
    assert load(command, file=file) == found
    return []


@given(command=st.sampled_from(COMMANDS), data=documents)
def test_random_documents_are_settings_or_a_configuration_error(
    command: str, data: dict[str, Any], tmp_path_factory: Any
) -> None:
    file = tmp_path_factory.getbasetemp() / "random.toml"
    file.write_bytes(tomli_w.dumps(data).encode("utf-8", "surrogatepass"))
    for line in outcome(command, file.parent, file=file):
        assert line.startswith(f"{file}:")
        number = line.removeprefix(f"{file}:").partition(":")[0]
        assert 1 <= int(number) <= len(file.read_bytes().split(b"\n"))


@given(raw=st.binary(max_size=60) | st.text("ab.=[]{}'\"\n#1 ,é", max_size=60).map(lambda text: text.encode()))
def test_random_bytes_are_settings_or_a_configuration_error(raw: bytes, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "bytes.toml"
    file.write_bytes(raw)
    outcome("verify", file.parent, file=file)


@given(key=st.sampled_from(KEYS) | st.lists(names, max_size=4).map(".".join), text=words)
def test_random_sets_variables_and_options_are_settings_or_a_configuration_error(
    key: str, text: str, tmp_path_factory: Any
) -> None:
    base = tmp_path_factory.getbasetemp()
    command = next((name for name in COMMANDS if key.startswith(f"{name}.")), "train")
    outcome(command, base, sets=[f"{key}={text}"])
    outcome(command, base, sets=[text])
    outcome(command, base, environ={"RMSNORM_" + key.replace(".", "__").upper(): text, f"RMSNORM_{text}": text})
    if key in KEYS:
        for value in (text, [text], [text, 1], True, 3, math.nan):
            outcome(command, base, options={key: value})


@given(data=documents)
@example(data={"a": {"b": {"c": [{"d": 1}]}}})
def test_every_key_of_a_random_document_has_the_first_line_at_which_it_can_be_read(data: dict[str, Any]) -> None:
    """The line of a key is the one after the last prefix of the file that parses and does not hold the key yet."""
    text = tomli_w.dumps(data)
    read = parse(text)
    assert repr(read.data) == repr(tomllib.loads(text))
    if read.faults:
        return
    lines = text.split("\n")
    held: list[tuple[int, Any]] = []
    for count in range(len(lines) + 1):
        try:
            held.append((count, tomllib.loads("\n".join(lines[:count]))))
        except tomllib.TOMLDecodeError:
            continue  # a value is still open
    for path, line in read.lines.items():
        first = next(index for index, (_, prefix) in enumerate(held) if _holds(prefix, path))
        assert line == held[first - 1][0] + 1


def _holds(data: Any, path: tuple[str, ...]) -> bool:
    if isinstance(data, list) and path:
        return any(_holds(item, path) for item in data)
    return not path or (isinstance(data, dict) and path[0] in data and _holds(data[path[0]], path[1:]))


# --- whole command lines ----------------------------------------------------------------------------------------------

ASIDE = ("audit", "report", "clean")  # doctor uses the machine, whatever its options are
OPTIONS = sorted(
    {name for command in typer.main.get_command(cli.app).commands.values() for p in command.params for name in p.opts}
)
option_names = st.sampled_from([name for name in OPTIONS if name.startswith("--")]) | words.map(
    lambda text: f"--{text}"
)
parts = st.tuples(option_names, words) | st.tuples(option_names) | st.tuples(words)
command_lines = st.lists(parts, max_size=4).map(lambda found: [word for part in found for word in part])
variables = st.dictionaries(
    st.sampled_from(KEYS).map(lambda key: "RMSNORM_" + key.replace(".", "__").upper())
    | words.filter(lambda text: text.isprintable() and "=" not in text).map(lambda text: f"RMSNORM_{text}")
    | st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK", "COLUMNS", "NO_COLOR", "GITHUB_ACTIONS", "TERM"]),
    words.filter(str.isprintable),
    max_size=2,
)


def answered(command_line: list[str], folder: Path) -> tuple[int, str, str]:
    """Run a command line in this process, in an empty folder; return exit code, stdout and stderr."""
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    os.chdir(folder)
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main(command_line)
    finally:
        os.chdir(before)
    code = ended.value.code
    assert isinstance(code, int)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.case("B83", "B86", "B89")
@given(command=st.sampled_from([*COMMANDS, *ASIDE]), given_words=command_lines, environment=variables)
def test_random_command_lines_and_variables_end_in_sentences_and_make_nothing(
    command: str, given_words: list[str], environment: dict[str, str], tmp_path_factory: Any
) -> None:
    """Exit 0 for what could be run (a dry run does nothing), else 2 or 4, each line of stderr a sentence of ours."""
    folder = tmp_path_factory.mktemp("empty")
    dry = [] if command in ("audit", "report") else ["--dry-run"]
    with mock.patch.dict(os.environ, environment):
        os.environ.pop("RMSNORM_TRACEBACK", None)
        code, out, err = answered([command, *dry, *given_words], folder)
    assert code in (0, 2, 4), (code, err)
    assert "Traceback" not in err
    if code:
        assert err.strip()
        assert all(line.startswith(("error: ", "warning: ", "::error")) for line in err.splitlines() if line), err
    if "--json" in given_words and out.startswith("{"):
        assert json.loads(out)
    assert os.listdir(folder) == []
