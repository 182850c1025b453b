"""Whether the process that owns a run directory still works in it.

A running process holds an advisory lock on its run directory (gone with the process, however it dies) and leaves its
id, start time, boot and process namespace in run.json, for file systems where a lock does not reach.
"""

import fcntl
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def hold(directory: Path) -> int | None:
    """Lock a directory for this process and return the open handle, or None where another holds it.

    Where the file system has no locks the handle is returned unlocked: the process record has to do.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if lock(handle):
        return handle
    os.close(handle)
    return None


def lock(handle: int) -> bool:
    """Lock an open directory and return True, also where there are no locks; False where another holds it."""
    for attempt in range(5):  # a reader's probe holds the lock for a moment
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt < 4:
                time.sleep(0.02)
        except OSError:
            return True
        else:
            return True
    return False


def release(handle: int | None) -> None:
    """Unlock what `hold` returned, also for child processes that inherited the handle."""
    if handle is not None:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def held(directory: Path) -> bool:
    """Return whether another open handle, of this process or another, holds the directory's lock."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def identity() -> dict[str, Any]:
    """Return what run.json says about this process: id, start time in clock ticks, boot, process namespace."""
    pid = os.getpid()
    return {"pid": pid, "start_time": start_time(pid), "boot_id": boot_id(), "namespace": namespace()}


def alive(directory: Path, process: Mapping[str, Any]) -> bool | None:
    """Return whether the process of a run marked `running` still works, or None where that cannot be known here.

    None: it was started before this machine's last boot, on another machine, or in another container.
    """
    if held(directory):
        return True
    if process.get("boot_id") != boot_id() or process.get("namespace") != namespace():
        return None
    pid = process.get("pid")
    return isinstance(pid, int) and start_time(pid) == process.get("start_time") is not None


def start_time(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot (a reused id has another), or None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    after_name = text[text.rindex(")") + 2 :].split()  # the name may hold blanks and parentheses
    return None if after_name[0] == "Z" else int(after_name[19])


def boot_id() -> str:
    """Return the random id that the kernel drew at boot, empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def namespace() -> str:
    """Return the process namespace, in which ids mean something; empty where there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
