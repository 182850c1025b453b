"""How a mistake becomes a kernel that runs: changed source and diff on disk, imported from there, wired to autograd.

Triton reads a kernel's source from the file it was imported from, so the changed file must stay while it runs.
"""

import difflib
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rmsnorm_cli.faults.fault import Fault
from rmsnorm_cli.rundir import atomic

if TYPE_CHECKING:
    from rmsnorm_cli.kernels.api import Implementation

FOLDER = "faults"  # in a run directory
DIFF = "change.diff"
_numbers = itertools.count(1)  # one module name for each import: a second run of a mistake starts afresh


def original(fault: Fault) -> str:
    """Return the source that a mistake changes."""
    found = importlib.util.find_spec("rmsnorm_cli.kernels")
    assert found is not None
    assert found.submodule_search_locations
    return (Path(found.submodule_search_locations[0]) / fault.file).read_text(encoding="utf-8")


def diff(fault: Fault) -> str:
    """Return the change as a unified diff; FaultNotApplicable if the source has moved on."""
    before = original(fault)
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        fault.applied(before).splitlines(keepends=True),
        f"a/{fault.file}",
        f"b/{fault.file}",
        n=1,
    )
    return "".join(lines)


def write(fault: Fault, directory: Path) -> Path:
    """Write changed source and diff into `directory`/faults/<name>/ and return the source's path."""
    path = place(fault, directory)
    changed, difference = fault.applied(original(fault)), diff(fault)
    with atomic.explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path.with_name(DIFF), difference)
    atomic.write(path, changed)
    return path


def place(fault: Fault, directory: Path) -> Path:
    """Return where the changed source lies in a run directory."""
    return directory / FOLDER / fault.name / fault.file


def load(path: Path) -> ModuleType:
    """Import a changed source from where it lies, under a module name of its own."""
    name = f"rmsnorm_fault_{path.parent.name.replace('-', '_')}_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and Triton look a module up by its name
    spec.loader.exec_module(module)
    return module


def implementation(fault: Fault, directory: Path, name: str = "") -> "Implementation":
    """Return `rowwise` with the mistake in it; its source lies in `directory`/faults/<name of the mistake>/.

    It is named after the mistake, or `name`: a gate that knows what `rowwise` must refuse asks by name. Call it after a
    device has been chosen. Raises FaultNotApplicable if the source has moved on.
    """
    return wired(fault, load(write(fault, directory)), name or fault.name)


def wired(fault: Fault, module: ModuleType, name: str) -> "Implementation":
    """Return the implementation that a changed module makes, with the other file as it is."""
    from dataclasses import replace

    from rmsnorm_cli.kernels import autograd, from_pair
    from rmsnorm_cli.kernels.api import ROWWISE
    from rmsnorm_cli.kernels.contract import rowwise_refusal

    if fault.file == "rowwise.py":
        pair = replace(ROWWISE, name=name, forward=module.forward, backward=module.backward)
        return from_pair(pair, rowwise_refusal)
    module.count = autograd.count  # type: ignore[attr-defined]  # calls are counted where `counters()` looks
    pair = module.KernelPair(name, ROWWISE.forward, ROWWISE.backward)
    return replace(from_pair(ROWWISE, rowwise_refusal), name=name, call=module.differentiable(pair))
