"""Devices and versions: what was asked for is what runs, or one sentence says why not; nothing private is recorded."""

import getpass
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rmsnorm_cli import __version__, environment
from rmsnorm_cli.environment import Device, choose_device, executes_on
from rmsnorm_cli.errors import ConfigError, EnvironmentProblem

INTERPRETER = Device("interpreter", "interpreter", "cpu", "CPU, Triton interpreter")


def fresh(code: str, **environ: str) -> str:
    """Run code in a process that has imported nothing yet and return what it prints; TRITON_* only as given."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TRITON")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def same_environment_after() -> Iterator[None]:
    """Undo what choosing a device sets."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that CUDA sees `count` devices, or fails in a given way, and that the interpreter would run."""

    def pretend(count: int, warning: str = "", broken: Exception | None = None, one: float = 1.0) -> None:
        def available() -> bool:
            if warning:
                warnings.warn(warning, UserWarning, stacklevel=1)
            return count > 0

        def ones(*_: object, device: str) -> torch.Tensor:
            if broken:
                raise broken
            assert device.startswith("cuda:")
            return torch.full((2,), one)

        monkeypatch.setattr(torch.cuda, "is_available", available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
        monkeypatch.setattr(torch, "ones", ones)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/nowhere/kernels")
    monkeypatch.setattr(environment, "triton_mode", lambda: None)
    monkeypatch.setattr(environment, "interpreter_problem", lambda triton, numpy: None)
    return pretend


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_auto_takes_a_gpu_that_computes(gpus):
    gpus(2)
    assert choose_device("auto") == Device("auto", "cuda", "cuda:0", "GPU 0")
    assert "TRITON_INTERPRET" not in os.environ


def test_auto_without_a_gpu_is_the_interpreter_and_says_so(gpus):
    gpus(0)
    assert choose_device("auto") == Device("auto", "interpreter", "cpu", "CPU, Triton interpreter")
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_auto_leaves_a_gpu_that_initialises_and_cannot_compute(gpus):
    """A device that is counted and fails its first sum is not usable."""
    gpus(1, broken=RuntimeError("CUDA error: no kernel image is available for execution\nCompile with ..."))
    assert choose_device("auto").execution == "interpreter"
    with pytest.raises(EnvironmentProblem, match=r"no kernel image is available for execution\); see") as caught:
        choose_device("cuda")
    assert "\n" not in str(caught.value)


def test_a_gpu_that_adds_wrongly_is_not_used(gpus):
    """The first sum is compared with its right value: a device that answers with another number is refused."""
    gpus(1, one=1.5)
    with pytest.raises(EnvironmentProblem, match=r"1 \+ 1 \+ 1 \+ 1 = 5.0"):
        choose_device("cuda")


def test_a_numbered_gpu_is_that_one_or_the_sentence_says_how_many_there_are(gpus):
    """cuda:1 of two is the second; cuda:7 of two is refused with the count, never replaced by another."""
    gpus(2)
    assert choose_device("cuda:1").torch_device == "cuda:1"
    with pytest.raises(EnvironmentProblem, match=r"cuda:7.* has 2 CUDA devices \(cuda:0 to cuda:1 are there\)"):
        choose_device("cuda:7")
    gpus(1)
    with pytest.raises(EnvironmentProblem, match=r"has 1 CUDA device \(only cuda:0 is there\)"):
        choose_device("cuda:1")


def test_an_explicit_gpu_never_falls_back(gpus):
    """--device cuda without a GPU is refused with the remedy; what the driver says is in the sentence."""
    gpus(0, warning="CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).")
    with pytest.raises(EnvironmentProblem, match=r"driver on your system is too old.*--device interpreter"):
        choose_device("cuda")


def test_the_option_beats_the_variable_and_auto_follows_it(gpus, monkeypatch):
    """TRITON_INTERPRET=1 makes auto the interpreter on a GPU machine; --device cuda is the stronger word."""
    gpus(1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_device("auto").execution == "interpreter"
    assert choose_device("cuda").execution == "cuda"
    assert "TRITON_INTERPRET" not in os.environ


def test_each_rank_takes_its_own_gpu_and_none_is_left_without(gpus, monkeypatch):
    """Under torchrun `auto` and `cuda` are the local rank's GPU; ranks are never spread over GPU and interpreter."""
    gpus(2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto").torch_device == choose_device("cuda").torch_device == "cuda:1"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(EnvironmentProblem, match="has 2 CUDA devices"):
        choose_device("auto")
    gpus(0)
    assert choose_device("auto").execution == "interpreter"


@pytest.mark.parametrize("rank", ["", "abc", "-1", "1.5", "²"])
def test_a_local_rank_that_is_no_number_is_a_usage_error(monkeypatch, rank):
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        choose_device("auto")


@pytest.mark.parametrize("word", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cpu", "", "cuda:99999", "CUDA"])
def test_a_word_that_is_no_device_is_a_usage_error(word):
    with pytest.raises(ConfigError, match="auto, cuda, cuda:N or interpreter"):
        choose_device(word)


@pytest.mark.parametrize(("package", "said"), [("torch", "torch is not"), ("triton", "triton is not")])
def test_a_missing_package_is_named_with_the_install_line(monkeypatch, package, said):
    monkeypatch.setattr(environment, "is_there", lambda name: name != package)
    with pytest.raises(EnvironmentProblem, match=f"{said} installed; install with: pip install"):
        choose_device("interpreter")


@pytest.mark.parametrize(
    ("triton", "numpy", "said"),
    [
        ("3.6.0", "2.4.0", "numpy<2.4"),
        ("3.6.1+git", "2.10.1", "Triton 3.7 or newer"),
        ("3.6.0", "2.3.5", None),
        ("3.7.0", "2.4.1", None),
        ("3.10.0", "3.0", None),
        ("3.8.0", None, "needs numpy"),
        (None, "2.3", "needs triton"),
    ],
)
def test_versions_whose_interpreter_cannot_run_are_refused_with_the_remedy(triton, numpy, said):
    """Triton 3.6 with NumPy 2.4 or newer fails inside a loop: it is refused before any kernel runs."""
    problem = environment.interpreter_problem(triton, numpy)
    assert problem is None if said is None else said in str(problem)


def test_the_refusal_of_a_pair_of_versions_reaches_the_user(monkeypatch):
    monkeypatch.setattr(environment, "version_of", lambda package: {"triton": "3.6.0", "numpy": "2.4.0"}[package])
    with pytest.raises(EnvironmentProblem, match="device interpreter: the interpreter of Triton"):
        choose_device("interpreter")


@pytest.mark.interpreter
def test_the_interpreter_is_chosen_before_triton_decorates_anything():
    """After choosing, a kernel and Triton's own tl.sum are both interpreted: a later choice would come too late."""
    code = (
        "from rmsnorm_cli.environment import choose_device; device = choose_device('interpreter')\n"
        "import triton.language as tl; import rmsnorm_cli.kernels.rowwise as rowwise\n"
        "print(device.execution, type(tl.sum).__name__, 'InterpretedFunction' in repr(vars(rowwise)))"
    )
    assert fresh(code) == "interpreter InterpretedFunction True"


@pytest.mark.parametrize(
    ("imported_with", "mode", "said"),
    [("", "interpreter", "with TRITON_INTERPRET=1"), ("1", "cuda", "without TRITON_INTERPRET")],
)
def test_a_process_that_imported_triton_in_the_other_mode_is_refused(imported_with, mode, said):
    """Kernels are compiled or interpreted from their import on; changing sides in silence would lie about results."""
    code = (
        "import triton.language\n"
        "from rmsnorm_cli import environment\n"
        "from rmsnorm_cli.errors import EnvironmentProblem\n"
        f"try: environment.enter({mode!r})\n"
        "except EnvironmentProblem as problem: print(problem)"
    )
    assert said in fresh(code, TRITON_INTERPRET=imported_with)


def test_compiled_kernels_go_to_the_runs_folder_unless_the_user_says_where(gpus, tmp_path, monkeypatch):
    """TRITON_CACHE_DIR is runs/.cache/triton as an absolute path; a value of the user's stays."""
    gpus(0)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    choose_device("interpreter", "here")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "here" / ".cache" / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    choose_device("interpreter", "there")
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"


def test_a_cache_folder_is_marked_only_where_the_tool_makes_it(tmp_path):
    """The mark says that `clean` may remove the folder, so a folder of somebody else never gets it."""
    environment.mark_cache(tmp_path / "runs" / ".cache" / "triton")
    assert environment.is_our_cache(tmp_path / "runs" / ".cache")
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    environment.mark_cache(tmp_path / "home" / ".cache" / "triton")
    assert list((tmp_path / "home" / ".cache").iterdir()) == []
    environment.mark_cache(tmp_path / "users" / "choice")
    assert not (tmp_path / "users").exists()


def test_each_result_says_what_executed_it():
    """Triton kernels run where the device says; others run where the tensors lie, which the interpreter is not."""
    kernel, other = SimpleNamespace(triton=True), SimpleNamespace(triton=False)
    gpu = Device("cuda", "cuda", "cuda:0", "GPU")
    assert [executes_on(impl, device) for impl in (kernel, other) for device in (gpu, INTERPRETER)] == [
        "cuda",
        "interpreter",
        "cuda",
        "cpu",
    ]


# --- versions ---------------------------------------------------------------------------------------------------------


def test_the_version_line_is_right_and_imports_no_torch():
    """What the line says of torch, triton and CUDA is what they say of themselves, without importing them."""
    code = (
        "import sys; from rmsnorm_cli.environment import version_line; line = version_line()\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules); print(line)"
    )
    import triton

    cuda = torch.version.cuda or "none"
    torch_version = torch.__version__.partition("+")[0]
    line = fresh(code)
    assert line.startswith(f"rmsnorm {__version__}, torch {torch_version}")
    assert line.endswith(f"triton {triton.__version__}, CUDA {cuda}")


def test_the_version_line_stands_without_torch(monkeypatch):
    """A machine on which torch is missing still answers --version."""
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(environment, "version_of", lambda package: None)
    assert environment.version_line() == (
        f"rmsnorm {__version__}, torch not installed, triton not installed, CUDA none"
    )


def test_the_snapshot_says_what_decides_a_result_and_nothing_private(tmp_path, monkeypatch):
    """Versions, device and git state are there; user, host, folders and tokens are not."""
    monkeypatch.setenv("HF_TOKEN", "secret-token-value")
    monkeypatch.chdir(tmp_path)
    text = json.dumps(environment.snapshot(INTERPRETER))
    found = json.loads(text)
    assert found["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert found["versions"]["python"] == platform.python_version()
    assert found["device"]["execution"] == "interpreter"
    assert found["git"] == {"commit": None, "dirty": None}
    private = [platform.node(), str(tmp_path), str(Path.home()), sys.prefix, "secret-token-value"]
    private += [name for name in [getpass.getuser()] if len(name) > 4]  # `root` is part of other words
    assert not [word for word in private if word in text]


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_the_git_state_is_that_of_the_current_folder(tmp_path, monkeypatch):
    """No repository, no commit, a clean one, a changed one: each is told from the others."""
    monkeypatch.chdir(tmp_path)
    assert environment.git_state() == {"commit": None, "dirty": None}
    git(tmp_path, "init", "-q")
    assert environment.git_state() == {"commit": None, "dirty": None}
    (tmp_path / "a").write_text("a")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "a")
    clean = environment.git_state()
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "a").write_text("b")
    assert environment.git_state() == {"commit": clean["commit"], "dirty": True}
    monkeypatch.setenv("PATH", "/nowhere")
    assert environment.git_state() == {"commit": None, "dirty": None}


def test_a_command_that_hangs_is_given_up(monkeypatch):
    """A git that waits for a network disk must not hold up a run."""

    def hangs(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("git", timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert environment.git_state() == {"commit": None, "dirty": None}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 02:03:18 UTC 2025", "570.124.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
    ],
)
def test_the_driver_is_read_where_the_kernel_shows_it(monkeypatch, text, version):
    """Both spellings of the driver's own line, and no mistaking of x86_64 or a date for a version."""
    monkeypatch.setattr(Path, "read_text", lambda self, **_: text)
    assert environment.driver_version() == version


@pytest.mark.gpu
def test_a_real_gpu_is_described(device):
    """Name, SM count, memory, driver and CUDA of the GPU that runs these tests."""
    found = environment.snapshot(choose_device("cuda"))
    facts = torch.cuda.get_device_properties(0)
    assert (found["device"]["name"], found["device"]["sms"]) == (facts.name, facts.multi_processor_count)
    assert found["device"]["memory_bytes"] == facts.total_memory
    assert found["driver"]
    assert found["versions"]["cuda"] == torch.version.cuda
