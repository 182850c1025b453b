"""The files in configs/, what `describe` says of the keys, and what importing the configuration costs."""

import os
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rmsnorm_cli.config import COMMANDS, FLAGS, describe, load, to_toml
from rmsnorm_cli.config.fields import IMPLEMENTATIONS
from rmsnorm_cli.config.schema import place
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.judging import tolerances
from rmsnorm_cli.judging.tolerances import DECLARED

CONFIGS = Path(__file__).parents[2] / "configs"


def flat(data: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_file_of_a_command_holds_the_defaults(command: str) -> None:
    assert load(command, file=CONFIGS / f"{command}.toml") == load(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_file_of_a_command_names_only_keys_that_the_command_reads(command: str) -> None:
    text = (CONFIGS / f"{command}.toml").read_text(encoding="utf-8")
    without_marks = re.sub(r"^# ([a-z_]+ = )", r"\1", text, flags=re.MULTILINE)  # keys that have no default value
    named = set(flat(tomllib.loads(without_marks)))
    assert named <= {key.key for key in describe(command)}
    assert len(named) >= 6


@pytest.mark.parametrize("command", COMMANDS)
def test_the_file_of_the_teaching_path_serves_every_command(command: str) -> None:
    settings = load(command, file=CONFIGS / "minimum.toml")
    assert settings.run.impl == ("rowwise",)
    assert command in tomllib.loads((CONFIGS / "minimum.toml").read_text(encoding="utf-8"))


def test_the_teaching_path_keeps_what_the_lesson_counts_on() -> None:
    verify = load("verify", file=CONFIGS / "minimum.toml").verify
    train = load("train", file=CONFIGS / "minimum.toml").train
    assert len(verify.dtypes) * len(verify.rows) * len(verify.cols) >= 72
    assert {256, 257} <= set(verify.cols)
    assert (train.width, train.steps, train.batch) == (257, 100, 32)


@pytest.mark.parametrize("command", COMMANDS)
def test_describe_lists_exactly_the_keys_of_the_resolved_configuration(command: str) -> None:
    described = {key.key: key for key in describe(command)}
    resolved = to_toml(load(command))
    unset = {name for name, key in described.items() if key.default == "not set"}
    assert set(described) - unset == set(flat(tomllib.loads(resolved)))
    for key in described.values():
        assert key.description
        assert key.type
        assert "\n" not in key.type + key.default + key.description


@pytest.mark.parametrize("command", COMMANDS)
def test_the_defaults_that_describe_shows_are_toml_that_loads_to_the_defaults(command: str) -> None:
    sets = [f"{key.key}={key.default}" for key in describe(command) if key.default != "not set"]
    assert load(command, sets=sets) == load(command)


def test_every_option_name_stands_for_a_key() -> None:
    assert all(place(tuple(key.split("."))) for key in FLAGS)


def test_importing_the_configuration_brings_no_torch_and_takes_little_time() -> None:
    """Less than three times what pydantic takes, which it needs: it is 1.6 times, and with torch it would be 15."""
    heavy = {"torch", "triton", "numpy", "typer", "rich"}
    code = f"import sys, rmsnorm_cli.config; print(sorted({heavy} & set(sys.modules)))"
    spent, needed = [], []
    for _ in range(3):  # processor time, the least of a few: a busy machine takes longer by the clock
        found, seconds = timed(code)
        assert found == "[]\n"
        spent.append(seconds)
        needed.append(timed("from pydantic import BaseModel, Field")[1])
    assert min(spent) < 3 * min(needed), f"{min(spent):.2f} s, and pydantic {min(needed):.2f} s"


def timed(code: str) -> tuple[str, float]:
    """Run code in a process of its own; return what it prints and its processor time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_names_of_implementations_are_those_that_can_be_looked_up() -> None:
    from rmsnorm_cli.kernels import BUILT_IN

    assert set(BUILT_IN) <= set(IMPLEMENTATIONS)


def test_the_declared_tolerances_are_the_ones_of_the_protocol_and_are_hashed_in_one_form() -> None:
    assert {dtype: tuple(DECLARED[dtype]) for dtype in ("float32", "float16", "bfloat16")} == {
        "float32": (1e-5, 1e-4),
        "float16": (3e-3, 3e-3),
        "bfloat16": (2.4e-2, 2.4e-2),
    }
    assert tolerances.canonical_json().startswith('{"bfloat16":{"atol":0.024,"rtol":0.024},"float16"')
    assert tolerances.digest(dict(reversed(DECLARED.items()))) == tolerances.DECLARED_SHA256
    changed = {**DECLARED, "float32": tolerances.Tolerance(1.1e-5, 1e-4)}
    assert tolerances.digest(changed) != tolerances.DECLARED_SHA256
    with pytest.raises(TypeError):
        DECLARED["float32"] = tolerances.Tolerance(1, 1)  # type: ignore[index]


def test_tolerances_in_force_are_the_declared_ones_until_they_are_tightened() -> None:
    assert {dtype: load("verify").verify.tolerances.of(dtype) for dtype in DECLARED} == DECLARED
    tightened = load("verify", sets=["verify.tolerances.float16.atol=0"]).verify.tolerances
    assert tightened.of("float16") == (0, DECLARED["float16"].rtol)
    assert tightened.of("float32") == DECLARED["float32"]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    """Opening a named pipe waits for somebody who writes into it."""
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="is no regular file"):
        load("verify", file=tmp_path / "pipe.toml")
