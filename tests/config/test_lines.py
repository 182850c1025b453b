"""Reading files: line numbers of keys in every form that TOML has, encodings, and files that are not TOML."""

import tomllib
from pathlib import Path

import pytest

from rmsnorm_cli.config import load
from rmsnorm_cli.config.lines import LARGEST_FILE, parse
from rmsnorm_cli.errors import ConfigError

FORMS = '''# a comment
run.seed = 1

operator = { eps = 1e-5 }      # inline
data = { inputs = [1,
  2], train = 3 }
[verify]
rows = [
  1,   # ]
  "]",
]
only = """
[bench]
samples = 5
"""
tolerances.float32.atol = 0
"dtypes" = [ [1, 2],
[3] ]
[ verify . tolerances . "float16" ]   # spaced
rtol = 1
[bench] # [x]
shapes = \'\'\'
]\'\'\'
wall = true
[[extra]]
a = 1
[[extra]]
b = 2
[extra.deep]
c = 3'''


def test_each_key_has_the_line_on_which_it_begins() -> None:
    read = parse(FORMS)
    assert read.data == tomllib.loads(FORMS)
    assert {".".join(key): line for key, line in read.lines.items()} == {
        "run": 2, "run.seed": 2, "operator": 4, "operator.eps": 4,
        "data": 5, "data.inputs": 5, "data.train": 5,
        "verify": 7, "verify.rows": 8, "verify.only": 12, "verify.tolerances": 16, "verify.tolerances.float32": 16,
        "verify.tolerances.float32.atol": 16, "verify.dtypes": 17, "verify.tolerances.float16": 19,
        "verify.tolerances.float16.rtol": 20, "bench": 21, "bench.shapes": 22, "bench.wall": 24,
        "extra": 25, "extra.a": 26, "extra.b": 28, "extra.deep": 29, "extra.deep.c": 30,
    }  # fmt: skip


@pytest.mark.case("B88")
def test_line_ends_of_windows_do_not_move_a_line() -> None:
    assert parse(FORMS.replace("\n", "\r\n")).lines == parse(FORMS).lines


NOT_TOML = {
    "missing value": ("[run]\nseed =\n", 2, "invalid value"),
    "two words as a key": ("a = 1\nlearning rate = 3\n", 2, "expected '='"),
    "unquoted text": ('[run]\nname = abc\n', 2, "invalid value"),
    "unclosed text": ("[run]\nname = 'abc\nseed = 1\n", 2, "in: name = 'abc"),
    "unclosed array": ("[verify]\nrows = [1, 2\ncols = [3]\n", 2, "on line 3, in what begins: rows = [1, 2"),
    "unclosed table": ("[run\nseed = 1\n", 1, "in: [run"),
    "yaml": ("run:\n  seed: 1\n", 1, "in: run:"),
    "bare carriage return": ("[run]\rseed = 1\n", 1, "in: [run]\\rseed"),
    "duplicate key": ("[run]\nseed = 1\nname = 'x'\nseed = 2\n", 4, "run.seed: given twice, first on line 2"),
    "duplicate table": ("[run]\nseed = 1\n[bench]\n[run]\nname = 'x'\n", 4, "run: given twice, first on line 1"),
    "dotted key against table": ("run.seed = 1\n[run]\nname = 'x'\n", 2, "run: given twice, first on line 1"),
    "key against its own table": ("[train]\nlr.adam = 1\nlr = 2\n", 3, "train.lr: given twice, first on line 2"),
    "duplicate in an inline table": ("[train]\nlr = { adam = 1, adam = 2 }\n", 2, "duplicate inline table key"),
    "too many digits": ("[run]\nseed = " + "9" * 5000 + "\n", 2, "too many digits"),
    "too deep": ("[run]\nseed = " + "[" * 5000 + "\n", 2, "nested too deeply"),
    "illegal character": ("[run]\nname = 'a\x01'\n", 2, "character '\\x01'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_TOML)
def test_what_is_not_toml_is_told_with_its_line(kind: str) -> None:
    text, line, contains = NOT_TOML[kind]
    faults = parse(text).faults
    assert faults[0].line == line
    assert contains in faults[0].text
    assert "\n" not in faults[0].text
    assert len(faults) <= 2  # YAML is wrong on both of its lines


@pytest.mark.case("B83")
def test_the_reader_goes_on_behind_a_faulty_statement(tmp_path: Path) -> None:
    """One stray line, a key twice and a table twice do not hide the misspelt keys above, between and below."""
    file = tmp_path / "c.toml"
    file.write_text(
        "[run]\nsede = 1\nname = \ndir = 'a'\ndir = 'b'\n[train]\nstpes = 1\n[run]\nimpl = 1\n[bench]\nsmples = 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load("verify", file=file)
    assert [line.removeprefix(f"{file}:").partition(",")[0] for line in caught.value.problems] == [
        "2: run.sede: unknown key in [run]",
        "3: not valid TOML: invalid value",
        "5: run.dir: given twice",
        "7: train.stpes: unknown key in [train]",
        "8: run: given twice",
        "11: bench.smples: unknown key in [bench]",
    ]


def test_what_stands_above_an_unclosed_value_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[run]\nsede = 1\n[verify]\nrows = [1,\ncols = 2\n")
    with pytest.raises(ConfigError) as caught:
        load("verify", file=file)
    assert [line.split(":")[1] for line in caught.value.problems] == ["2", "4"]


@pytest.mark.case("B88")
@pytest.mark.parametrize(
    "raw",
    [
        b"\xef\xbb\xbf[run]\nname = 'x'\n",
        b"[run]\r\nname = 'x'\r\n",
        b"\xef\xbb\xbf[run]\r\n# \xce\xb3\r\nname = 'x'",
    ],
    ids=["byte-order mark", "Windows line ends", "both, and Greek in a comment"],
)
def test_utf8_files_of_every_editor_load(raw: bytes, tmp_path: Path) -> None:
    file = tmp_path / "γ.toml"
    file.write_bytes(raw)
    assert load("verify", file=file).run.name == "x"


@pytest.mark.case("B88")
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_and_utf32_are_refused_by_name_and_told_to_be_utf8(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes("[run]\nseed = 1\n".encode(encoding))
    with pytest.raises(ConfigError, match=r"c\.toml: is encoded as UTF-16 or UTF-32, expected UTF-8"):
        load("verify", file=file)


@pytest.mark.case("B88")
def test_other_encodings_are_refused_at_the_line_of_the_first_foreign_byte(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes("[run]\n# gr\xfc\xdfe\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"c\.toml:2: byte 0xfc is not UTF-8"):
        load("verify", file=file)


def test_files_that_cannot_be_read_are_one_sentence_each(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (LARGEST_FILE + 1))
    reasons = {
        tmp_path / "none.toml": "does not exist",
        tmp_path: "is a directory",
        tmp_path / "c.toml" / "d.toml": "does not exist",
        large: "is larger than",
        Path("/dev/zero"): "is larger than",
        Path("/proc/self/mem"): "cannot be read",
        Path("a\0b"): "cannot be read",
        Path("x" * 5000): "cannot be read",
    }
    for path, reason in reasons.items():
        with pytest.raises(ConfigError) as caught:
            load("verify", file=path, sets=["run.seed=-1"])
        first, second = caught.value.problems
        assert reason in first
        assert "expected" in first
        assert first.isprintable()
        assert second.startswith("--set run.seed: got -1")


def test_a_hostile_file_is_refused_quickly_and_briefly(tmp_path: Path) -> None:
    """Thousands of wrong keys, dotted keys of thousands of parts, and a long nested array end in a bounded message."""
    file = tmp_path / "c.toml"
    for text in (
        "".join(f"key{number} = 1\n" for number in range(15_000)),
        "[run]\nseed." + ".".join("a" * 60_000) + " = 1\n",
        "[" + ".".join("a" * 60_000) + "]\n",
        "[run]\nseed = [\n" + "[1],\n" * 20_000 + "]\n",
        "[run]\n" + "x" * 200_000 + " = 1\n",
        "[run]\n" + "x =\n" * 20_000,
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load("verify", file=file)
        assert len(caught.value.problems) <= 101
        assert max(len(line) for line in caught.value.problems) < 1000
