"""What a run says of itself before and after it."""

import pytest

from rmsnorm_cli import session
from rmsnorm_cli.environment import Device

HERE = Device("auto", "interpreter", "cpu", "CPU, Triton interpreter")
GPU = Device("auto", "cuda", "cuda:0", "a card")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("rowwise", "fused"), "CPU, Triton interpreter (interpreter)"),
        (("torch", "fused"), "CPU, Triton interpreter (interpreter)"),
        (("reference", "torch", "compile"), "CPU (cpu)"),
        (("mine.py:norm",), "CPU (cpu; Triton kernels, if it has any, by the interpreter)"),
        (("mine.py:norm", "fused"), "CPU, Triton interpreter (interpreter)"),
    ],
)
def test_a_run_without_a_gpu_says_interpreter_only_where_it_takes_part(names, said):
    assert session.executing(names, HERE) == said


def test_on_a_gpu_everything_executes_there():
    assert session.executing(("torch", "mine.py:norm"), GPU) == "a card (cuda)"
