"""Compile every launch of the fused kernels for GPUs that are not there, and print what came out as JSON lines.

Run in a process of its own, without the interpreter: a kernel is decorated for the one or the other once. Arguments: a
target (`sm_90`, `gfx942`, ...) and calls such as `bfloat16:16384x4096`. For each launch of the call's forward and
backward: kernel and warps, and for NVIDIA registers, spilled accesses, 16-byte accesses, stores and loads of what is to
stay in the cache, and asynchronous copies.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from rmsnorm_cli.kernels import backplan, frontplan
from rmsnorm_cli.kernels.program import MOST_WAVES, Program
from rmsnorm_cli.kernels.rowlayout import walking_order

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.uint64: "*u64",
}
ALIGNED = ("gamma_ptr", "dgamma_ptr")  # the pointers whose 16-byte alignment Triton looks at by itself
SHARED = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}  # KiB of shared memory that one program may have
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def launches(shape: tuple[int, int], dtype: torch.dtype) -> list[tuple[Program, list[torch.dtype]]]:
    """Return the programs that a forward and a backward of this shape would launch, with their pointers' dtypes."""
    seen: list[tuple[Program, list[torch.dtype]]] = []

    def record(self: Program, _grid: object, tensors: list[Tensor], _scalars: object) -> None:
        seen.append((self, [tensor.dtype for tensor in tensors]))

    Program.launch = record  # type: ignore[method-assign,assignment]
    x, dy, gamma = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype), torch.empty(shape[1], dtype=dtype)
    _, rstd, _ = frontplan.ForwardPlan(x, gamma).run(x, gamma, 1e-6)
    order = walking_order(x)
    assert order is not None
    backplan.BackwardPlan(dy, x, gamma, order, True, True).run(dy, x, gamma, rstd)
    return seen


def compiled(program: Program, dtypes: list[torch.dtype], target: GPUTarget) -> Any:
    """Compile a program for a target as Triton would at a launch with aligned tensors."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    pointers = iter(dtypes)
    for i, parameter in enumerate(program.kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
        elif parameter.name.endswith("_ptr"):
            signature[parameter.name] = TYPES[next(pointers)]
            if parameter.name in ALIGNED:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type
    options = dict(program.options)
    if target.backend == "hip":
        options.pop("launch_pdl", None)
        options.pop("maxnreg", None)
        options["num_warps"] = min(options["num_warps"], MOST_WAVES)
    constants = dict(program.constants)
    if target.backend == "hip" or target.arch < 90:
        constants |= {name: False for name in ("DEPENDENT",) if name in constants}
        options.pop("launch_pdl", None)
    source = GluonASTSource if program.kernel.is_gluon() else ASTSource
    return triton.compile(source(program.kernel, signature, constants, attributes), target=target, options=options)


def facts(kernel: Any, target: GPUTarget) -> dict[str, Any]:
    """Read registers and spills from the machine code, access widths and asynchronous copies from the PTX."""
    if target.backend == "hip":
        return {"bytes": len(kernel.asm["hsaco"])}
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def dump(flag: str) -> str:
            command = [str(TOOLS / "cuobjdump"), flag, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage, code = dump("-res-usage"), dump("-sass")
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None
    return {
        "registers": int(registers[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "vectors": len(re.findall(r"(?:ld|st)\.global[\w.:]*\.v4\.b32", ptx)),
        "kept": len(re.findall(r"st\.global[\w.:]*evict_last", ptx)),
        "staying": len(re.findall(r"ld\.global[\w.:]*evict_last", ptx)),
        "async16": len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)),
        "shared": kernel.metadata.shared,
    }


def main(target_name: str, calls: list[str]) -> None:
    """Compile what the calls launch, on an imagined card of 132 SMs."""
    frontplan.multiprocessors = backplan.multiprocessors = lambda _device: 132
    torch.cuda.get_device_capability = lambda _device=None: (9, 0)
    hip = target_name.startswith("gfx")
    target = GPUTarget("hip", target_name, 64) if hip else GPUTarget("cuda", int(target_name[3:]), 32)
    frontplan.shared_memory = lambda _device: 0 if hip else SHARED[target.arch] * 1024
    for call in calls:
        dtype, shape = call.split(":")
        M, N = (int(size) for size in shape.split("x"))
        for program, dtypes in launches((M, N), getattr(torch, dtype)):
            kernel = compiled(program, dtypes, target)
            found = {"call": call, "kernel": program.kernel.__name__, "warps": program.options["num_warps"]}
            print(json.dumps({**found, **facts(kernel, target)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
