"""Where a Triton launch happens: on the GPU that holds the tensors, or in the interpreter without NumPy's warnings."""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from rmsnorm_cli.kernels.contract import INTERPRETED


def launching(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the device of x the one that Triton launches on, and let infinities be results, as they are on a GPU.

    Triton launches on the current GPU, wherever the pointers point. Its interpreter computes with NumPy, which
    warns where a GPU does not: an fp16 overflow is reported by the numbers, not by a warning.
    """
    return _interpreting() if INTERPRETED else torch.cuda.device(x.device)


_one_at_a_time = threading.RLock()  # the interpreter replaces triton.language's functions while a kernel runs


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    import numpy

    with _one_at_a_time, numpy.errstate(all="ignore"):
        yield
