"""Compile mistakes that a GPU alone can show for a GPU that is not there; print the names of those that compile.

Run in a process of its own, without the interpreter: a kernel is decorated for the one or the other once. Arguments: a
folder for the changed sources, then names of mistakes in `split.py` or `tiles.py`.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

from rmsnorm_cli import faults
from rmsnorm_cli.faults import apply

HOPPER = GPUTarget("cuda", 90, 32)


def helpers():
    """Return the module that finds the launches of a call and compiles them for a target."""
    path = Path(__file__).parents[1] / "kernels" / "compile_targets.py"
    spec = importlib.util.spec_from_file_location("compile_targets", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(folder: Path, names: list[str]) -> None:
    """Compile one launch of each mistake that holds the changed expression."""
    targets = helpers()
    torch.cuda.get_device_capability = lambda _device=None: (9, 0)
    for name in names:
        fault = faults.find(name)
        apply.write(fault, folder)
        module = apply.load(fault, folder)
        front, back = (sys.modules[plan.__module__] for plan in (module.ForwardPlan, module.BackwardPlan))
        front.multiprocessors = back.multiprocessors = lambda _device: 132
        targets.frontplan, targets.backplan = front, back
        case = fault.exposing
        seen = targets.launches((case.M, case.N), getattr(torch, case.dtype))
        program, dtypes = seen[0] if fault.stage != "dgamma" else seen[1]
        targets.compiled(program, dtypes, HOPPER)
        print(name, program.kernel.__name__, program.kernel.fn.__code__.co_filename, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
