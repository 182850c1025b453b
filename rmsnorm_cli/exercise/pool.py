"""The catalogue in several processes: mistakes are independent of one another, and the interpreter uses one core."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.exercise.matrix import Row

MOST = 8  # processes; each holds a copy of PyTorch, and on a GPU a context of its own


def examined(names: Sequence[str], directory: Path, settings: "Settings", device: "Device") -> Iterator["Row"]:
    """Yield the row of each mistake as it is finished; raises what a process raised."""
    workers = min(len(os.sched_getaffinity(0)), MOST, len(names))
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_quiet, initargs=(device,))
    try:
        waiting = [executor.submit(_examine, name, directory, settings, device) for name in names]
        for done in as_completed(waiting):
            yield done.result()
    except BaseException:  # an interrupt too: nobody waits for what nobody will read
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _quiet(device: "Device") -> None:
    """Put a new process in the parent's mode, on one core, deaf to Ctrl-C: the parent hears it and stops us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from rmsnorm_cli import environment

    environment.choose_device("interpreter" if device.execution == "interpreter" else device.torch_device)
    import torch

    torch.set_num_threads(1)


def _examine(name: str, directory: Path, settings: "Settings", device: "Device") -> "Row":
    from rmsnorm_cli.exercise.matrix import examine

    return examine(name, directory, settings, device)
