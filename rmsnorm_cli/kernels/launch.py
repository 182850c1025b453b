"""Where a Triton launch happens: on the GPU that holds the tensors, or in the interpreter without needless delay."""

import contextlib
import threading
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
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

    with _one_at_a_time, numpy.errstate(all="ignore"), _replacing_once():
        yield


@contextlib.contextmanager
def _replacing_once() -> Iterator[None]:
    """Let a launch replace triton.language's functions once, and not again at each call of a helper of the kernel.

    The interpreter (Triton 3.6 to 3.8) looks through the whole language at each such call, for functions that it has
    replaced already: over a third of the time of a kernel written in helpers. A Triton that works otherwise is let be.
    """
    from triton.runtime import interpreter

    replace = getattr(interpreter, "_patch_lang", None)
    if replace is None:
        yield
        return

    def once(function: FunctionType) -> Any:
        seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        originals = [tl.tensor.__add__, *(language.load for language in seen)]
        if any(tl.core.is_builtin(original) for original in originals):
            return replace(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once
    try:
        yield
    finally:
        interpreter._patch_lang = replace
