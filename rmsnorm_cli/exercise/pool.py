"""The catalogue in several processes: mistakes are independent of one another, and the interpreter uses one core."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from rmsnorm_cli import faults

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.exercise.matrix import Row

MOST = 16  # processes; each holds a copy of PyTorch, and on a GPU a context of its own


def examined(names: Sequence[str], directory: Path, settings: "Settings", device: "Device") -> Iterator["Row"]:
    """Yield the row of each mistake as it is finished; raises what a process raised.

    A mistake that can end a GPU's context gets a process of its own, so that it ends nobody else's.
    """
    alone = [name for name in names if device.execution == "cuda" and _crashes(name)]
    together = [name for name in names if name not in alone]
    workers = min(len(os.sched_getaffinity(0)), MOST, len(together))
    executors, waiting = [], []
    for size, group in [(workers, together), *((1, [name]) for name in alone)]:
        if group:
            context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
            executor = ProcessPoolExecutor(size, mp_context=context, initializer=_quiet, initargs=(device,))
            executors.append(executor)
            waiting += [executor.submit(_examine, name, directory, settings, device) for name in group]
    try:
        for done in as_completed(waiting):
            yield done.result()
    except BaseException:  # an interrupt too: nobody waits for what nobody will read
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        for executor in executors:
            executor.shutdown(wait=True, cancel_futures=True)


def _crashes(name: str) -> bool:
    return any(fault.name == name and fault.crashes for fault in faults.CATALOGUE)


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
