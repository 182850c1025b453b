"""The rules of the house, proved on the source: who imports whom, how long files are, where things may not be."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rmsnorm_cli"
SOURCES = sorted(PACKAGE.rglob("*.py"))
KERNEL_SOURCES = sorted((PACKAGE / "kernels").glob("*.py"))


def imports(path: Path) -> set[str]:
    """Return the absolute names a file imports, lazily or not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; a copy of it could not be loaded from elsewhere"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules_loaded_by(statement: str) -> set[str]:
    """Run a statement in a fresh process and return the modules it left loaded."""
    code = f"{statement}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_file_says_what_it_is_for_and_stays_short(path):
    text = path.read_text(encoding="utf-8")
    assert text == "" or ast.get_docstring(ast.parse(text)), "a file opens with what it is for"
    assert len(text.splitlines()) <= 320, "files stay near 300 lines; split the room"


@pytest.mark.parametrize("path", KERNEL_SOURCES, ids=lambda p: p.name)
def test_kernels_import_nothing_above_them(path):
    above = {name for name in imports(path) if name.startswith("rmsnorm_cli") and ".kernels" not in name}
    assert above <= {"rmsnorm_cli"}


@pytest.mark.parametrize("name", ["rowwise", "forward", "backward", "split"])
def test_kernel_files_never_import_the_reference(name):
    path = PACKAGE / "kernels" / f"{name}.py"
    if path.exists():
        assert not {found for found in imports(path) if "reference" in found}


@pytest.mark.parametrize("path", sorted((PACKAGE / "commands").glob("*.py")), ids=lambda p: p.stem)
def test_commands_never_import_one_another(path):
    others = {p.stem for p in (PACKAGE / "commands").glob("*.py")} - {path.stem, "__init__"}
    assert not {f"rmsnorm_cli.commands.{name}" for name in others} & imports(path)


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name != "__main__.py"], ids=lambda p: p.stem)
def test_nothing_imports_the_command_line(path):
    assert "rmsnorm_cli.cli" not in imports(path)


@pytest.mark.parametrize("statement", ["import rmsnorm_cli.cli", "import rmsnorm_cli.config, rmsnorm_cli.results"])
def test_the_command_line_and_the_configuration_load_without_torch(statement):
    assert not modules_loaded_by(statement) & {"torch", "triton", "numpy", "matplotlib", "rich.console"}


def test_the_kernels_load_without_the_tool_around_them():
    """A user's network imports the kernels alone: no pydantic, no Typer, no tool."""
    loaded = modules_loaded_by("import rmsnorm_cli.kernels")
    assert "torch" in loaded
    ours = {name for name in loaded if name.startswith("rmsnorm_cli.")}
    assert all(name.startswith("rmsnorm_cli.kernels") for name in ours)
    assert not loaded & {"pydantic", "typer", "rich"}


def test_there_are_no_drawers():
    assert not [p for p in SOURCES if p.stem in ("utils", "util", "common", "helpers", "misc", "core")]


def test_no_comparison_broadcasts():
    """`allclose` broadcasts and ignores dtypes, so a wrong shape could pass: no file of ours calls it."""
    found = [p for p in [*SOURCES, *(ROOT / "tests").rglob("*.py")] if re.search(r"\ballclose\(", p.read_text())]
    assert not found


def test_the_version_is_kept_in_one_place():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version\s*=\s*"', project, re.MULTILINE) is None
    assert 'dynamic = ["version"]' in project
