"""How `verify` asks: in one thread beside the interpreter, and in as many as before elsewhere and afterwards."""

import dataclasses

import pytest
import torch

from rmsnorm_cli import config
from rmsnorm_cli.commands import verify
from rmsnorm_cli.console import Console
from rmsnorm_cli.environment import Device
from rmsnorm_cli.judging.tolerances import DECLARED
from rmsnorm_cli.kernels import implementation

HERE = Device("auto", "interpreter", "cpu", "CPU, Triton interpreter")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("triton", "threads"), [(True, 1), (False, 2)])
def test_pytorch_computes_in_one_thread_beside_the_interpreter_alone(triton, threads):
    seen = []

    def spied(x, gamma, eps):
        seen.append(torch.get_num_threads())
        return reference.call(x, gamma, eps)

    reference = implementation("reference")
    options = {"verify.rows": [2], "verify.cols": [3], "verify.only": ["forward"], "verify.dtypes": ["float32"]}
    settings = config.load("verify", options=options)
    asked = dataclasses.replace(reference, call=spied, triton=triton)
    results = list(verify.ask(asked, settings, Console(quiet=True), HERE, DECLARED))
    assert {result.status for result in results} == {"passed"}
    assert set(seen) == {threads}
    assert torch.get_num_threads() == 2
