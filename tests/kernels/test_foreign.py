"""Foreign code in a process of its own: whatever it does, the caller gets a tensor or one named error, and goes on."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from rmsnorm_cli.errors import of_the_machine
from rmsnorm_cli.gates.gate import attempt
from rmsnorm_cli.kernels import ContractError, MissingPackage, UnknownImplementation
from rmsnorm_cli.kernels.foreign import ForeignWorker
from rmsnorm_cli.kernels.foreign_common import ForeignCrashed, ForeignFailure, ForeignRefused, ForeignTimeout

close = torch.testing.assert_close

SOURCE = '''
import os, pathlib, shutil, signal, subprocess, sys, time
import torch

def right(x, gamma, eps):
    print("chatter"); print("more chatter", file=sys.stderr); os.write(1, b"raw chatter\\n")
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (y if gamma is None else y * gamma.float()).to(x.dtype)

class Silent(Exception):
    def __str__(self): return 3

class Mine(torch.Tensor): pass

buffer = torch.zeros(64)

def is_pipe(fd):
    try: return os.write(fd, b"") == 0 and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
    except OSError: return False

def acts(x, gamma, eps):
    """Misbehave as eps says, so that one process can be asked for everything."""
    match int(eps):
        case 2: raise ValueError("only even\\nnumbers of columns")
        case 3: os._exit(7)
        case 4: sys.exit(0)
        case 5: os.kill(os.getpid(), signal.SIGSEGV)
        case 6: time.sleep(1000)
        case 7: return None
        case 8: x.data.fill_(9.0)
        case 9: return right(x, gamma, eps).detach()
        case 10: os.closerange(3, 100)
        case 11: raise ValueError(f"gamma is on {gamma.device}")
        case 12: raise MemoryError
        case 13: raise KeyboardInterrupt
        case 14: raise Silent
        case 15: os.fork()
        case 16: return right(x, gamma, eps).to_sparse()
        case 17: return right(x, gamma, eps).as_subclass(Mine)
        case 18: return torch.nested.nested_tensor([right(x, gamma, eps)])
        case 19: torch.manual_seed(0)
        case 20: torch.set_default_dtype(torch.float64)
        case 21: torch.set_num_threads(torch.get_num_threads() + 1)
        case 22: os.chdir("/")
        case 23: return torch._neg_view(-right(x, gamma, eps))
        case 24: [os.write(fd, b"[1, 2]\\n") for fd in range(3, 40) if is_pipe(fd)]
        case 25: return buffer[:x.numel()].view(x.shape).copy_(right(x, gamma, eps).detach())
        case 26: shutil.rmtree(pathlib.Path(os.readlink("/proc/self/fd/1")).parent)
    return right(x, gamma, eps)

class Eager(torch.autograd.Function):
    """Writes dx over dy and zeroes x in its backward, and refuses a second row there."""
    @staticmethod
    def forward(ctx, x, gamma, eps):
        ctx.save_for_backward(x)
        return right(x, gamma, eps)
    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        if len(x) > 1: raise RuntimeError("one row only")
        dy.data.fill_(5.0); x.data.zero_()
        return dy, None, None

def eager(x, gamma, eps): return Eager.apply(x, gamma, eps)
compiled_by_inductor = torch.compile(lambda x, gamma, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], gamma, eps))
def process(x, gamma, eps): return torch.full_like(x, os.getpid())
def leaves_a_child(x, gamma, eps):
    child = subprocess.Popen(["sleep", "1000"])
    print("child", child.pid, flush=True)
    os._exit(1)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder that holds the misbehaving module."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "theirs.py").write_text(SOURCE)
    return folder


@pytest.fixture(scope="module")
def worker(folder, device):
    """Return a worker on the callable that misbehaves on demand; it restarts by itself after each crash."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with ForeignWorker("theirs:acts", device, timeout=60) as worker:
            yield worker


@pytest.fixture
def operands(device):
    return torch.tensor([[3.0, 4.0]], device=device, requires_grad=True), torch.ones(
        2, device=device, requires_grad=True
    )


def test_values_gradients_and_chatter(worker, operands):
    """y, dx and dgamma come back exactly, through autograd, whatever the code prints."""
    x, gamma = operands
    y = worker.implementation.call(x, gamma, 1e-6)
    close(y, torch.tensor([[0.848528, 1.131371]], device=x.device), atol=1e-6, rtol=0)
    dx, dgamma = torch.autograd.grad(y, (x, gamma), torch.tensor([[1.0, 2.0]], device=x.device), retain_graph=True)
    close(dx, torch.tensor([[-0.090510, 0.067882]], device=x.device), atol=1e-6, rtol=0)
    close(dgamma, torch.tensor([0.848528, 2.262742], device=x.device), atol=1e-6, rtol=0)
    again, _ = torch.autograd.grad(y, (x, gamma), torch.tensor([[1.0, 2.0]], device=x.device))
    assert torch.equal(again, dx)
    assert worker.mutated == ()
    assert (worker.implementation.name, worker.implementation.ours) == ("theirs:acts", False)


def test_interleaved_graphs_frozen_operands_and_no_gamma(worker, operands):
    """Two forwards may be followed by their backwards in either order; what is frozen gets no gradient."""
    x, gamma = operands
    first, second = worker(x, gamma, 1e-6), worker(2 * x, None, 1e-6)
    close(torch.autograd.grad(second.sum(), x)[0], torch.autograd.grad(first.sum(), x)[0], atol=1e-6, rtol=0)
    frozen = worker(x.detach(), gamma, 1e-6)
    close(torch.autograd.grad(frozen.sum(), gamma)[0], frozen.detach()[0])
    assert not worker(x.detach(), gamma.detach(), 1e-6).requires_grad


def test_layouts_cross_as_they_are(worker, device):
    """Slices, transposes, expanded gradients and half precision are the same tensors on the other side."""
    base = torch.randn(6, 8, device=device)
    for x in (base[:, ::2], base.t(), base[::2, :4], base.half(), torch.empty(0, 8, device=device)):
        leaf = x.detach().requires_grad_()
        y = worker(leaf, None, 1e-6)
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        close(y, torch.nn.functional.rms_norm(x, (x.shape[-1],), None, 1e-6))
        y.sum().backward()
        assert leaf.grad.shape == x.shape


@pytest.mark.parametrize("elsewhere", ["meta", pytest.param("cpu", marks=pytest.mark.gpu)])
def test_an_operand_on_another_device_arrives_there(worker, device, elsewhere):
    """Were it moved on the way, a refusal of it could never be seen."""
    with pytest.raises(ForeignRefused, match=f"gamma is on {elsewhere}"):
        worker(torch.ones(1, 2, device=device), torch.ones(2, device=elsewhere), 11)


def test_an_exception_is_a_refusal(worker, operands):
    """The class and message of the exception come back as one line; the same process goes on."""
    pid = worker._process.pid
    with pytest.raises(ForeignRefused, match=r"theirs:acts: ValueError: only even numbers of columns$") as refusal:
        worker(*operands, 2.0)
    assert isinstance(refusal.value, ContractError)
    assert worker(*operands, 1e-6).shape == (1, 2)
    assert worker._process.pid == pid


@pytest.mark.parametrize(
    ("eps", "code", "says"),
    [
        (3.0, 7, "exited with code 7"),
        (4.0, 0, "exited with code 0"),
        (5.0, -11, "killed by SIGSEGV during forward, as a write or read outside"),
    ],
    ids=["os._exit", "sys.exit", "fault"],
)
def test_the_end_of_the_process_is_a_named_error(worker, operands, eps, code, says):
    """A fault shows the trace it printed; the next call runs in a fresh process, the old graph is gone by name."""
    y = worker(*operands, 1e-6)
    with pytest.raises(ForeignCrashed, match=says) as crash:
        worker(*operands, eps)
    assert crash.value.exit_code == code
    assert ("acts" in crash.value.output) == (eps == 5.0)
    close(worker(*operands, 1e-6), y)
    with pytest.raises(ForeignCrashed, match="the process that ran this forward has ended"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("eps", "error", "says"),
    [
        (12.0, ForeignFailure, "MemoryError$"),
        (13.0, ForeignCrashed, "KeyboardInterrupt$"),
        (14.0, ForeignRefused, "Silent$"),
        (16.0, ForeignFailure, r"it returned a tensor that is torch\.sparse_coo: return a dense one"),
        (17.0, ForeignFailure, "it returned a Mine, a subclass of torch.Tensor: return a plain tensor"),
        (18.0, ForeignFailure, "it returned a tensor that is nested: return a dense one"),
        (24.0, ForeignCrashed, "it wrote into the pipe of its answers"),
        (26.0, ForeignCrashed, "the folder of its questions was removed|No such file"),
    ],
)
def test_whatever_else_it_does_is_one_named_error_in_one_line(eps, error, says, worker, operands):
    """Neither a refusal that it is not, nor our own traceback, nor the end of the caller."""
    with pytest.raises(error, match=says) as problem:
        worker(*operands, eps)
    assert "\n" not in str(problem.value)
    assert isinstance(problem.value, ForeignRefused) == (error is ForeignRefused)
    assert worker(*operands, 1e-6).shape == (1, 2)


def test_a_copy_of_itself_that_it_made_does_not_answer(worker, operands):
    """A fork that comes back from the call would answer too, and the next question would get its answer."""
    for columns in (2, 3, 4):
        x = torch.arange(1.0, columns + 1, device=operands[0].device).reshape(1, columns)
        close(worker(x, None, 15.0), x / (x.square().mean() + 15).sqrt())


CHANGES = {
    19.0: "the state of torch's generator",
    20.0: "torch's default dtype",
    21.0: "torch's number of threads",
    22.0: "the current folder",
}


@pytest.mark.parametrize("columns", [2, 3], ids=["answered", "refused"])
def test_what_it_changes_for_the_whole_process_is_named(columns, folder, operands, monkeypatch):
    """Right numbers, or a refusal, and every line of the caller's that comes after is another program's."""
    monkeypatch.chdir(folder)
    gamma = torch.ones(columns, device=operands[0].device)
    with ForeignWorker("theirs:acts", str(gamma.device)) as worker:
        for eps, what in CHANGES.items():
            with pytest.raises(ForeignFailure, match=f"it changed {what} for the whole process"):
                worker(operands[0], gamma, eps)


def test_a_result_that_a_later_call_overwrites_is_named(worker):
    """Two calls that answer from one buffer: each answer is right, until the next one comes."""
    first, second = torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 12.0]])
    worker(first, None, 25.0)
    with pytest.raises(ForeignFailure, match="it wrote to y of the call before"):
        worker(second, None, 25.0)
    assert worker(first, None, 1e-6).shape == (1, 2)


def test_a_result_whose_sign_is_a_flag_is_the_number_it_stands_for(worker, operands):
    y = worker(*operands, 23.0)
    assert not y.is_neg()
    close(y, operands[0] / (operands[0].square().mean() + 23).sqrt())


def test_what_it_printed_is_handed_on(folder, operands, monkeypatch):
    """Print statements are how people look into their kernels; nothing printed, nothing kept."""
    monkeypatch.chdir(folder)
    kept = {}
    with ForeignWorker("theirs:acts", str(operands[0].device), keep=kept.__setitem__) as worker:
        worker(*operands, 1e-6)
        with pytest.raises(ForeignCrashed):
            worker(*operands, 3.0)
        worker(*operands, 1e-6)
    (name,) = kept
    assert name == "printed/theirs-acts.txt"
    assert kept[name].count(b"raw chatter") == 2
    kept.clear()
    with ForeignWorker("theirs.py:process", str(operands[0].device), keep=kept.__setitem__) as worker:
        worker(*operands, 1e-6)
    assert kept == {}


@pytest.mark.parametrize("end", ["question", "reply"])
def test_a_full_disk_is_the_machines_and_no_refusal(end, folder, operands, monkeypatch):
    """Whoever cannot be asked has not declined: PyTorch's own writer says nothing of the disk."""
    monkeypatch.chdir(folder)
    with ForeignWorker("theirs:acts", str(operands[0].device)) as worker:
        os.symlink("/dev/full", Path(worker._folder.name) / f"{end}.pt")
        with pytest.raises(OSError, match="No space left") as problem:
            worker(*operands, 1e-6)
        with pytest.raises(OSError, match="No space left"):
            attempt(worker.implementation, lambda: worker(*operands, 1e-6), operands[0])
    assert of_the_machine(problem.value)


def test_a_closed_pipe_is_a_crash(worker, operands):
    """Code that closes every file it finds cannot leave the caller waiting."""
    with pytest.raises(ForeignCrashed, match="theirs:acts: the process"):
        worker(*operands, 10.0)


def test_a_hang_is_killed_in_time(worker, operands, monkeypatch):
    """After `timeout` seconds the process is gone, and the next call works."""
    worker(*operands, 1e-6)
    pid = worker._process.pid
    monkeypatch.setattr(worker, "timeout", 0.5)
    start = time.monotonic()
    with pytest.raises(ForeignTimeout, match=r"no answer to forward within 0\.5 s"):
        worker(*operands, 6.0)
    assert time.monotonic() - start < 5
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    monkeypatch.undo()
    assert worker(*operands, 1e-6).shape == (1, 2)


def test_what_is_not_a_tensor_is_a_failure(worker, operands):
    """None is neither a refusal nor a crash: it is no answer."""
    with pytest.raises(ForeignFailure, match="it returned a NoneType, not a tensor"):
        worker(*operands, 7.0)


def test_a_written_input_is_named_and_written_here_too(worker, device):
    """The caller's memory shows what an in-process run would have done to it, around a slice as well."""
    buffer = torch.arange(8.0, device=device)
    x = buffer[2:6].view(2, 2)
    worker(x, None, 8.0)
    assert worker.mutated == ("x",)
    assert torch.equal(x, torch.full_like(x, 9.0))
    assert buffer.tolist() == [0, 1, 9, 9, 9, 9, 6, 7]
    worker(x, None, 1e-6)
    assert worker.mutated == ()


def test_a_result_without_a_graph_has_no_gradient(worker, operands):
    """Code that detaches is not given gradients it does not have."""
    y = worker(*operands, 9.0)
    assert not y.requires_grad


def test_an_operand_changed_in_place_and_a_second_derivative_are_refused(worker, operands):
    """Here the wrapper speaks, since the other process cannot see either."""
    x = operands[0] * 1
    y = worker(x, None, 1e-6)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(ForeignRefused, match="no second derivative"):
        torch.autograd.grad(worker(*operands, 1e-6).sum(), operands[0], create_graph=True)


def test_graphs_are_dropped_on_the_other_side(worker, operands):
    """A y that nobody holds any more frees its graph there with the next request."""
    y = worker(*operands, 1e-6)
    number = y.grad_fn.graph.id
    del y
    assert number in worker._forgotten
    worker(*operands, 1e-6)
    assert number not in worker._forgotten


def test_what_the_backward_writes_and_refuses(folder, operands, monkeypatch):
    """A dx written over dy is seen, in dy and in x; an exception of the backward is a refusal like any other."""
    monkeypatch.chdir(folder)
    x, gamma = operands
    with ForeignWorker("theirs.py:eager", str(x.device)) as worker:
        y, dy = worker(x, gamma, 1e-6), torch.tensor([[1.0, 2.0]], device=x.device)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert worker.mutated == ("dy", "x")
        assert dy.tolist() == dx.tolist() == [[5.0, 5.0]]
        assert x.tolist() == [[0.0, 0.0]]
        y = worker(torch.ones(2, 2, device=x.device, requires_grad=True), gamma, 1e-6)
        with pytest.raises(ForeignRefused, match="one row only"):
            y.sum().backward()


def test_a_compiled_callable_is_differentiated_twice(folder, operands, monkeypatch):
    """A compiler that reuses the graph's memory refuses the second backward that every caller of autograd may ask."""
    monkeypatch.chdir(folder)
    with ForeignWorker("theirs.py:compiled_by_inductor", str(operands[0].device)) as worker:
        y = worker(*operands, 1e-6)
        first = torch.autograd.grad(y.sum(), operands, retain_graph=True)
        close(torch.autograd.grad(y.sum(), operands), first)


def test_it_is_another_process_and_ends_with_the_block(folder, device, monkeypatch):
    """The code runs under another process id, which is gone, with all its files, after the with block."""
    monkeypatch.chdir(folder)
    with ForeignWorker("theirs:process", device) as worker:
        pid = int(worker(torch.ones(1, 1, device=device, dtype=torch.float64), None, 1e-6).item())
        assert pid == worker._process.pid != os.getpid()
        files = worker._folder.name
    assert not os.path.exists(files)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_it_started_does_not_hold_the_pipe(folder, device, monkeypatch):
    """A process that dies and leaves a child behind is noticed at once, and the child goes too."""
    monkeypatch.chdir(folder)
    with ForeignWorker("theirs:leaves_a_child", device, timeout=60) as worker:
        start = time.monotonic()
        with pytest.raises(ForeignCrashed, match="exited with code 1") as crash:
            worker(torch.ones(1, 1, device=device), None, 1e-6)
        assert time.monotonic() - start < 30
        child = Path("/proc") / crash.value.output.split()[-1] / "stat"
        while child.exists() and child.read_text().split()[2] != "Z":  # dead, or waiting for someone to ask
            assert time.monotonic() - start < 30, "what it started is still running"


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("theirs:nothing", UnknownImplementation, "has no 'nothing'"),
        ("liger", MissingPackage, "pip install liger-kernel"),
        ("dying.py:norm", ForeignCrashed, "exited with code 9 during start"),
    ],
)
def test_a_start_that_fails_says_why(name, error, says, folder, device, monkeypatch):
    """The same errors as in-process, and a crash at import is one too; nothing is left behind."""
    (folder / "dying.py").write_text("import os; os._exit(9)")
    monkeypatch.chdir(folder)
    if name == "liger":  # whether or not it is installed here
        (folder / "liger_kernel.py").write_text("raise ImportError('no such package')")
        monkeypatch.setenv("PYTHONPATH", str(folder))
    with pytest.raises(error, match=says), ForeignWorker(name, device):
        pass


def test_the_interpreter_reaches_the_child(device):
    """Our own kernel runs there as it does here: the environment is handed on before anything is imported."""
    x, gamma = torch.randn(2, 5, device=device), torch.randn(5, device=device)
    with ForeignWorker("rowwise", device) as worker:
        assert worker.implementation.triton
        close(worker(x, gamma, 1e-6), torch.nn.functional.rms_norm(x, (5,), gamma, 1e-6))
    assert "rmsnorm_cli.kernels.foreign_child" not in sys.modules
