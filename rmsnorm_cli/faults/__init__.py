"""The catalogue of mistakes: each a change of one or two expressions in the kernel's own source.

In reading order: `fault` says what a mistake is; `forward`, `scaling`, `rounding`, `dx`, `dgamma`, `wiring`, `memory`
hold those of `rowwise`, `analogues`, `tiling`, `sharing`, `launching` those of `fused`, and `equivalent` the changes
that are none; `predict` and `examples` serve them; `apply` makes them run, in a `shadow` of the kernels' package.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.faults import (
    analogues,
    apply,
    dgamma,
    dx,
    equivalent,
    forward,
    launching,
    memory,
    rounding,
    scaling,
    sharing,
    tiling,
    wiring,
)
from rmsnorm_cli.faults.fault import KERNELS, STAGES, Change, Fault, FaultNotApplicable

if TYPE_CHECKING:
    from rmsnorm_cli.kernels.api import Implementation

__all__ = ["CATALOGUE", "DEFAULT", "KERNELS", "Change", "Fault", "FaultNotApplicable", "find", "implementation"]

_OF_ROWWISE = (forward, scaling, rounding, dx, dgamma, wiring, memory)
_OF_FUSED = (analogues, tiling, sharing, launching)
CATALOGUE: tuple[Fault, ...] = tuple(
    sorted(
        (fault for module in (*_OF_ROWWISE, *_OF_FUSED, equivalent) for fault in module.FAULTS),
        key=lambda fault: (KERNELS.index(fault.kernel), STAGES.index(fault.stage)),
    )
)
DEFAULT = "divide-by-block"


def find(name: str) -> Fault:
    """Return a mistake by its name; ConfigError, with the nearest name, where there is none."""
    for fault in CATALOGUE:
        if fault.name == name:
            return fault
    near = get_close_matches(name.lower().replace("_", "-"), [fault.name for fault in CATALOGUE], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"fault: {name!r} is not in the catalogue (rmsnorm exercise --list shows it){hint}")


def implementation(name: str, directory: Path) -> "Implementation":
    """Return a kernel with a mistake in it; changed source and diff are written to `directory`/faults/<name>/.

    Call it after a device has been chosen. Raises ConfigError for an unknown name, FaultNotApplicable if the kernel's
    source no longer holds what the mistake changes.
    """
    return apply.implementation(find(name), directory)
