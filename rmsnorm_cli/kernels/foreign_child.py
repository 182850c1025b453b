"""The other side of `foreign.py`: the process that holds one implementation and answers its parent's requests."""

import contextlib
import faulthandler
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from rmsnorm_cli.kernels.api import ROUNDINGS, Implementation, implementation
from rmsnorm_cli.kernels.foreign_common import stored
from rmsnorm_cli.kernels.lookup import UnknownImplementation, one_line
from rmsnorm_cli.kernels.peers import MissingPackage

ORPHAN_GRACE = 10.0
"""Seconds past the parent's own time limit after which a hanging process ends itself: its parent must be gone."""


KEPT = 64 * 1024 * 1024
"""Bytes of a result up to which it is watched during the next request."""

LIMITS = ("MemoryError", "OutOfMemoryError", "FailOnRecompileLimitHit")
"""Exceptions that say nothing of an input: the machine's memory or a compiler's patience was at its end."""

Graphs = dict[int, tuple[Tensor, Tensor, Tensor | None]]


class WrongAnswer(TypeError):
    """The implementation returned no plain tensor, or did something that no caller of a norm expects."""


def serve(arguments: list[str]) -> None:
    """Load the implementation, answer that it is there, then answer requests until the parent closes the pipe."""
    request_fd, answer_fd = int(arguments[0]), int(arguments[1])
    name, device, rounding, timeout = arguments[2:]
    for fd in (request_fd, answer_fd):
        os.set_inheritable(fd, False)  # what the implementation starts must not hold the pipe open
    faulthandler.enable()
    keep_buffers()
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        impl = implementation(name, next(known for known in ROUNDINGS if known == rounding))
    except UnknownImplementation as problem:
        _leave(answer_fd, "unknown", str(problem))
    except MissingPackage as problem:
        _leave(answer_fd, "missing", str(problem))
    _answer(answer_fd, {"triton": impl.triton, "rounding": impl.rounding})
    graphs: Graphs = {}
    watch = Watch()
    own = os.getpid()
    with os.fdopen(request_fd, "rb") as requests:
        for line in requests:
            request = json.loads(line)
            for number in request["forget"]:
                graphs.pop(number, None)
            faulthandler.dump_traceback_later(float(timeout) + ORPHAN_GRACE, exit=True)
            tensors = torch.load(request["question"], weights_only=True)  # each to the device it had
            try:
                with watch.over_settings():
                    answer, result = _run(impl, request, tensors, graphs)
                watch.results(result)
            except SystemExit:
                raise
            except BaseException as problem:
                answer, result = {"problem": _verdict(problem), "text": one_line(problem)}, {}
            if os.getpid() != own:  # a copy of this process that the implementation made: it has nobody to answer
                os._exit(0)
            try:
                stored(result, request["reply"])
            except OSError as problem:
                answer = {"problem": "machine", "text": str(problem.strerror), "errno": problem.errno}
            faulthandler.cancel_dump_traceback_later()
            _answer(answer_fd, answer)


def keep_buffers() -> None:
    """Let a compiled function's graph be differentiated twice, since it is not known here whether the caller will."""
    from torch._functorch import config

    if hasattr(config, "donated_buffer"):  # from PyTorch 2.6 on
        config.donated_buffer = False


class Watch:
    """What a norm must leave alone: results of its earlier calls, and settings of the process that others rely on."""

    def __init__(self) -> None:
        self._results: dict[str, tuple[Tensor, Tensor]] = {}

    @contextlib.contextmanager
    def over_settings(self) -> Iterator[None]:
        """Raise WrongAnswer where the block changes a setting, also where it raises; an exit stays one."""
        before = _settings()
        try:
            yield
        except Exception:
            self._unchanged(before)
            raise
        self._unchanged(before)

    def _unchanged(self, before: dict[str, Any]) -> None:
        changed = [name for name, value in _settings().items() if before[name] not in (None, value)]
        if changed:
            raise WrongAnswer(f"it changed {' and '.join(changed)} for the whole process: put back what you change")

    def results(self, result: dict[str, Any]) -> None:
        """Raise WrongAnswer where the call wrote to the results of the one before; keep its own in their place."""
        for name, (tensor, copy) in self._results.items():
            if not torch.equal(_contents(tensor), copy):
                self._results = {}
                raise WrongAnswer(
                    f"it wrote to {name} of the call before, which may be in use still: return new memory each time"
                )
        found = {name: value for name, value in result.items() if isinstance(value, Tensor)}
        small = {name: t for name, t in found.items() if t.is_cpu or t.is_cuda if _contents(t).numel() <= KEPT}
        self._results = {name: (tensor, _contents(tensor).clone()) for name, tensor in small.items()}


def _settings() -> dict[str, Any]:
    """Return what other code of a process relies on, by name; None for what is not there yet."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    folder = os.stat(".")  # its name may be gone
    return {
        "the state of torch's generator": torch.get_rng_state().tolist(),
        "the state of the GPU's generator": torch.cuda.get_rng_state().tolist() if on_gpu else None,
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's number of threads": torch.get_num_threads(),
        "the current GPU": torch.cuda.current_device() if on_gpu else None,
        "the current folder": (folder.st_dev, folder.st_ino),
    }


def _verdict(problem: BaseException) -> str:
    """Say whether an exception declines this one input, or means something worse."""
    if isinstance(problem, WrongAnswer) or any(kind.__name__ in LIMITS for kind in type(problem).__mro__):
        return "wrong"
    if not isinstance(problem, Exception):  # in the caller's own process it would have ended that
        return "crashed"
    # After a fault on the GPU the context of this process is lost, whatever it is asked next.
    return "crashed" if "CUDA error" in one_line(problem) else "refused"


def _run(
    impl: Implementation, request: dict[str, Any], tensors: dict[str, Any], graphs: Graphs
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
    impl: Implementation, request: dict[str, Any], tensors: dict[str, Any], graphs: Graphs
) -> tuple[dict[str, Any], dict[str, Any]]:
    x, gamma = tensors["x"], tensors["gamma"]
    for tensor, needed in zip((x, gamma), request["needs"], strict=True):
        if needed:
            tensor.requires_grad_()
    with torch.set_grad_enabled(any(request["needs"])):
        y = impl.call(x, gamma, request["eps"])
    plain = _plain("it returned", y)
    if y.requires_grad:
        graphs[request["graph"]] = (y, x, gamma)
    return {"differentiable": y.requires_grad}, {"y": plain}


def _backward(
    impl: Implementation, request: dict[str, Any], tensors: dict[str, Any], graphs: Graphs
) -> tuple[dict[str, Any], dict[str, Any]]:
    y, x, gamma = graphs[request["graph"]]
    leaves = {"dx": x, "dgamma": gamma}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    found = torch.autograd.grad(y, list(wanted.values()), tensors["dy"], retain_graph=True, allow_unused=True)
    got = {name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None}
    return {}, {"dx": None, "dgamma": None} | {name: _plain(f"its {name} is", value) for name, value in got.items()}


def _plain(what: str, value: Any) -> Tensor:
    """Return a result without its graph, its sign in its memory; raise WrongAnswer where its numbers cannot be judged.

    Those are the numbers of anything but a dense tensor of PyTorch's own class.
    """
    kind = type(value)
    if not isinstance(value, Tensor):
        raise WrongAnswer(f"{what} a {kind.__name__}, not a tensor")
    if kind not in (Tensor, torch.nn.Parameter):
        raise WrongAnswer(f"{what} a {kind.__name__}, a subclass of torch.Tensor: return a plain tensor")
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        odd = "nested" if value.is_nested else "quantized" if value.is_quantized else f"{value.layout}"
        raise WrongAnswer(f"{what} a tensor that is {odd}: return a dense one, torch.strided")
    return value.detach().resolve_conj().resolve_neg()


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
