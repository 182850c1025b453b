"""Files that are whole or absent: write beside the final name, flush to the disk, rename; errors in one sentence."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rmsnorm_cli.errors import EnvironmentProblem

FULL = (errno.ENOSPC, errno.EDQUOT)
TEMPORARY = ".tmp"  # ending of a hidden name that is not final yet; what a killed process leaves is recognised by it


def temporary(path: Path) -> Path:
    """Return the hidden name, in the same folder and of this process alone, under which `path` is first written."""
    return path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")


def is_temporary(path: Path) -> bool:
    """Return whether this is a name that `temporary` makes."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the name `path` when the block ends well, and disappears when it does not.

    The content is on the disk before the name is. Raises EnvironmentProblem where the system refuses.
    """
    draft = temporary(path)
    try:
        with explained(path):
            with open(draft, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write(path: Path, content: str | bytes) -> None:
    """Write a whole file atomically; text becomes UTF-8, what UTF-8 cannot hold a backslash escape."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with replacing(path) as file:
        file.write(data)


def append_line(path: Path, line: str) -> None:
    """Append a whole line or nothing: what a full disk accepted of it is taken back."""
    data = (line + "\n").encode("utf-8", "backslashreplace")
    with explained(path):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            size = os.fstat(handle).st_size
            try:
                while data:
                    data = data[os.write(handle, data) :]
            except BaseException:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)


def link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, replacing an older link in one step."""
    draft = temporary(path)
    with explained(path):
        draft.unlink(missing_ok=True)
        os.symlink(target, draft)
        try:
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def sync_folder(folder: Path) -> None:
    """Put a rename on the disk; file systems that cannot do this for a folder are left alone."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into an EnvironmentProblem about `path`."""
    try:
        yield
    except OSError as error:
        raise problem(error, path) from error


def problem(error: OSError, path: Path) -> EnvironmentProblem:
    """Return one sentence about a refused write, with its remedy; `elsewhere` adds the one that a new run has."""
    if error.errno in FULL:
        return EnvironmentProblem(f"no space is left to write {path}; free some")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return EnvironmentProblem(f"{path} cannot be made: a part of it is a file, not a folder; rename that")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentProblem(f"{path} cannot be written ({error.strerror}); make it writable")
    return EnvironmentProblem(f"{path} cannot be written ({error.strerror or error}); look after that disk")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which reads, into an EnvironmentProblem about `path`; a missing file stays one."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(error, path) from error


def unreadable(error: OSError, path: Path) -> EnvironmentProblem:
    """Return one sentence about a refused reading, with its remedy."""
    remedy = "make it readable" if isinstance(error, PermissionError) else "look after that disk"
    return EnvironmentProblem(f"{path} cannot be read ({error.strerror or error}); {remedy}")


@contextmanager
def elsewhere() -> Iterator[None]:
    """Add to a refused write that another runs folder may be chosen: what is begun can still be begun elsewhere."""
    try:
        yield
    except EnvironmentProblem as refused:
        raise EnvironmentProblem(f"{refused}, or choose another folder: --runs-dir") from refused
