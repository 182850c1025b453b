"""A user's code by its address: missing, unreadable or no Python is refused with its line, and nothing is run."""

import os
import sys
from pathlib import Path

import pytest

from rmsnorm_cli.config.callables import problem_of_module, refuse_unreadable
from rmsnorm_cli.errors import ConfigError

BROKEN = "def norm(x, gamma, eps):\n    y = x * (\n    return y\n"
TRAP = "raise SystemExit('this module was run')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TRAP)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "__init__.py").write_text(TRAP)
    (tmp_path / "inner" / "kernel.py").write_text(TRAP)
    (tmp_path / "inner" / "broken.py").write_text(BROKEN)
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "null.py").write_bytes(b"x = 1\0")
    (tmp_path / "latin.py").write_bytes(b'x = "caf\xe9"\n')
    return tmp_path


def problem(*names: str) -> str:
    """Return what is said of these names, one line each."""
    with pytest.raises(ConfigError) as refused:
        refuse_unreadable(names)
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_code_that_is_there_is_accepted_and_not_run() -> None:
    """A file, a module, a module of a package, an installed one, a built-in one, and our own names."""
    before = set(sys.modules)
    refuse_unreadable(["mine.py:norm", "mine:norm", "inner:norm", "inner.kernel:norm", "sys:intern", "fused", "liger"])
    refuse_unreadable(["torch.nn.functional:rms_norm", "numpy:float64"])
    assert {"mine", "inner", "inner.kernel"}.isdisjoint(set(sys.modules) - before)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mime.py:norm", "there is no file mime.py; did you mean mine.py?"),
        ("nowhere/mine.py:norm", "there is no file nowhere/mine.py; name one that is there"),
        ("folder.py:norm", "folder.py is no regular file"),
        ("pipe.py:norm", "pipe.py is no regular file"),
        ("null.py:norm", "null bytes"),
        ("latin.py:norm", "latin.py:1: (unicode error)"),
        ("broken.py:norm", "broken.py:2: '(' was never closed: y = x * (; correct that line"),
        ("inner.broken:norm", "broken.py:2: '(' was never closed: y = x * (; correct that line"),
        ("absent:norm", "there is no module absent in the current folder or among the installed packages"),
        ("inner.absent:norm", "there is no module inner.absent in inner; name one that is there"),
        ("mine.deeper:norm", "there is no module mine.deeper in mine"),
        (".mine:norm", ".mine is no module's name"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line_with_the_remedy(name: str, said: str) -> None:
    line = problem("fused", name)
    assert line.startswith("run.impl: ")
    assert said in line
    assert "\n" not in line


def test_a_file_without_permission_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert "mine.py cannot be read (Permission denied); make it readable" in problem("mine.py:norm")


def test_all_problems_are_told_at_once() -> None:
    assert len(problem("mime.py:norm", "mine.py:norm", "absent:norm").splitlines()) == 2


def test_a_module_younger_than_the_listing_of_its_folder_is_found(folder: Path) -> None:
    assert problem_of_module("younger") is not None
    (folder / "younger.py").write_text("")
    assert problem_of_module("younger") is None
