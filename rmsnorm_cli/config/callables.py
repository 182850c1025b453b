"""A user's own implementation by its address: that its code is there and is Python, found out without running it.

What only running it can show (that the callable exists, that an import inside it works) is found out when it is loaded.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from rmsnorm_cli.errors import ConfigError

SHOWN = 120  # characters of a wrong line of source


def refuse_unreadable(names: Iterable[str]) -> None:
    """Raise ConfigError with a line for each file:callable or module:callable whose code cannot be read."""
    addresses = [name.rpartition(":") for name in names if ":" in name]
    problems = [problem_of_file(Path(where)) if where.endswith(".py") else problem_of_module(where)
                for where, _, _ in addresses]  # fmt: skip
    found = [f"run.impl: {problem}" for problem in problems if problem]
    if found:
        raise ConfigError(found)


def problem_of_file(path: Path) -> str | None:
    """Return why a file is not one of Python source, with the remedy, or None."""
    if not path.exists():
        there = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        near = get_close_matches(path.name, there, n=1)
        hint = f"did you mean {path.with_name(near[0])}?" if near else "name one that is there"
        return f"there is no file {path}; {hint}"
    if not path.is_file():
        return f"{path} is no regular file; name a file of Python source"
    try:
        source = path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}); make it readable, or name another"
    return problem_of_source(source, str(path))


def problem_of_source(source: bytes, path: str) -> str | None:
    """Return the first line that is not Python, as file:line, reason and text, or None."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()[:SHOWN]
        return f"{path}:{error.lineno or 1}: {error.msg}{f': {line}' if line else ''}; correct that line"
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, nesting without end
        return f"{path}: {error}; name a file of Python source"
    return None


def problem_of_module(module: str) -> str | None:
    """Return why a module cannot be found or read, with the remedy, or None; its packages are not imported."""
    importlib.invalidate_caches()
    found: ModuleSpec | None = None
    inside: Sequence[str] | None = None
    name = ""
    for part in module.split("."):
        if not part:
            return f"{module} is no module's name; write package.module:callable or path/file.py:callable"
        name = f"{name}.{part}" if name else part
        found = specification(name, inside)
        if found is None:
            above = name.rpartition(".")[0]
            where = f"in {above}" if above else "in the current folder or among the installed packages"
            return f"there is no module {name} {where}; name one that is there, or path/file.py:callable"
        inside = found.submodule_search_locations or []
    if found is None or not found.has_location or not (found.origin or "").endswith(".py"):
        return None  # built in, compiled, or a package without a file
    return problem_of_file(Path(str(found.origin)))


def specification(name: str, inside: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module as an import from the current folder would, in `inside` if it belongs to a package."""
    if inside is None:
        here = PathFinder.find_spec(name, [os.getcwd()])
        if here is not None:
            return here
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for finder in finders if (spec := finder.find_spec(name, inside)) is not None), None)
