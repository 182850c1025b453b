"""Run an implementation in a process of its own, so that a crash, a hang or an exit is a row and not the end.

The parent's side. A request and its answer are one line of JSON each on a pipe of their own (the child's stdout and
stderr go to a file), the tensors lie in files that are loaded with weights_only=True. `foreign_child.py` is the other
side. What the process isolates is the arithmetic: that saved tensors notice in-place changes, that a second
derivative is refused and the like are properties of the wrapper here, not of the implementation.
"""

import contextlib
import errno
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from rmsnorm_cli.kernels.api import BUILT_IN, Implementation, implementation
from rmsnorm_cli.kernels.foreign_common import (
    ForeignCrashed,
    ForeignFailure,
    ForeignRefused,
    ForeignTimeout,
    overwrite,
    stored,
)
from rmsnorm_cli.kernels.foreign_graph import Graph, Remote
from rmsnorm_cli.kernels.lookup import UnknownImplementation
from rmsnorm_cli.kernels.peers import PACKAGES, MissingPackage, Rounding

START_TIMEOUT = 180.0
"""Seconds that a fresh process may take to import torch and the implementation."""

MEMORY_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
MEMORY_HINT = ", as a write or read outside of its tensors does: look for a missing mask or a wrong row address"

OUTPUT_TAIL = 2000
"""How many of the last characters that a dead process printed are shown."""

OUTPUT_KEPT = 64 * 1024
"""How many of the last bytes that an implementation printed are handed on when its work is done."""

Keep = Callable[[str, bytes], object]
"""Takes a file's name and its content."""


IN_PROCESS = tuple(name for name in BUILT_IN if name not in PACKAGES)
"""The implementations that are ours or PyTorch's own; everyone else's runs apart."""


@contextlib.contextmanager
def opened(
    name: str, device: str, rounding: Rounding = "fp32", timeout: float = 60.0, keep: Keep | None = None
) -> Iterator[Implementation]:
    """Hold an implementation while the block lasts: from this process if it is in IN_PROCESS, else from one of its own.

    `keep` takes what one in its own process printed, if anything, as printed/<name>.txt.
    Raises what `implementation()` and starting a ForeignWorker raise.
    """
    if name in IN_PROCESS:
        yield implementation(name, rounding)
    else:
        with ForeignWorker(name, device, timeout, rounding, keep) as worker:
            yield worker.implementation


class ForeignWorker:
    """A context manager that holds one implementation in a process of its own.

    `name` is any that `implementation()` takes; `device` is made the current GPU of the process; `timeout` is in
    seconds, for each forward and each backward. Starting raises UnknownImplementation or MissingPackage as
    `implementation()` does. `keep` is given what it printed, at the end. `implementation` is the one to hand to
    whatever takes an Implementation; `mutated` names the inputs that the last call wrote to, which is done to the
    caller's tensors as well, as it would be in-process.
    """

    def __init__(
        self,
        name: str,
        device: str = "cpu",
        timeout: float = 60.0,
        rounding: Rounding = "fp32",
        keep: Keep | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self.timeout = timeout
        self.rounding = rounding
        self.keep = keep
        self.mutated: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # on CUDA the backward comes from the engine's own thread
        self._forgotten: list[int] = []  # graphs whose y is gone; told to the child with the next request
        self._calls = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="rmsnorm-foreign-", ignore_cleanup_errors=True)
        self._output = Path(self._folder.name) / "output.txt"
        try:
            facts = self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.implementation = Implementation(
            self.name, self.__call__, triton=facts["triton"], rounding=facts["rounding"], isolated=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
        try:
            printed = self._printed(OUTPUT_KEPT)
            if self.keep is not None and printed and kind is None:
                name = re.sub(r"[^\w.-]+", "-", self.name).strip(".-")
                self.keep(f"printed/{name}.txt", printed)
        finally:
            self._folder.cleanup()

    def __call__(self, x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
        """Run the forward there; the backward follows through autograd."""
        if torch.is_grad_enabled() and (x.requires_grad or (gamma is not None and gamma.requires_grad)):
            y: Tensor = Remote.apply(x, gamma, eps, self)
            return y
        return self.forward(x, gamma, eps, (False, False))[0]

    def forward(
        self, x: Tensor, gamma: Tensor | None, eps: float, needs: tuple[bool, bool]
    ) -> tuple[Tensor, Graph, bool]:
        """Return y, the handle of the graph kept for its backward, and whether y can be differentiated at all."""
        self._calls += 1
        graph = Graph(self, self._calls)
        inputs = {"x": x.detach(), "gamma": None if gamma is None else gamma.detach()}
        answer, tensors = self._request({"do": "forward", "graph": graph.id, "eps": float(eps), "needs": needs}, inputs)
        graph.process = self._process
        return tensors["y"], graph, answer["differentiable"]

    def backward(
        self, graph: Graph, dy: Tensor, x: Tensor, gamma: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dx and dgamma of a forward that ran in the process as it is now; None for what it does not give."""
        if graph.process is not self._process:
            raise ForeignCrashed(f"{self.name}: the process that ran this forward has ended")
        request = {"do": "backward", "graph": graph.id}
        _, tensors = self._request(request, {"dy": dy.detach()}, {"x": x.detach(), "gamma": gamma})
        return tensors["dx"], tensors["dgamma"]

    # --- the process --------------------------------------------------------------------------------------------------

    def _start(self) -> dict[str, Any]:
        request_read, self._request_fd = os.pipe()
        self._answer_fd, answer_write = os.pipe()
        self._unread = b""
        arguments = [str(request_read), str(answer_write), self.name, self.device, self.rounding, str(self.timeout)]
        program = "import sys; from rmsnorm_cli.kernels.foreign_child import serve; serve(sys.argv[1:])"
        here = str(Path(__file__).parents[2])  # the child may start where this package is not installed
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), here]))
        os.makedirs(self._folder.name, exist_ok=True)  # it may have removed that
        with self._output.open("ab") as output:
            self._begun = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(request_read, answer_write),
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # so that what it starts ends with it
            )
        os.close(request_read)
        os.close(answer_write)
        return self._answer(START_TIMEOUT, "start")

    def _kill(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        os.close(self._request_fd)
        os.close(self._answer_fd)

    def _request(
        self, request: dict[str, Any], sent: dict[str, Tensor | None], held: dict[str, Tensor | None] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        with self._lock:
            if self._process is None:
                self._start()
            question, reply = (str(Path(self._folder.name) / f"{kind}.pt") for kind in ("question", "reply"))
            try:
                stored(sent, question)
            except FileNotFoundError as problem:
                self._kill()
                raise ForeignCrashed(f"{self.name}: the folder of its questions was removed") from problem
            forget = [self._forgotten.pop() for _ in range(len(self._forgotten))]
            line = json.dumps(request | {"question": question, "reply": reply, "forget": forget})
            try:
                os.write(self._request_fd, line.encode() + b"\n")
            except BrokenPipeError:
                self._died(request["do"])
            answer = self._answer(self.timeout, request["do"])
            try:
                result = torch.load(reply, weights_only=True)
            except Exception as problem:  # whatever is in the file: it holds no answer of this process's
                raise ForeignFailure(f"{self.name}: its answer cannot be read ({type(problem).__name__})") from problem
            self.mutated = tuple(result["written"])
            ours = sent | (held or {})
            for name, contents in result["written"].items():
                overwrite(ours[name], contents)
            return answer, result

    def _answer(self, timeout: float, doing: str) -> dict[str, Any]:
        assert self._process is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            if time.monotonic() > deadline:
                self._kill()
                raise ForeignTimeout(f"{self.name}: no answer to {doing} within {timeout:g} s, so it was killed")
            if select.select([self._answer_fd], [], [], 0.1)[0]:
                piece = os.read(self._answer_fd, 65536)
                self._unread += piece
                if not piece:
                    self._died(doing)
            elif self._process.poll() is not None and not select.select([self._answer_fd], [], [], 0)[0]:
                self._died(doing)
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):  # something else of that process wrote to the pipe
            self._kill()
            raise ForeignCrashed(f"{self.name}: it wrote into the pipe of its answers, so it was ended")
        if answer.get("problem") == "machine" and answer["errno"] != errno.ENOENT:
            raise OSError(answer["errno"], answer["text"], self._folder.name)
        if "problem" in answer:
            self._raise(answer["problem"], answer["text"])
        return answer

    def _raise(self, problem: str, text: str) -> None:
        if problem == "refused":
            raise ForeignRefused(f"{self.name}: {text}")
        if problem == "wrong":
            raise ForeignFailure(f"{self.name}: {text}")
        self._kill()
        if problem == "unknown":
            raise UnknownImplementation(text)
        if problem == "missing":
            raise MissingPackage(text)
        raise ForeignCrashed(f"{self.name}: {text}")

    def _died(self, doing: str) -> None:
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:  # it closed the pipe and lives on
            code = 0
        self._kill()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        output = self._printed(OUTPUT_TAIL, self._begun).decode(errors="replace").strip()
        hint = MEMORY_HINT if -code in MEMORY_SIGNALS else ""
        raise ForeignCrashed(f"{self.name}: the process {how} during {doing}{hint}", code, output)

    def _printed(self, most: int, begin: int = 0) -> bytes:
        """Return the last bytes that were printed, not from before `begin`."""
        try:
            with self._output.open("rb") as file:
                file.seek(max(begin, os.fstat(file.fileno()).st_size - most))
                return file.read()
        except FileNotFoundError:  # it removed even that
            return b""
