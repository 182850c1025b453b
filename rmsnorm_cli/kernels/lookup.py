"""Anyone's f(x, gamma, eps) -> y, found by the name of its module or file."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class UnknownImplementation(ValueError):
    """No implementation, module, file or callable has the name that was asked for."""


def load_callable(name: str) -> Callable[..., Any]:
    """Import `package.module:callable` or `path/file.py:callable` and return the callable (a dotted one too).

    The current folder is put first on sys.path, where a console script does not have it. This runs the module's code
    in this process. Raises UnknownImplementation for what is not there, is not callable, or fails at import.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise UnknownImplementation(f"{name!r} is not of the form package.module:callable or path/file.py:callable")
    found: Any = _load_file(name, Path(where)) if where.endswith(".py") else _load_module(name, where)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UnknownImplementation(f"{name!r}: {where} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UnknownImplementation(f"{name!r} is a {type(found).__name__}, not something to call")
    return found  # type: ignore[no-any-return]


def _current_folder_first() -> None:
    folder = os.getcwd()
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


def _load_module(name: str, module: str) -> ModuleType:
    _current_folder_first()
    importlib.invalidate_caches()  # the module may be younger than the listing of its folder
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as problem:
        raise UnknownImplementation(f"{name!r}: importing {module} failed: {one_line(problem)}") from problem


def _load_file(name: str, path: Path) -> ModuleType:
    _current_folder_first()
    if not path.is_file():
        raise UnknownImplementation(f"{name!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"rmsnorm_foreign_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UnknownImplementation(f"{name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and Triton look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise UnknownImplementation(f"{name!r}: running {path} failed: {one_line(problem)}") from problem
    return module


def one_line(problem: BaseException) -> str:
    """Return an exception's class and message as one line for a report."""
    try:
        text = " ".join(str(problem).split())
    except Exception:  # a stranger's class may fail at this too
        text = ""
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
