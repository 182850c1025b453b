"""Wrong keys and values: each is told with its place, what was expected and what was probably meant."""

from pathlib import Path

import pytest

from rmsnorm_cli.config import COMMANDS, load
from rmsnorm_cli.errors import ConfigError

# What a file says, the line and key that the message must open with, and what else it must contain.
BROKEN = {
    "misspelt key": ("[train]\nstpes = 3\n", "2: train.stpes: unknown key in [train]", "key: train.steps"),
    "word of another tool": ("[train]\nlearing_rate = 0.1\n", "2: train.learing_rate: unknown", "key: train.lr"),
    "key far from any": ("[exercise]\nzzz = 1\n", "2: exercise.zzz: unknown", "exercise.fault, exercise.predict"),
    "key of another table": ("[run]\nsteps = 3\n", "2: run.steps: key in the wrong place", "in [train]"),
    "key outside a table": ("eps = 1e-5\n", "1: eps: key in the wrong place", "key: operator.eps"),
    "hyphen for underscore": ("[train]\ncheckpoint-every = 5\n", "2: train.checkpoint-every: unk", "checkpoint_every"),
    "hyphen in another table": ("[run]\nfail-if-slower-than = 1\n", "2: run.fail-if-slower-than: key", "in [bench]"),
    "unknown table": ("\n[verfy]\nrows = [1]\n", "2: verfy: unknown table", "nearest valid key: verify"),
    "unknown subtable": ("[verify.tolerances.float8]\natol = 0\n", "1: verify.tolerances.float8: unk", "float"),
    "table of another command": ("[bench]\nsamples = 0\n", "2: bench.samples: got 0", "from 2 to 100000"),
    "text for a number": ('[operator]\neps = "1e-6"\n', '2: operator.eps: got "1e-6"', "a finite number above 0"),
    "zero eps": ("[operator]\neps = 0\n", "2: operator.eps: got 0", "above 0"),
    "negative eps": ("[operator]\neps = -1e-6\n", "2: operator.eps: got -1e-06", "above 0"),
    "eps that fp32 calls zero": ("[operator]\neps = 1e-60\n", "2: operator.eps: got 1e-60", "fp32 can hold"),
    "nan": ("[train.lr]\nadam = nan\n", "2: train.lr.adam: got nan", "a finite number above 0 and at most 10"),
    "infinity": ("[train.lr]\nsgd = inf\n", "2: train.lr.sgd: got inf", "a finite number"),
    "slipped exponent": ("[train.lr]\nadam = 4e07\n", "2: train.lr.adam: got 40000000.0", "at most 10"),
    "number for a table": ("[train]\nlr = 0.1\n", "2: train.lr: got 0.1", "expected a table"),
    "table for a number": ("[train.steps]\nadam = 1\n", "1: train.steps: got a table", "an integer"),
    "fraction for an integer": ("[train]\nsteps = 10.5\n", "2: train.steps: got 10.5", "an integer from 1"),
    "whole float for an integer": ("[train]\nsteps = 10.0\n", "2: train.steps: got 10.0", "an integer from 1"),
    "bool for an integer": ("[train]\nsteps = true\n", "2: train.steps: got true", "an integer from 1"),
    "bool for a float": ("[operator]\neps = true\n", "2: operator.eps: got true", "a finite number"),
    "text for a bool": ('[bench]\nwall = "false"\n', '2: bench.wall: got "false"', "expected true or false"),
    "integer for a bool": ("[exercise]\nall = 1\n", "2: exercise.all: got 1", "expected true or false"),
    "number for text": ("[run]\nname = 3\n", "2: run.name: got 3", "letters, digits"),
    "date for text": ("[run]\ndir = 2026-01-02\n", "2: run.dir: got 2026-01-02", "expected text"),
    "empty text": ('[run]\ndir = ""\n', '2: run.dir: got ""', "not empty"),
    "control character": ('[run]\ndir = "a\\u0000b"\n', '2: run.dir: got "a\\u0000b"', "no control characters"),
    "name that climbs": ('[run]\nname = "../x"\n', '2: run.name: got "../x"', "letters, digits"),
    "name with two dots": ('[run]\nname = "a..b"\n', '2: run.name: got "a..b"', "two dots"),
    "unknown device": ('[run]\ndevice = "gpu"\n', '2: run.device: got "gpu"', "auto, cuda, cuda:N or interpreter"),
    "negative seed": ("[run]\nseed = -1\n", "2: run.seed: got -1", "from 0 to 4294967295"),
    "seed in words": ('[run]\nseed = "rnd"\n', '2: run.seed: got "rnd"', '"random" or an integer'),
    "huge integer": ("[run]\nseed = 0x" + "f" * 5000 + "\n", "2: run.seed: got an integer of 20000 bits", "42949"),
    "huge float": ("[operator]\neps = 1" + "0" * 400 + "\n", "2: operator.eps: got an integer of", "finite"),
    "misspelt implementation": ('[run]\nimpl = ["rowise"]\n', '2: run.impl item 1: got "rowise"', "value: rowwise"),
    "callable without a name": ('[run]\nimpl = ["a.py:"]\n', '2: run.impl item 1: got "a.py:"', "file.py:callable"),
    "text for a list": ('[run]\nimpl = "rowwise"\n', '2: run.impl: got "rowwise"', "expected a list"),
    "empty list": ("[verify]\nrows = []\n", "2: verify.rows: got []", "a list that is not empty"),
    "item twice": ("[verify]\nrows = [1, 17, 1]\n", "2: verify.rows: got [1, 17, 1]: item 3 repeats item 1", "once"),
    "negative item": ("[verify]\nrows = [1,\n 2,\n -1]\n", "2: verify.rows item 3: got -1", "from 0"),
    "zero width": ("[verify]\ncols = [0]\n", "2: verify.cols item 1: got 0", "from 1"),
    "misspelt dtype": ('[verify]\ndtypes = ["bfloat"]\n', '2: verify.dtypes item 1: got "bfloat"', "value: bfloat16"),
    "misspelt layout": ('[verify]\nlayouts = ["slicedrows"]\n', "2: verify.layouts item 1", "value: sliced_rows"),
    "misspelt distribution": ('[verify]\ndistributions = ["spred"]\n', "2: verify.distributions item 1", ": spread"),
    "widened tolerance": ("[verify.tolerances.float16]\natol = 0.01\n", "2: verify.tolerances.float16.a", "tightened"),
    "shape of one size": ("[bench]\nshapes = [[3]]\n", "2: bench.shapes item 1: got [3]", '"128x257" or [128, 257]'),
    "shape in words": ('[bench]\nshapes = ["3x4", "3xx"]\n', '2: bench.shapes item 2: got "3xx"', "128x257"),
    "empty shape": ("[bench]\nshapes = [[0, 4]]\n", "2: bench.shapes item 1: got [0, 4]: 0 rows", "rows x cols"),
    "shape like hexadecimal": ('[bench]\nshapes = ["0x5"]\n', '2: bench.shapes item 1: got "0x5": 0 rows,', "x"),
    "shape too wide": ('[bench]\nshapes = ["1x16777217"]\n', "2: bench.shapes item 1: ", "16777217 columns, expected"),
    "shape of no dtype": ('[bench]\nshapes = ["2x3:float61"]\n', "2: bench.shapes item 1: ", "as float61, expected"),
    "shape that starts too late": ('[bench]\nshapes = ["2x3+16"]\n', "2: bench.shapes item 1: ", "16 numbers after"),
    "shape that starts nowhere": ('[bench]\nshapes = ["2x3+"]\n', '2: bench.shapes item 1: got "2x3+"', "128x257+1"),
    "nothing kept": ("[train]\nkeep = 0\n", "2: train.keep: got 0", "from 1"),
    "list of tables": ("[[run]]\nseed = 1\n", "1: run: got [a table]", "expected a table"),
    "key with a line break": ('[run]\n"a\\nb" = 1\n', '2: run."a\\nb": unknown key', "one of"),
}  # fmt: skip


def problems(text: str, tmp_path: Path, command: str = "verify") -> list[str]:
    file = tmp_path / "c.toml"
    file.write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        load(command, file=file)
    assert caught.value.exit_code == 2
    return [line.removeprefix(f"{file}:") for line in caught.value.problems]


@pytest.mark.case("B83", "B89")
@pytest.mark.parametrize("kind", BROKEN)
def test_each_kind_of_broken_file_is_one_line_that_names_place_and_remedy(kind: str, tmp_path: Path) -> None:
    text, opening, contains = BROKEN[kind]
    (line,) = problems(text, tmp_path)
    assert line.startswith(opening)
    assert contains in line
    assert ", expected " in line
    assert "\n" not in line


MANY = """\
eps = 1                      # wrong
[operator]
eps = 0                      # wrong
[run]
seed = 3
devise = "cuda"              # wrong
impl = ["rowise", "torch"]   # wrong
[train]
steps = true                 # wrong
batch = [
  1,
]
lr = { adam = nan, sgd = 0.1 }   # wrong
optimizers = ["sgd", "adam"]
[verfy]                      # wrong
rows = [1]
[verify]
rows = [1, -1]               # wrong
tolerances.float32.atol = 1  # wrong
"""


@pytest.mark.case("B83")
def test_all_problems_of_a_file_are_told_at_once_in_the_order_of_its_lines(tmp_path: Path) -> None:
    lines = MANY.split("\n")
    wrong = [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]
    wrong.append(lines.index("batch = [") + 1)
    assert [int(line.partition(":")[0]) for line in problems(MANY, tmp_path)] == sorted(wrong)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_a_file_that_is_wrong_about_another_command(command: str, tmp_path: Path) -> None:
    text = "".join(f"[{name}]\nnonsense = 1\n" for name in COMMANDS)
    assert len(problems(text, tmp_path, command)) == len(COMMANDS)


@pytest.mark.case("B89")
def test_a_wrong_value_does_not_take_its_table_along(tmp_path: Path) -> None:
    """Four keys of one table, two of them wrong: exactly those two are told."""
    told = problems("[train]\nsteps = 5\nbatch = 0\nwidth = 33\nkeep = 1.5\n", tmp_path)
    assert [line.split(":")[1].strip() for line in told] == ["train.batch", "train.keep"]


@pytest.mark.case("B83")
def test_problems_of_every_layer_come_in_one_error(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[operator]\neps = 0\n")
    with pytest.raises(ConfigError) as caught:
        load(
            "train",
            file=file,
            environ={"RMSNORM_RUN__SEED": "-3", "RMSNORM_SEED": "3", "RMSNORM_Run__Seed": "3", "PATH": "/bin"},
            sets=["train.steps=0", "train.stps=3", "steps", "=3"],
            options={"operator.eps": "-1", "verify.dtypes": ["float3"], "run.dir": "", "run.name": None},
        )
    assert [line.partition(", expected")[0] for line in caught.value.problems] == [
        f"{file}:2: operator.eps: got 0",
        "RMSNORM_RUN__SEED: got -3",
        "RMSNORM_Run__Seed: unknown key",
        "RMSNORM_SEED: key in the wrong place",
        "--set train.steps: got 0",
        "--set train.stps: unknown key in [train]",
        "--set steps: no value",
        '--set "": unknown key',
        "--eps: got -1",
        '--dtype: item 1: got "float3"',
        '--runs-dir: got ""',
    ]


def test_a_key_near_to_nothing_is_answered_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"^--set qq\.zz: unknown key, expected one of operator, run, data, verify"):
        load("train", sets=["qq.zz=1"])


def test_a_batch_may_be_the_whole_training_partition() -> None:
    assert load("train", sets=["data.train=32"]).train.batch == 32


def test_the_nearest_key_is_spelt_as_its_layer_spells_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        load("train", environ={"RMSNORM_TRAIN__STEP": "3"}, sets=["train.step=3"])
    assert caught.value.problems[0].endswith("nearest valid key: RMSNORM_TRAIN__STEPS")
    assert caught.value.problems[1].endswith("nearest valid key: train.steps")


@pytest.mark.parametrize(
    ("command", "sets", "key", "wrong"),
    [
        ("train", ['run.impl=["rowwise", "torch"]'], "run.impl", "got 2 names"),
        ("train", ["data.train=16"], "data.train", "a batch of 32 is larger than the training partition"),
        ("train", ["train.batch=4096"], "train.batch", "a batch of 4096 is larger than the training partition"),
        ("bench", ["bench.fail_if_slower_than=fla"], "bench.fail_if_slower_than", '"fla" is not timed'),
        ("bench", ["bench.across=true"], "bench.across", "does nothing without bench.compare"),
        ("exercise", ["exercise.all=true", "exercise.fault=x"], "exercise.all", "contradicts exercise.fault"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_where_they_were_set(
    command: str, sets: list[str], key: str, wrong: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(command, sets=sets)
    (line,) = caught.value.problems
    assert line.startswith(f"--set {key}: {wrong}, expected ")
    others = [name for name in COMMANDS if name != command]
    for other in others:  # a command is not stopped by what another one would make of its keys
        load(other, sets=sets if other != "train" else [text for text in sets if "impl" not in text])
