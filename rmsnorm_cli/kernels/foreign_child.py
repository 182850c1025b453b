"""The other side of `foreign.py`: the process that holds one implementation and answers its parent's requests."""

import faulthandler
import json
import os
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor

from rmsnorm_cli.kernels.api import ROUNDINGS, Implementation, implementation
from rmsnorm_cli.kernels.lookup import UnknownImplementation, one_line
from rmsnorm_cli.kernels.peers import MissingPackage

ORPHAN_GRACE = 10.0
"""Seconds past the parent's own time limit after which a hanging process ends itself: its parent must be gone."""


class WrongAnswer(TypeError):
    """The implementation returned something that is not a tensor."""


def serve(arguments: list[str]) -> None:
    """Load the implementation, answer that it is there, then answer requests until the parent closes the pipe."""
    request_fd, answer_fd = int(arguments[0]), int(arguments[1])
    name, device, rounding, timeout = arguments[2:]
    for fd in (request_fd, answer_fd):
        os.set_inheritable(fd, False)  # what the implementation starts must not hold the pipe open
    faulthandler.enable()
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        impl = implementation(name, next(known for known in ROUNDINGS if known == rounding))
    except UnknownImplementation as problem:
        _leave(answer_fd, "unknown", str(problem))
    except MissingPackage as problem:
        _leave(answer_fd, "missing", str(problem))
    _answer(answer_fd, {"triton": impl.triton, "rounding": impl.rounding})
    graphs: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
    with os.fdopen(request_fd, "rb") as requests:
        for line in requests:
            request = json.loads(line)
            for number in request["forget"]:
                graphs.pop(number, None)
            faulthandler.dump_traceback_later(float(timeout) + ORPHAN_GRACE, exit=True)
            tensors = torch.load(request["question"], weights_only=True)  # each to the device it had
            try:
                answer, result = _run(impl, request, tensors, graphs)
            except Exception as problem:
                answer, result = {"problem": _verdict(problem), "text": one_line(problem)}, {}
            torch.save(result, request["reply"])
            faulthandler.cancel_dump_traceback_later()
            _answer(answer_fd, answer)


def _verdict(problem: Exception) -> str:
    """Say whether an exception declines this one input, or means something worse."""
    if isinstance(problem, WrongAnswer):
        return "wrong"
    # After a fault on the GPU the context of this process is lost, whatever it is asked next.
    return "crashed" if "CUDA error" in str(problem) else "refused"


def _run(
    impl: Implementation, request: dict[str, Any], tensors: dict[str, Any], graphs: dict[int, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    if request["do"] == "forward":
        run, watched = _forward, tensors
    else:
        run, watched = _backward, tensors | dict(zip(("x", "gamma"), graphs[request["graph"]][1:], strict=True))
    before = {name: _contents(tensor).clone() for name, tensor in watched.items() if tensor is not None}
    answer, result = run(impl, request, tensors, graphs)
    if tensors["x" if "x" in tensors else "dy"].is_cuda:
        torch.cuda.synchronize()  # a fault of this request must not show in the next one
    now = {name: _contents(watched[name]) for name in before}
    result["written"] = {name: now[name].clone() for name in before if not torch.equal(before[name], now[name])}
    return answer, result


def _forward(
    impl: Implementation, request: dict[str, Any], tensors: dict[str, Any], graphs: dict[int, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    x, gamma = tensors["x"], tensors["gamma"]
    for tensor, needed in zip((x, gamma), request["needs"], strict=True):
        if needed:
            tensor.requires_grad_()
    with torch.set_grad_enabled(any(request["needs"])):
        y = impl.call(x, gamma, request["eps"])
    if not isinstance(y, Tensor):
        raise WrongAnswer(f"it returned a {type(y).__name__}, not a tensor")
    if y.requires_grad:
        graphs[request["graph"]] = (y, x, gamma)
    return {"differentiable": y.requires_grad}, {"y": y.detach()}


def _backward(
    impl: Implementation, request: dict[str, Any], tensors: dict[str, Any], graphs: dict[int, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    y, x, gamma = graphs[request["graph"]]
    wanted = {"dx": x, "dgamma": gamma}
    wanted = {name: leaf for name, leaf in wanted.items() if leaf is not None and leaf.requires_grad}
    found = torch.autograd.grad(y, list(wanted.values()), tensors["dy"], retain_graph=True, allow_unused=True)
    return {}, {"dx": None, "dgamma": None} | dict(zip(wanted, found, strict=True))


def _contents(tensor: Tensor) -> Tensor:
    """Return the bytes of all the memory behind a tensor, what lies around a slice included."""
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _answer(fd: int, answer: dict[str, Any]) -> None:
    line = json.dumps(answer).encode() + b"\n"
    while line:
        line = line[os.write(fd, line) :]


def _leave(fd: int, problem: str, text: str) -> NoReturn:
    _answer(fd, {"problem": problem, "text": text})
    sys.exit(1)
