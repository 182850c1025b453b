"""Every launch path once, small, for compute-sanitizer: `compute-sanitizer --tool memcheck python sanitized.py [word]`.

Set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of its own, whose ends the tool knows. Inputs
are made on the CPU and copied, so that nearly all kernels seen are ours. A word runs only the calls whose line holds
it. Each line names the paths that ran; without a word all must have run.

`planted` in place of a word runs two mistakes instead, which memcheck and initcheck must report: a tool that is silent
about them says nothing by being silent about the rest.

The tools: memcheck (addresses), initcheck (memory read before it was written), racecheck (shared memory between the
threads of a block), synccheck (barriers).
"""

import sys
from collections import Counter

import torch
import triton
import triton.language as tl

from rmsnorm_cli.kernels import fused, rms_norm
from rmsnorm_cli.kernels.contract import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"

CALLS = [
    ("tiles of rows", "float32", 5, 256, "xg"),
    ("tiles of rows", "float16", 300, 96, "xg"),
    ("few odd rows", "float16", 17, 257, "xg"),
    ("odd rows", "float16", 300, 257, "xg"),
    ("odd rows", "float16", 700, 771, "xg"),
    ("odd rows", "bfloat16", 300, 4099, "x"),
    ("odd rows", "float32", 300, 769, "xg"),
    ("odd rows", "float32", 1100, 67, "g"),
    ("odd rows, read again", "bfloat16", 300, 12289, "xg"),
    ("one row a program", "bfloat16", 300, 4096, "xg"),
    ("one row a program", "float32", 300, 2048, "xg"),
    ("two tiles", "bfloat16", 270, 5120, "xg"),
    ("two tiles, x stays", "bfloat16", 430, 5120, "xg"),
    ("many rows, x stays", "float32", 4100, 257, "xg"),
    ("only dx", "bfloat16", 300, 1000, "x"),
    ("only dgamma", "bfloat16", 300, 1000, "g"),
    ("no gamma", "bfloat16", 5, 1000, "x-"),
    ("ring", "bfloat16", 5, 16384, "xg"),
    ("ring", "bfloat16", 300, 12304, "xg"),
    ("ring, shared rows", "bfloat16", 7, 32768, "xg"),
    ("ring, shared rows", "bfloat16", 5, 24000, "xg"),
    ("ring, shared rows", "float32", 5, 20480, "xg"),
    ("ring, a row more of some pieces", "bfloat16", 400, 20480, "xg"),
    ("ring, two programs on an SM", "bfloat16", 97, 131072, "xg"),
    ("ring forward, one program a row", "bfloat16", 300, 40000, "xg"),
    ("read twice", "float32", 5, 16380, "xg"),
    ("read twice forward", "bfloat16", 3, 60000, "xg"),
    ("shared rows", "bfloat16", 7, 32772, "xg"),
    ("shared rows", "bfloat16", 5, 24004, "xg"),
    ("shared rows", "float32", 5, 20482, "xg"),
    ("shared rows forward", "bfloat16", 5, 131076, "xg"),
    ("by chunks", "float64", 9, 9000, "xg"),
    ("by chunks", "bfloat16", 5, 32768, "g"),
    ("teaching kernel", "float32", 17, 257, "xg"),
]

PATHS = {f"forward/{path}" for path in ("rows", "reload", "ring", "unaligned", "shared", "loop")} | {
    f"backward/{path}" for path in ("small", "walk", "reload", "ring", "unaligned", "shared", "chunks")
}


def call(impl: str, dtype: str, M: int, N: int, wanted: str) -> None:
    """Run forward and backward, with the gradients that `wanted` names; all results must be finite."""
    kind = getattr(torch, dtype)
    x, dy = (torch.randn(M, N).to(kind).to(DEVICE) for _ in range(2))
    gamma = None if "-" in wanted else torch.randn(N).to(kind).to(DEVICE).requires_grad_("g" in wanted)
    y = rms_norm(x.requires_grad_("x" in wanted), gamma, impl=impl)
    y.backward(dy)
    results = [y, *(leaf.grad for leaf in (x, gamma) if leaf is not None and leaf.requires_grad)]
    assert all(bool(result.detach().cpu().isfinite().all()) for result in results)


@triton.jit
def copy_kernel(source_ptr, target_ptr, start):
    """Copy one number: from memory that nobody wrote, or to the address behind the end."""
    tl.store(target_ptr + start, tl.load(source_ptr))


def planted() -> None:
    """Read what was never written (initcheck), then write behind an allocation (memcheck)."""
    if INTERPRETED:
        sys.exit("the planted mistakes are for a GPU under compute-sanitizer")
    unwritten, target = torch.empty(256, device=DEVICE), torch.zeros(256, device=DEVICE)
    copy_kernel[(1,)](unwritten, target, 0)
    copy_kernel[(1,)](target, target, 2**20)
    torch.cuda.synchronize()


def main() -> None:
    """Run the calls and say which paths they took."""
    if sys.argv[1:] == ["planted"]:
        planted()
        return
    torch.manual_seed(0)
    word, ran = " ".join(sys.argv[1:]), Counter()
    for name, *asked in CALLS:
        line = " ".join([name, *map(str, asked)])
        if word not in line:
            continue
        fused.reset_launched()
        call("rowwise" if name == "teaching kernel" else "fused", *asked)
        print(f"{line}: {', '.join(fused.launched()) or 'rowwise'}", flush=True)
        ran.update(fused.launched())
    missing = PATHS - ran.keys()
    if word or INTERPRETED:
        print(f"not run: {', '.join(sorted(missing)) or 'none'}")
    elif missing:
        sys.exit(f"no call took {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
