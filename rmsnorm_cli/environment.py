"""What this machine is and which device a command runs on: versions, git state, CUDA or Triton's interpreter.

The device is chosen before anything imports Triton: `TRITON_INTERPRET` is read when a kernel is decorated, Triton's
own `tl.sum` among them, so a process is in one mode from its first import of Triton to its end.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rmsnorm_cli import __version__
from rmsnorm_cli.errors import ConfigError, EnvironmentProblem, flat
from rmsnorm_cli.rundir import interrupts

if TYPE_CHECKING:  # kernels import triton, which must wait until a device is chosen
    from rmsnorm_cli.kernels.api import Implementation

INSTALL = "pip install torch triton numpy"
OPTIONAL = {"liger": "liger-kernel", "quack": "quack-kernels", "fla": "fla-core"}
CACHE = ".cache"  # folder of the tool's own caches, in the runs folder
TAG_NAME = "CACHEDIR.TAG"
CACHE_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# This folder holds kernels compiled by rmsnorm; `rmsnorm clean --scope cache` removes it.
"""  # the first line is the Cache Directory Tagging Specification's: backup programs leave such a folder out
TRUE = ("1", "true", "yes", "on", "y")  # what Triton takes for a set flag


@dataclass(frozen=True)
class Device:
    """The device of one process: what was asked for, what executes Triton kernels, where tensors live, its name."""

    asked: str
    execution: Literal["cuda", "interpreter"]
    torch_device: str
    name: str


def choose_device(asked: str = "auto", runs_dir: Path | str = "runs") -> Device:
    """Choose the device and put this process in its mode, before any kernel is imported.

    `asked` is auto, cuda, cuda:N or interpreter. `auto` is CUDA where it initialises and computes, else the
    interpreter; TRITON_INTERPRET=1 in the environment makes `auto` the interpreter. Compiled kernels go to
    `runs_dir`/.cache/triton unless TRITON_CACHE_DIR is set.
    Raises ConfigError for another word and EnvironmentProblem, with the remedy, for a device that is not usable.
    """
    index = cuda_index(asked)
    require("torch", "triton")
    load("torch")
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(runs_dir).absolute() / CACHE / "triton"))
    if asked == "interpreter" or (asked == "auto" and interpreter_is_set()):
        return use_interpreter(asked)
    problem = cuda_problem(index)
    if problem is None:
        return use_cuda(asked, index)
    if asked == "auto" and (index == 0 or cuda_problem(0)):  # never some ranks here and some there
        return use_interpreter(asked)
    raise EnvironmentProblem(f"device {asked}: {problem}")


def cuda_index(asked: str) -> int:
    """Return N of cuda:N, torchrun's local rank (else 0) for the other words; ConfigError for what is no device."""
    if asked in ("auto", "cuda", "interpreter"):
        rank = os.environ.get("LOCAL_RANK", "0")
        if not (rank.isascii() and rank.isdecimal()):
            raise ConfigError(f"LOCAL_RANK: got {rank!r}, expected a whole number, as torchrun sets it; or unset it")
        return int(rank)
    found = re.fullmatch(r"cuda:(\d{1,4})", asked)
    if not found:
        raise ConfigError(f"device: {asked!r} is not a device; expected auto, cuda, cuda:N or interpreter")
    return int(found[1])


def require(*packages: str) -> None:
    """Raise EnvironmentProblem with the install line where one of the packages cannot be found."""
    missing = [name for name in packages if not is_there(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise EnvironmentProblem(f"{' and '.join(missing)} {verb} not installed; install with: {INSTALL}")


def load(package: str) -> None:
    """Import torch or triton while signals wait: what their compiled code meets as it starts does not reach us.

    torch imports NumPy and drops all that this raises, as where there is none; triton calls it a failed start.
    Raises EnvironmentProblem where the package does not import.
    """
    try:
        with interrupts.deferred():
            importlib.import_module(package)
    except (ImportError, OSError) as error:  # a broken installation: a shared library that is not there
        raise EnvironmentProblem(f"{package} does not import ({error}); reinstall it with: {INSTALL}") from error


def is_there(package: str) -> bool:
    """Return whether a package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


def interpreter_is_set() -> bool:
    """Return whether the environment asks for Triton's interpreter, read as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in TRUE


def interpreter_problem(triton: str | None, numpy: str | None) -> str | None:
    """Return why the interpreter of these versions cannot run our kernels, with the remedy, or None.

    Triton 3.6 turns one-element arrays into run-time loop bounds by int(), which NumPy 2.4 refuses.
    """
    if triton is None or numpy is None:
        missing = "triton" if triton is None else "numpy"
        return f"Triton's interpreter needs {missing}, which is not installed; install with: {INSTALL}"
    if release(triton) < (3, 7) and release(numpy) >= (2, 4):
        return (
            f"the interpreter of Triton {triton} cannot run with NumPy {numpy}; "
            "install an older NumPy (pip install 'numpy<2.4') or Triton 3.7 or newer"
        )
    return None


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1] if len(numbers) > 1 else 0) if numbers else (0, 0)


def triton_mode() -> Literal["cuda", "interpreter"] | None:
    """Return the mode in which this process imported Triton, or None where it has not yet."""
    language = sys.modules.get("triton.language")
    if language is None or not hasattr(language, "sum"):
        return None
    return "interpreter" if type(language.sum).__name__ == "InterpretedFunction" else "cuda"


def enter(mode: Literal["cuda", "interpreter"]) -> None:
    """Set TRITON_INTERPRET for `mode` and import Triton; EnvironmentProblem if it was imported in the other one."""
    imported = triton_mode()
    if imported not in (None, mode):
        setting = "with TRITON_INTERPRET=1" if mode == "interpreter" else "without TRITON_INTERPRET"
        raise EnvironmentProblem(
            f"this process has imported Triton for {imported} and cannot change to {mode}; start a new one {setting}"
        )
    if mode == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    load("triton")


def mark_cache(triton_cache: Path) -> None:
    """Mark a new .cache folder of ours as such, so that `clean` knows it; a folder that is there stays as it is."""
    folder = triton_cache.parent
    if folder.name == CACHE:
        with suppress(OSError):  # it is there, or cannot be written: that is explained where a run is opened in it
            folder.mkdir(parents=True)
            (folder / TAG_NAME).write_text(CACHE_TAG, encoding="utf-8")


def is_our_cache(folder: Path) -> bool:
    """Return whether this is a real folder that `mark_cache` made."""
    tag = folder / TAG_NAME
    try:
        return not (folder.is_symlink() or tag.is_symlink()) and tag.read_text(encoding="utf-8") == CACHE_TAG
    except (OSError, UnicodeDecodeError):
        return False


def use_interpreter(asked: str) -> Device:
    """Put this process in interpreter mode."""
    problem = interpreter_problem(version_of("triton"), version_of("numpy"))
    if problem:
        raise EnvironmentProblem(f"device {asked}: {problem}")
    enter("interpreter")
    return Device(asked, "interpreter", "cpu", "CPU, Triton interpreter")


def use_cuda(asked: str, index: int) -> Device:
    """Put this process in compiled mode on one GPU and make that GPU the current one."""
    import torch

    enter("cuda")
    mark_cache(Path(os.environ["TRITON_CACHE_DIR"]))
    torch.cuda.set_device(index)
    return Device(asked, "cuda", f"cuda:{index}", torch.cuda.get_device_name(index))


def cuda_problem(index: int) -> str | None:
    """Return why this GPU cannot be used, with the remedy, or None; initialises CUDA and computes a sum on it."""
    load("torch")
    import torch

    with warnings.catch_warnings(record=True) as told:  # an old driver speaks through a warning
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        count = torch.cuda.device_count() if available else 0
    if not available:
        said = flat(told[0].message) if told else ""
        built = torch.version.cuda
        reason = "this PyTorch is built without CUDA" if built is None else "no CUDA device is usable on this machine"
        return f"{reason}{f' ({said[:200]})' if said else ''}; use --device interpreter, or see: rmsnorm doctor"
    if index >= count:
        there = "only cuda:0 is" if count == 1 else f"cuda:0 to cuda:{count - 1} are"
        return f"this machine has {count} CUDA device{'s' if count > 1 else ''} ({there} there)"
    try:
        total = float((torch.ones(2, device=f"cuda:{index}") + 1).sum())
    except RuntimeError as error:  # torch.AcceleratorError and out-of-memory are RuntimeErrors
        return f"CUDA does not compute here ({str(error).splitlines()[0][:200]}); see: rmsnorm doctor"
    return None if total == 4.0 else f"CUDA computed 1 + 1 + 1 + 1 = {total}; see: rmsnorm doctor"


def executes_on(impl: "Implementation", device: Device) -> Literal["cuda", "interpreter", "cpu"]:
    """Return what executes this implementation: Triton kernels what the device says, the rest where tensors lie."""
    if impl.triton:
        return device.execution
    return "cuda" if device.execution == "cuda" else "cpu"


def version_of(package: str) -> str | None:
    """Return the version of an installed package without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_version() -> str | None:
    """Return the CUDA release that the installed torch was built for, without importing torch, or None."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    line = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return line[1] if line else None


def version_line() -> str:
    """Return tool, torch, triton and CUDA in one line, without importing torch."""
    parts = [f"rmsnorm {__version__}"]
    parts += [f"{name} {version_of(name) or 'not installed'}" for name in ("torch", "triton")]
    return ", ".join([*parts, f"CUDA {cuda_version() or 'none'}"])


def versions() -> dict[str, Any]:
    """Return the versions that decide a result, None for what is not installed; imports nothing."""
    found: dict[str, Any] = {"rmsnorm": __version__, "python": platform.python_version(), "cuda": cuda_version()}
    for package in ("torch", "triton", "numpy"):
        found[package] = version_of(package)
    others = {name: version_of(package) for name, package in OPTIONAL.items()}
    return found | {name: version for name, version in others.items() if version}


def snapshot(device: Device) -> dict[str, Any]:
    """Return what env.json holds: versions, system, device, driver, git. No user, host or folder name, no token."""
    return {
        "versions": versions(),
        "system": {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "device": {"asked": device.asked, "execution": device.execution, "name": device.name} | gpu_facts(device),
        "driver": driver_version() if device.execution == "cuda" else None,
        "git": git_state(),
    }


def gpu_facts(device: Device) -> dict[str, Any]:
    """Return SM count, memory in bytes and compute capability of the chosen GPU; empty for the interpreter."""
    if device.execution != "cuda":
        return {"cpus": os.cpu_count()}
    import torch

    facts = torch.cuda.get_device_properties(device.torch_device)
    return {
        "sms": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "capability": f"{facts.major}.{facts.minor}",
    }


def driver_version() -> str | None:
    """Return the release of the NVIDIA kernel driver, or None where it cannot be read."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    if found:
        return found[1]
    if shutil.which("nvidia-smi") is None:
        return None
    asked = answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return asked.splitlines()[0].strip() if asked else None


def git_state() -> dict[str, Any]:
    """Return commit and dirty flag of the current folder; both None outside a repository or without git."""
    commit = answer("git", "rev-parse", "--verify", "HEAD")
    changes = answer("git", "status", "--porcelain") if commit else None
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def answer(*command: str) -> str | None:
    """Return what a small command prints, stripped, or None where it fails, is missing or takes ten seconds."""
    settings = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, env=settings, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None
