"""The five layers: which one wins, how text becomes a value, and that the resolved whole loads again."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rmsnorm_cli.config import COMMANDS, DEFAULT_IMPL, Settings, load, runs_folder, to_toml
from rmsnorm_cli.errors import ConfigError


def reload(settings: Settings, tmp_path: Path) -> Settings:
    file = tmp_path / "resolved.toml"
    file.write_text(to_toml(settings), encoding="utf-8")
    return load(settings.command, file=file)


def test_each_layer_wins_over_the_ones_below_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[run]\nseed = 1\n")
    layers: list[dict[str, Any]] = [
        {"file": file},
        {"environ": {"RMSNORM_RUN__SEED": "2"}},
        {"sets": ["run.seed=3"]},
        {"options": {"run.seed": 4}},
    ]
    seeds = [load("verify").seed]
    given: dict[str, Any] = {}
    for layer in layers:
        given |= layer
        seeds.append(load("verify", **given).seed)
    assert seeds == [0, 1, 2, 3, 4]
    for highest in range(len(layers)):  # and the order is not an accident of which layers are there
        only = {key: value for layer in layers[highest::-2] for key, value in layer.items()}
        assert load("verify", **only).seed == highest + 1


def test_layers_add_to_a_table_and_do_not_replace_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[train]\nsteps = 7\nlr = { adam = 0.5 }\n")
    train = load(
        "train",
        file=file,
        environ={"RMSNORM_TRAIN__LR__SGD": "0.25"},
        sets=["train.batch=3"],
        options={"train.width": 9},
    ).train
    assert (train.steps, train.lr.adam, train.lr.sgd, train.batch, train.width) == (7, 0.5, 0.25, 3, 9)


def test_a_later_set_wins_over_an_earlier_one() -> None:
    assert load("verify", sets=["run.seed=1", "run.seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("run.name=abc", "run.name", "abc"),
        ('run.name="abc"', "run.name", "abc"),
        ("run.name='abc'", "run.name", "abc"),
        ("run.name=3", "run.name", "3"),
        ("run.name=true", "run.name", "true"),
        ("run.name=", "run.name", ""),
        (" run.name = abc ", "run.name", "abc"),
        ("run.dir=a=b c", "run.dir", "a=b c"),
        ("run.seed=0x10", "run.seed", 16),
        ("operator.eps=1", "operator.eps", 1.0),
        ("operator.eps=1e-5", "operator.eps", 1e-5),
        ("verify.rows=[1, 17]", "verify.rows", (1, 17)),
        ("verify.rows=1,17", "verify.rows", (1, 17)),
        ("verify.rows=5", "verify.rows", (5,)),
        ("verify.dtypes=float16", "verify.dtypes", ("float16",)),
        ("verify.dtypes=float16, bfloat16", "verify.dtypes", ("float16", "bfloat16")),
        ('verify.dtypes=["float16"]', "verify.dtypes", ("float16",)),
        ("run.impl=reference,my.mod:f", "run.impl", ("reference", "my.mod:f")),
        ("bench.shapes=128x257,4X5", "bench.shapes", ("128x257", "4x5")),
        ("bench.shapes=[[128, 257]]", "bench.shapes", ("128x257",)),
        ("bench.shapes=8x9:float16,4x4", "bench.shapes", ("8x9:float16", "4x4")),
        ("bench.shapes=8x9+3:float16,4x4+0,4x4+1", "bench.shapes", ("8x9+3:float16", "4x4", "4x4+1")),
        ("bench.wall=true", "bench.wall", True),
        ("bench.compare=runs/latest", "bench.compare", "runs/latest"),
        ("train.lr={adam = 1}", "train.lr.adam", 1.0),
        ("run.seed=1 # the comment of a TOML value", "run.seed", 1),
    ],
)
def test_text_of_sets_variables_and_options_is_read_as_its_key_expects(text: str, key: str, value: object) -> None:
    name, _, words = text.partition("=")
    dotted = name.strip()
    command = dotted.split(".")[0] if dotted.split(".")[0] in COMMANDS else "verify"
    variable = "RMSNORM_" + dotted.replace(".", "__").upper()
    ways: list[dict[str, Any]] = [
        {"sets": [text]},
        {"environ": {variable: words.strip()}},
        {"options": {dotted: words.strip()}},
    ]
    for way in ways:
        found: Any = load(command, **way)
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize("text", ["1\nrun.name = 'x'", "1\n[bench]", "[1", "'", '"""', "{", "1 2", "\x00", "1" * 5000])
def test_text_cannot_carry_more_than_one_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set run.seed: got "):
        load("verify", sets=[f"run.seed={text}"])


def test_options_take_values_and_lists_and_leave_out_what_was_not_given() -> None:
    options = {"verify.rows": [3, "4"], "verify.only": ["dx"], "run.dir": Path("a/b"), "run.seed": None, "run.impl": []}
    settings = load("verify", options=options)
    assert (settings.verify.rows, settings.verify.only, settings.run.dir) == ((3, 4), ("dx",), "a/b")
    assert (settings.seed, settings.run.impl) == (0, DEFAULT_IMPL["verify"])


def test_an_option_for_a_key_that_does_not_exist_is_a_mistake_of_ours_and_not_of_the_user() -> None:
    with pytest.raises(LookupError, match=r"train\.stepz"):
        load("train", options={"train.stepz": 3})


def test_other_variables_of_the_environment_are_left_alone() -> None:
    assert load("verify", environ={"RMSNORM": "x", "rmsnorm_run__seed": "5", "RMSNORM_TRACEBACK": "1"}).seed == 0


def test_a_random_seed_is_drawn_anew_and_recorded_as_an_integer(tmp_path: Path) -> None:
    drawn = [load("verify", sets=["run.seed=random"]) for _ in range(4)]
    assert len({settings.seed for settings in drawn}) > 1
    assert f"seed = {drawn[0].seed}\n" in to_toml(drawn[0])
    assert reload(drawn[0], tmp_path).seed == drawn[0].seed


EVERYTHING = [
    "operator.eps=2.5e-6", "run.dir=Ωmega", "run.name=n.1", "run.device=cuda:3", "run.impl=a b/c.py:f",
    "run.rounding=gemma", "data.noise=0.1", "data.test=7", "verify.dtypes=float64", "verify.rows=0,5",
    "verify.tolerances.float32.atol=1e-9", "gradcheck.second=false", "train.lr.sgd=1", "train.fault=some-fault",
    "bench.shapes=3x4", "bench.compare=runs/x", "bench.across=true", "exercise.predict=257=1.41,256=1",
]  # fmt: skip


@pytest.mark.parametrize("sets", [[], EVERYTHING], ids=["defaults", "changed"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_resolved_configuration_loads_to_the_same_settings(command: str, sets: list[str], tmp_path: Path) -> None:
    settings = load(command, sets=sets)
    assert reload(settings, tmp_path) == settings
    assert settings.run.name == ("n.1" if sets else "")


def test_the_resolved_configuration_is_written_for_people_to_read() -> None:
    """Arrays are on one line each, whatever brackets and commas their texts hold; what is not set is said."""
    sets = ["bench.shapes=3x4,5x6", 'run.impl=["a[.py:f", "b],.py:g"]', "bench.compare=x[", "run.dir=]"]
    lines = to_toml(load("bench", sets=sets)).split("\n")
    assert 'shapes = ["3x4", "5x6"]' in lines
    assert 'impl = ["a[.py:f", "b],.py:g"]' in lines
    assert 'compare = "x["' in lines
    assert 'dir = "]"' in lines
    assert "# fail_if_slower_than is not set: fail where a kernel is slower than this one" in lines
    assert "predict = []" in to_toml(load("exercise")).split("\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_hold_the_table_of_their_command_and_no_other(command: str) -> None:
    settings = load(command)
    assert getattr(settings, command) is settings.table
    for other in set(COMMANDS) - {command}:
        with pytest.raises(AttributeError, match=f"settings of {command} hold no \\[{other}\\]"):
            getattr(settings, other)


def test_settings_are_frozen() -> None:
    settings = load("verify")
    with pytest.raises(AttributeError):
        settings.command = "bench"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        settings.verify.rows = (1,)  # type: ignore[misc]


def test_the_grid_is_the_default_one_only_while_both_lists_are() -> None:
    assert load("verify").verify.default_grid
    assert not load("verify", sets=["verify.rows=5"]).verify.default_grid
    assert not load("verify", sets=["verify.cols=5"]).verify.default_grid


def test_the_runs_folder_of_commands_without_settings_follows_option_then_environment() -> None:
    environ = {"RMSNORM_RUN__DIR": "from-environment"}
    assert runs_folder(None, {}) == Path("runs")
    assert runs_folder(None, environ) == Path("from-environment")
    assert runs_folder("from-option", environ) == Path("from-option")
    with pytest.raises(ConfigError, match="RMSNORM_RUN__DR"):
        runs_folder(None, {"RMSNORM_RUN__DR": "x"})
