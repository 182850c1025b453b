"""What both sides of an implementation in a process of its own need: how a call ends, how tensors are kept."""

import io
from typing import Any

import torch
from torch import Tensor

from rmsnorm_cli.kernels.contract import ContractError


class ForeignRefused(ContractError):
    """The implementation raised an exception: it declines this input."""


class ForeignFailure(RuntimeError):
    """The implementation gave no answer at all; the next call starts a fresh process."""


class ForeignCrashed(ForeignFailure):
    """The process ended (a fault, os._exit, sys.exit), or its GPU context was lost (`exit_code` None)."""

    def __init__(self, message: str, exit_code: int | None = None, output: str = "") -> None:
        self.exit_code = exit_code
        self.output = output
        super().__init__(f"{message}; it last printed:\n{output}" if output else message)


class ForeignTimeout(ForeignFailure):
    """The process did not answer in time and was killed."""


def stored(value: Any, path: str) -> None:
    """Save like torch.save, but with OSError where the disk is full: PyTorch's own writer only says that it failed."""
    content = io.BytesIO()
    torch.save(value, content)
    with open(path, "wb") as file:
        file.write(content.getbuffer())


def overwrite(tensor: Tensor | None, contents: Tensor) -> None:
    """Do to the caller's memory what the implementation did to its copy, unseen by autograd as a kernel would."""
    assert tensor is not None
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).copy_(contents)
