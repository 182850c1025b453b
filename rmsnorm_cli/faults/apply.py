"""How a mistake becomes a kernel that runs: changed source and diff on disk, imported from there, wired to autograd.

Triton reads a kernel's source from the file it was imported from, so the changed file must stay while it runs.
"""

import difflib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rmsnorm_cli.faults import shadow
from rmsnorm_cli.faults.fault import Fault
from rmsnorm_cli.rundir import atomic

if TYPE_CHECKING:
    from rmsnorm_cli.kernels.api import Implementation

FOLDER = "faults"  # in a run directory
DIFF = "change.diff"


def original(fault: Fault) -> str:
    """Return the source that a mistake changes."""
    return (shadow.folder() / fault.file).read_text(encoding="utf-8")


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


def load(fault: Fault, directory: Path) -> ModuleType:
    """Import the launcher that runs a changed source from where `write` has put it; each import starts afresh."""
    return shadow.load(place(fault, directory), fault.launcher)


def implementation(fault: Fault, directory: Path, name: str = "") -> "Implementation":
    """Return the kernel with the mistake in it; its source lies in `directory`/faults/<name of the mistake>/.

    It is named after the mistake, or `name`: a gate that knows what a kernel must refuse asks by name. Call it after a
    device has been chosen. Raises FaultNotApplicable if the source has moved on.
    """
    write(fault, directory)
    return wired(fault, load(fault, directory), name or fault.name)


def wired(fault: Fault, module: ModuleType, name: str) -> "Implementation":
    """Return the implementation that a launcher's module makes, with everything else as it is."""
    from dataclasses import replace

    from rmsnorm_cli.kernels import autograd, from_pair
    from rmsnorm_cli.kernels.api import FUSED, ROWWISE
    from rmsnorm_cli.kernels.contract import fused_refusal, rowwise_refusal

    pair, refusal = (FUSED, fused_refusal) if fault.kernel == "fused" else (ROWWISE, rowwise_refusal)
    if fault.launcher != "autograd":
        # Without its operator, which is registered once and runs the kernels as they are.
        return from_pair(replace(pair, name=name, forward=module.forward, backward=module.backward, op=None), refusal)
    module.count = autograd.count  # type: ignore[attr-defined]  # calls are counted where `counters()` looks
    changed = module.KernelPair(name, pair.forward, pair.backward)
    return replace(from_pair(pair, refusal), name=name, call=module.differentiable(changed))
