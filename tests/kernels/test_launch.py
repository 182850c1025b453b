"""Launches in the interpreter: triton.language is replaced once a launch, which changes no bit and leaves no trace."""

import contextlib

import pytest
import torch

from rmsnorm_cli.kernels import launch, rms_norm
from rmsnorm_cli.kernels.contract import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="is about Triton's interpreter")


def answers(impl: str) -> list[torch.Tensor]:
    """Return y, dx and dgamma of rows wide and narrow, in three dtypes where the implementation has them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in ((5, 33), (3, 1025)):
        for dtype in (torch.float32, torch.float16):
            x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            gamma = torch.randn(shape[1], generator=generator).to(dtype)
            y = rms_norm(x.requires_grad_(), gamma.requires_grad_(), impl=impl)
            found += [y.detach(), *torch.autograd.grad(y, (x, gamma), dy)]
    return found


@pytest.mark.parametrize("impl", ["rowwise", "fused"])
def test_replacing_once_changes_no_bit(impl, monkeypatch):
    once = answers(impl)
    monkeypatch.setattr(launch, "_replacing_once", contextlib.nullcontext)
    assert all(torch.equal(left, right) for left, right in zip(once, answers(impl), strict=True))


def test_a_launch_of_many_helpers_replaces_once_for_each_module_and_gives_the_interpreter_its_own_back(monkeypatch):
    from triton.runtime import interpreter

    replaced = []
    own = interpreter._patch_lang
    monkeypatch.setattr(interpreter, "_patch_lang", lambda function: replaced.append(function) or own(function))
    counting = interpreter._patch_lang
    rms_norm(torch.ones(64, 33), torch.ones(33), impl="fused")
    assert 1 <= len(replaced) <= 2, "the kernel's own module, and that of tl.sum where nobody has replaced it yet"
    assert interpreter._patch_lang is counting


def test_the_language_is_restored_after_a_launch_that_fails(monkeypatch):
    import triton.language as tl

    with pytest.raises(ZeroDivisionError), launch.launching(torch.ones(1)):
        raise ZeroDivisionError
    rms_norm(torch.ones(2, 3), torch.ones(3), impl="fused")
    assert tl.core.is_builtin(tl.load)


def test_a_triton_without_that_function_is_let_be(monkeypatch):
    from triton.runtime import interpreter

    monkeypatch.delattr(interpreter, "_patch_lang")
    with launch.launching(torch.ones(1)):
        assert not hasattr(interpreter, "_patch_lang")
    assert not hasattr(interpreter, "_patch_lang")
