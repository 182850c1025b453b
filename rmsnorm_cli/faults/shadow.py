"""The kernels package with one file replaced: whatever lies between that file and a launcher is imported anew.

A changed `tiles.py` must be the one that `forward.py` imports, and that one the one that `frontplan.py` imports, up to
the launcher. Everything that does not lead to the changed file stays the module in use: calls are counted where
`counters()` looks, and a refusal is the ContractError that everybody knows.

On a card some rows take kernels written in Gluon, which the interpreter cannot run and whose source no mistake of the
catalogue changes. In the modules imported anew those paths are closed, so that a mistake is run wherever rows lie.
"""

import ast
import functools
import importlib
import importlib.util
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

PACKAGE = "rmsnorm_cli.kernels"
CLOSED = ("takes_ring", "takes_unaligned")  # the questions whose answer opens a path in Gluon
_numbers = itertools.count(1)  # one name for each import: a second run of a mistake starts afresh
_one_at_a_time = threading.RLock()  # while modules stand in for others nobody else may import


def folder() -> Path:
    """Return where the kernels' source lies; nothing of it is imported."""
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def load(path: Path, launcher: str) -> ModuleType:
    """Import a changed file from where it lies, and return the launcher's module that runs with it.

    `path` has the name of the file that it replaces; `launcher` is the name of a module that imports it, at whatever
    remove, or that is it.
    """
    number = next(_numbers)
    changed = path.stem
    with _one_at_a_time, _standing_in() as stand_in:
        made = {}
        for name in between(changed, launcher):
            source = path if name == changed else folder() / f"{name}.py"
            made[name] = _executed(source, f"rmsnorm_fault_{path.parent.name.replace('-', '_')}_{number}_{name}")
            for question in CLOSED:
                if hasattr(made[name], question):
                    setattr(made[name], question, lambda *_, **__: False)
            stand_in(name, made[name])
    return made[launcher]


def between(changed: str, launcher: str) -> list[str]:
    """Return the modules that lead from the changed one to the launcher, each behind those of them that it imports."""
    imports, ordered = _imports(), list[str]()

    def leads(name: str) -> bool:
        """Tell whether a module is the changed one or imports it at any remove, and place it in order if so."""
        if name in ordered:
            return True
        found = [leads(other) for other in imports.get(name, ())]  # all of them, so that each finds its place
        if name == changed or any(found):
            ordered.append(name)
            return True
        return False

    if not leads(launcher):
        raise ValueError(f"{launcher}.py does not import {changed}.py: a change of the one cannot show in the other")
    return ordered


@functools.cache
def _imports() -> dict[str, list[str]]:
    """Return, for each module of the package, the names of those that it imports."""
    return {path.stem: _imported(path) for path in sorted(folder().glob("*.py"))}


def _imported(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            found.append(str(node.module).removeprefix(f"{PACKAGE}."))
    return found


@contextmanager
def _standing_in() -> Iterator[Callable[[str, ModuleType], None]]:
    """Let modules take the place of others of the package, for imports made meanwhile; afterwards all is as it was."""
    package = importlib.import_module(PACKAGE)
    modules = {name: module for name, module in sys.modules.items() if name.startswith(f"{PACKAGE}.")}
    attributes = dict(vars(package))

    def stand_in(name: str, module: ModuleType) -> None:
        sys.modules[f"{PACKAGE}.{name}"] = module
        setattr(package, name, module)  # `from package import module` looks here first

    try:
        yield stand_in
    finally:
        sys.modules.update(modules)
        vars(package).update(attributes)


def _executed(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and Triton look a module up by its name
    spec.loader.exec_module(module)
    return module
