"""Who is timed: the contract is asked, outputs are verified on the timed inputs, work on other streams is looked for.

What declines or fails becomes a row without a number. Peak memory and saved bytes are read here too, untimed.
"""

import time
from functools import partial
from typing import Any

import torch

from rmsnorm_cli.bench.lab import Bench, Standing
from rmsnorm_cli.bench.patience import TooSlow, limited
from rmsnorm_cli.bench.programs import Check, Loop, Program, poison_free_memory, saved_bytes
from rmsnorm_cli.environment import executes_on
from rmsnorm_cli.errors import flat
from rmsnorm_cli.gates.gate import Problem, attempt
from rmsnorm_cli.kernels import CallSpec, Implementation
from rmsnorm_cli.timing.cuda import CudaClock, peak_bytes

MOST_AUDITED = 2**31  # bytes of x and y that the calls of one look for hidden work read and write, or a single call


def admit(bench: Bench, impl: Implementation) -> None:
    """Ask the contract, then compile and run a program on the first values; what declines or fails becomes a row."""
    standing = _declined(bench, impl)
    if standing is not None:
        bench.refused[impl.name] = standing
        return
    bench.lab.advance(0, f"{bench.cell.name}: first calls of {impl.name}")
    program = Program(impl, bench.buffers, bench.lab.eps)

    def run() -> None:
        # its backward in this thread, where the limit can reach it while it compiles
        with torch.autograd.set_multithreading_enabled(False):
            if "forward" in bench.lab.perimeters:
                with torch.no_grad():
                    program.body("forward")()
            if set(bench.lab.perimeters) != {"forward"}:
                program.look_for_consumed_dy()
                program.body("backward")()

    start = time.perf_counter()
    try:
        with limited(bench.lab.compile_seconds):
            _, problem = attempt(impl, run, bench.buffers.x[0])
    except TooSlow:
        text = f"its first calls, which compile it, took more than {bench.lab.compile_seconds:g} s"
        problem = Problem("error", f"{text} (bench.compile_seconds)")
    program.release()
    bench.first_calls[impl.name] = time.perf_counter() - start
    if problem is None:
        bench.programs.append(program)
    else:
        bench.refused[impl.name] = {"status": problem.status, "detail": problem.text}
        still_there(bench, impl.name, problem.text)
        free()


class DeviceLost(Exception):
    """A program broke the GPU's context: nothing in this process can be computed on it any more."""


def still_there(bench: Bench, name: str, problem: object) -> None:
    """Raise DeviceLost where the GPU no longer answers after `name` failed with `problem`."""
    if isinstance(bench.lab.clock, CudaClock) and bench.lab.clock.lost():
        text = flat(problem)[:200]
        raise DeviceLost(f"the GPU's context was lost when {name} ran ({text})")


def free() -> None:
    """Give memory that nothing holds any longer back to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _declined(bench: Bench, impl: Implementation) -> Standing | None:
    """Return why an implementation does not run on this cell at all, or None."""
    cell, lab = bench.cell, bench.lab
    if executes_on(impl, lab.device) == "interpreter":
        return {
            "status": "refused",
            "detail": "a Triton kernel's time in the interpreter says nothing about the kernel",
        }
    kind = torch.device(lab.device.torch_device).type
    spec = CallSpec((cell.M, cell.N), cell.torch_dtype, cell.torch_dtype, True, lab.eps, kind)
    reason = None if impl.accepts is None else impl.accepts(spec)
    return None if reason is None else {"status": "refused", "detail": reason}


def verified(bench: Bench, program: Program, perimeter: str, bare: dict[str, Standing]) -> Loop | None:
    """Return a program's loop once its outputs are right on the timed inputs and it hides no work, or say why not."""
    lab, impl = bench.lab, program.impl
    answers = bench.answers[impl.rounding]
    loop = Loop(program, perimeter, lab.calls, Check(answers, perimeter))
    like = [answers.inputs.x, answers.inputs.x, *([answers.inputs.gamma] if answers.inputs.gamma is not None else [])]

    def once() -> str | None:
        poison_free_memory(like)
        loop.call()
        return loop.verdict()

    wrong, problem = attempt(impl, once, bench.buffers.x[0])
    if problem is None and wrong is None and isinstance(lab.clock, CudaClock):
        calls = max(1, min(lab.calls, MOST_AUDITED // bench.cell.set_bytes))
        hidden, problem = attempt(impl, partial(lab.clock.hidden_work, loop.call, calls), bench.buffers.x[0])
        if hidden is not None:
            wrong = f"it left {hidden * 1e6:.0f} µs of work on another stream when its own was empty"
    lab.record(
        {"kind": "verification", "cell": bench.cell.name, "perimeter": perimeter, "impl": impl.name}
        | {"worst": dict(loop.check.worst), "problem": wrong or (problem.text if problem else None)}
    )
    if problem is not None:
        still_there(bench, impl.name, problem.text)
        bare[impl.name] = {"status": problem.status, "detail": problem.text}
    elif wrong is not None:
        bare[impl.name] = {"status": "failed", "detail": wrong}
    else:
        return loop
    return None


def memory(bench: Bench, loop: Loop, perimeter: str) -> dict[str, Any]:
    """Return peak bytes of one call (None on the CPU) and bytes it saves for the backward, by autograd's hooks."""
    body = loop.program.body(perimeter)
    loop.outputs = None
    device = torch.device(bench.lab.device.torch_device)
    found: dict[str, Any] = {"peak_bytes": peak_bytes(body, device) if device.type == "cuda" else None}
    if perimeter in ("forward_train", "forward_backward"):
        inputs = [bench.buffers.x[0], bench.buffers.gamma]
        forward = loop.program.body("forward_train")
        found["saved_bytes"], found["saved_bytes_beyond_inputs"] = saved_bytes(forward, inputs)
    return found
