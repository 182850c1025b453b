"""What the tests of training share: small runs in real run directories, mistakes to plant, and ways to stop them."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rmsnorm_cli import checkpoint, config
from rmsnorm_cli.commands import train
from rmsnorm_cli.console import Console
from rmsnorm_cli.environment import Device
from rmsnorm_cli.kernels import Implementation, reference
from rmsnorm_cli.results import Outcome
from rmsnorm_cli.rundir import run
from rmsnorm_cli.training import loop

CPU = Device("interpreter", "interpreter", "cpu", "CPU")
SMALL = {
    "data.train": 40,
    "data.validation": 12,
    "data.test": 12,
    "train.width": 33,
    "train.batch": 8,
    "train.steps": 12,
    "train.twins": 1,
    "train.seed_noise_runs": 1,
    "train.checkpoint_every": 4,
    "train.validate_every": 3,
    "run.seed": 5,
}


class Halt(BaseException):
    """Ends a run as a kill does: nothing of the program's gets to act on it."""


@dataclass
class Trainer:
    """Starts and continues small runs in one folder."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    device: Device = CPU

    def settings(self, **options: Any) -> config.Settings:
        """Return small settings; `train__steps=3` sets train.steps."""
        given = {key.replace("__", "."): value for key, value in options.items()}
        return config.load("train", options=SMALL | {"run.dir": str(self.folder)} | given)

    def start(self, implementation: Implementation | None = None, **options: Any) -> tuple[Path, Outcome]:
        """Train from the start in a new run directory."""
        settings = self.settings(**options)
        with run.open_run(settings, ["rmsnorm", "train"], self.device, {}) as opened:
            self.newest = opened.dir
            outcome = train.run(settings, opened, Console(quiet=True), self.device, implementation or right())
            opened.finish(outcome)
        return opened.dir, outcome

    def resume(self, directory: Path, implementation: Implementation | None = None, **train_keys: Any) -> Outcome:
        """Continue a run with its recorded settings, but for `train_keys`."""
        with run.reopen(directory, self.settings(), ["rmsnorm", "train"], self.device, {}) as opened:
            table = opened.settings.train.model_copy(update=train_keys)
            settings = replace(opened.settings, table=table)
            outcome = train.run(settings, opened, Console(quiet=True), self.device, implementation or right())
            opened.finish(outcome)
        return outcome

    @contextmanager
    def at(self, key: str, step: int, act: Callable[[loop.Training], object]) -> Iterator[None]:
        """Let something happen just before a step (counted from 1) of a phase."""
        advance = loop.Training.advance

        def watched(training: loop.Training) -> dict[str, float]:
            if training.phase.key == key and training.step + 1 == step:
                act(training)
            return advance(training)

        with self.monkeypatch.context() as patched:
            patched.setattr(loop.Training, "advance", watched)
            yield

    def killed(self, key: str, step: int, implementation: Implementation | None = None, **options: Any) -> Path:
        """Start a run that ends, as by a kill, just before a step of a phase; return its directory."""
        with self.at(key, step, halt), pytest.raises(Halt):
            self.start(implementation, **options)
        return self.newest

    def killed_again(self, directory: Path, key: str, step: int) -> None:
        """Continue a run that ends, as by a kill, just before a step of a phase."""
        with self.at(key, step, halt), pytest.raises(Halt):
            self.resume(directory)

    def signalled(self, key: str, step: int, number: int) -> AbstractContextManager[None]:
        """Send this process a signal just before a step of a phase."""
        return self.at(key, step, lambda training: signal.raise_signal(number))


def halt(training: loop.Training) -> None:
    raise Halt


@pytest.fixture(scope="session", autouse=True)
def swift_disk() -> Iterator[None]:
    """Spare the disk: that bytes are flushed before a name is given is the matter of the tests of checkpoints."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    return Trainer(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Return the options of a small run."""
    return dict(SMALL)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Return the directory and outcome of an uninterrupted small run; nobody may change it."""
    with pytest.MonkeyPatch.context() as patched:
        return Trainer(tmp_path_factory.mktemp("whole"), patched).start()


# --- norms, right and wrong -------------------------------------------------------------------------------------------

Forward = Callable[[Tensor, Tensor, float], Tensor]
Backward = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


class Pair(torch.autograd.Function):
    """A forward and an explicit backward, wired to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float, forward: Forward, backward: Backward) -> Tensor:
        """Run the forward and keep the backward."""
        ctx.save_for_backward(x, gamma)
        ctx.rest = eps, backward
        return forward(x, gamma, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Run the explicit backward."""
        eps, backward = ctx.rest
        return *backward(dy, *ctx.saved_tensors, eps), None, None, None


def pair(name: str, forward: Forward = reference.forward, backward: Backward = reference.backward) -> Implementation:
    return Implementation(name, lambda x, gamma, eps: Pair.apply(x, gamma, eps, forward, backward))


def right() -> Implementation:
    """Return a right norm of another order of operations than the reference's."""

    def forward(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        return (x * gamma) * torch.rsqrt(x.square().flip(-1).sum(-1, keepdim=True) / x.shape[-1] + eps)

    return pair("right", forward)


def padded_denominator() -> Implementation:
    """Return one that divides the sum of squares by the padded block."""

    def forward(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        block = 1 << (x.shape[-1] - 1).bit_length()
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / block + eps) * gamma

    return Implementation("padded", forward)


def gamma_missing() -> Implementation:
    """Return one that leaves gamma out of the sum in dx."""

    def backward(dy: Tensor, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rstd = reference.statistics(x, eps)
        x_hat = x * rstd
        return rstd * (dy * gamma - x_hat * (dy * x_hat).mean(-1, keepdim=True)), (dy * x_hat).sum(0)

    return pair("gamma-missing", backward=backward)


def last_row_dropped() -> Implementation:
    """Return one whose dgamma leaves out the last row."""

    def backward(dy: Tensor, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_hat = x * reference.statistics(x, eps)
        return reference.backward(dy, x, gamma, eps)[0], (dy * x_hat)[:-1].sum(0)

    return pair("last-row", backward=backward)


def dgamma_twice() -> Implementation:
    """Return one whose dgamma is twice too large."""

    def backward(dy: Tensor, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        dx, dgamma = reference.backward(dy, x, gamma, eps)
        return dx, 2.0 * dgamma

    return pair("dgamma-twice", backward=backward)


def drawing() -> Implementation:
    """Return one that rounds at random: it draws from PyTorch's own generator."""

    def forward(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        y = reference.forward(x, gamma, eps)
        return y * (1.0 + 1e-3 * torch.rand_like(y))

    return pair("drawing", forward)


@pytest.fixture
def norms() -> dict[str, Implementation]:
    """Return the norms by name."""
    made = (right(), padded_denominator(), gamma_missing(), last_row_dropped(), dgamma_twice(), drawing())
    return {norm.name: norm for norm in made}


# --- what a run leaves ------------------------------------------------------------------------------------------------


def difference(one: Any, two: Any, where: str = "") -> str | None:
    """Return the first place at which two nested states differ in a bit, or None."""
    if type(one) is not type(two):
        return f"{where}: {type(one).__name__} and {type(two).__name__}"
    if isinstance(one, dict):
        if list(one) != list(two):
            return f"{where}: keys {list(one)} and {list(two)}"
        return next(filter(None, (difference(one[key], two[key], f"{where}/{key}") for key in one)), None)
    if isinstance(one, list | tuple):
        if len(one) != len(two):
            return f"{where}: {len(one)} and {len(two)} items"
        pairs = enumerate(zip(one, two, strict=True))
        return next(filter(None, (difference(*both, f"{where}/{index}") for index, both in pairs)), None)
    if isinstance(one, Tensor):
        same = one.dtype == two.dtype and one.shape == two.shape and bits(one) == bits(two)
        return None if same else f"{where}: tensors"
    return None if one == two else f"{where}: {one!r} and {two!r}"


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def read(directory: Path) -> dict[str, Any]:
    """Return the newest checkpoint of a run, its number and its metrics."""
    found = checkpoint.newest(directory / "checkpoints")
    assert found is not None
    return found.state | {"step": found.step, "metrics": (directory / "metrics.jsonl").read_text()}


@pytest.fixture
def left() -> Callable[[Path], dict[str, Any]]:
    return read


@pytest.fixture
def differing() -> Callable[[Any, Any], str | None]:
    return difference
