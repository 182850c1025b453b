"""The run directories that are there: list, find and read them, their records and hashes, and the `latest` links."""

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmsnorm_cli.errors import ConfigError, EnvironmentProblem
from rmsnorm_cli.rundir import atomic, liveness

TOOL = "rmsnorm"  # what makes a run.json ours
SCHEMA = 1  # of run.json; a change of a field's meaning raises it
STAMP = "%Y%m%dT%H%M%SZ"  # a run directory's name begins with this UTC time
NAMED = re.compile(r"\d{8}T\d{6}Z-")
STAMP_LENGTH = len("20260102T030405Z")
KINDS: dict[str, type | tuple[type, ...]] = {  # of the values of run.json that readers count on
    "command": str, "status": str, "started": str, "finished": (str, type(None)), "message": str, "argv": list,
    "device": dict, "counts": dict, "summary": dict, "sessions": list,
}  # fmt: skip
LARGEST = 64 * 1024 * 1024  # bytes of a run.json that is still read
RESERVE = ".reserve"  # see run.py
UNHASHED = ("SHA256SUMS", "report.html", "figures", RESERVE)  # `report` may write its files later


@dataclass(frozen=True)
class RunInfo:
    """What a run.json says. `alive`: its process still works in it, or None where that cannot be known from here."""

    dir: Path
    command: str
    status: str
    started: str
    finished: str | None
    alive: bool | None
    facts: Mapping[str, Any]


def read_info(directory: Path) -> RunInfo | None:
    """Read the run.json of a real directory (no link), or return None where this tool has not made it."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        facts = read_facts(handle)
    finally:
        os.close(handle)
    if facts is None:
        return None
    status, process = str(facts.get("status")), facts.get("process")
    alive = liveness.alive(directory, process if isinstance(process, dict) else {}) if status == "running" else False
    return RunInfo(
        directory, str(facts.get("command")), status, str(facts.get("started")), facts.get("finished"), alive, facts
    )


def read_facts(handle: int) -> dict[str, Any] | None:
    """Return the run.json in an open directory, or None where there is none that this tool wrote."""
    try:
        file = os.open("run.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
        with open(file, "rb") as stream:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None
            facts = json.loads(stream.read(LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    ours = isinstance(facts, dict) and facts.get("tool") == TOOL and type(facts.get("schema")) is int
    whole = ours and all(isinstance(facts[key], kind) for key, kind in KINDS.items() if key in facts)
    return facts if whole else None


def list_runs(runs_dir: Path) -> list[RunInfo]:
    """Return the runs in a folder, oldest first; what is not this tool's, and links, are passed over."""
    try:
        names = sorted(os.listdir(runs_dir), key=age)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EnvironmentProblem(f"{runs_dir} cannot be read ({error.strerror}); choose another: --runs-dir") from error
    return [info for name in names if (info := read_info(runs_dir / name)) is not None]


def unreadable(runs_dir: Path) -> list[str]:
    """Return the real folders that are called like run directories and whose run.json does not say that they are."""
    named = (name for name in sorted(os.listdir(runs_dir)) if NAMED.match(name))
    return [name for name in named if is_folder(runs_dir / name) and read_info(runs_dir / name) is None]


def is_folder(path: Path) -> bool:
    """Return whether this is a folder and no link to one."""
    return path.is_dir() and not path.is_symlink()


def age(name: str) -> tuple[str, int, str]:
    """Return the key that sorts names of run directories by their making: time, number among equals, name."""
    tail = name.rpartition("-")[2]
    return name[:STAMP_LENGTH], int(tail) if tail.isdecimal() else 1, name


def find(name: str | Path, runs_dir: Path) -> RunInfo:
    """Return the run that is meant by a path, or by a name in the runs folder such as `latest-train`.

    Raises ConfigError where that is no run directory of this tool, or of a newer version of it, or a damaged one.
    """
    for candidate in (Path(os.path.expanduser(name)), runs_dir / name):
        with suppress(OSError, RuntimeError, ValueError):  # a loop of links; a name with a null byte
            directory = candidate.resolve(strict=True)
            info = read_info(directory)
            if info is not None:
                if info.facts["schema"] > SCHEMA:
                    raise ConfigError(f"{name}: that run was written by a newer rmsnorm ({info.facts.get('version')})")
                refuse_odd(directory)
                return info
            refuse_closed(directory)
            if (directory / "run.json").is_file():
                raise ConfigError(
                    f"{directory / 'run.json'} is damaged, or not one that rmsnorm wrote; "
                    "put back a copy of it, or name another run"
                )
    raise ConfigError(f"{name} is no run directory: neither there nor in {runs_dir} does it hold a run.json of rmsnorm")


def refuse_closed(directory: Path) -> None:
    """Raise EnvironmentProblem where there may be a run.json that is not for us to read."""
    path = directory / "run.json"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except PermissionError as error:
        raise atomic.unreadable(error, path) from error
    except OSError:  # there is none
        return


def refuse_unwritable(directory: Path) -> None:
    """Raise EnvironmentProblem where no file can be made: the log alone could grow, and its hash would not hold."""
    if not os.access(directory, os.W_OK, effective_ids=True):
        raise atomic.problem(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), directory)


def refuse_odd(directory: Path) -> None:
    """Raise ConfigError where a run directory holds a pipe, a socket or a device: who reads one may wait for ever."""
    for path in sorted(directory.iterdir()):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is neither a file nor a folder, and could not be read to its end; remove it")


def refuse_links(directory: Path, *names: str) -> None:
    """Raise ConfigError where one of these entries of a run directory, or any where none is named, is a link.

    The tool makes none there, and what is written or pruned through one happens to somebody else's files.
    """
    links = [path for path in sorted(directory.iterdir()) if path.is_symlink() and (not names or path.name in names)]
    if links:
        raise ConfigError(
            f"{links[0]} is a link to {os.readlink(links[0])}, and a run is complete in itself; "
            "put what it points at in its place, or remove it"
        )


def keeps_its_configuration(info: RunInfo) -> bool:
    """Say whether config.toml is as it was written when the run was last begun; True where that was not kept."""
    begun = info.facts.get("config_sha256")
    return begun is None or begun == hashlib.sha256((info.dir / "config.toml").read_bytes()).hexdigest()


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl; a last line that a kill cut short is left out.

    Raises ConfigError for a whole line that is no JSON object.
    """
    path = directory / "metrics.jsonl"
    try:
        with atomic.readable(path):
            lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line end is not whole
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{number}: this line is not a JSON object")
        records.append(record)
    return records


def checksums(directory: Path) -> str:
    """Return the lines of SHA256SUMS, as `sha256sum -c` reads them: every regular file but what `report` may add."""
    lines = []
    for folder, inner, names in os.walk(directory, onerror=unread):
        top = Path(folder) == directory
        inner[:] = sorted(name for name in inner if not (top and name in UNHASHED))
        for name in sorted(names):
            path = Path(folder) / name
            if path.is_symlink() or not path.is_file() or atomic.is_temporary(path) or (top and name in UNHASHED):
                continue
            with atomic.readable(path), open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(directory).as_posix()}\n")
    return "".join(lines)


def unlisted(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield what lies in a run directory and no list of hashes can name: links, and folders that hold nothing."""
    for folder, inner, names in os.walk(directory, onerror=unread):
        for name in sorted((*inner, *names)):
            path = Path(folder) / name
            shown = path.relative_to(directory).as_posix()
            if path.is_symlink():
                yield shown, f"a link to {os.readlink(path)}"
            elif name in inner and not (shown in UNHASHED or any(path.iterdir())):
                yield shown, "an empty folder"


def tidy(directory: Path) -> None:
    """Remove a run's reserve, and folders whose files then were not written: no hash could stand for them."""
    (directory / RESERVE).unlink(missing_ok=True)
    for folder, _, _ in os.walk(directory, topdown=False):
        if Path(folder) != directory:
            with suppress(OSError):  # it holds something
                os.rmdir(folder)


def unread(error: OSError) -> None:
    """Raise EnvironmentProblem for a folder that cannot be listed: what it holds is neither there nor missing."""
    with atomic.readable(Path(error.filename)):
        raise error


@contextmanager
def unaltered(info: RunInfo) -> Iterator[None]:
    """Turn what altered files provoke in the block into one sentence; where no file was altered the fault is ours."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as problem:
        sums = info.dir / "SHA256SUMS"
        if sums.is_file() and sums.read_bytes() == checksums(info.dir).encode():
            raise
        found = f"{type(problem).__name__}: {problem}"
        raise ConfigError(
            f"{info.dir}: its files do not hold what a run of {info.command} leaves ({found}); "
            "rmsnorm audit says which were altered"
        ) from problem


@contextmanager
def alone(runs_dir: Path) -> Iterator[None]:
    """Let one process at a time change the links of a runs folder, where its file system has locks."""
    handle = os.open(runs_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # without locks the links are still replaced in one step each
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def point_latest(runs_dir: Path, name: str, command: str) -> None:
    """Make `latest` and `latest-<command>` relative links to this run, unless they already point at a newer one."""
    with alone(runs_dir):
        for link in ("latest", f"latest-{command}"):
            path = runs_dir / link
            if path.is_symlink():
                target = os.readlink(path)
                if age(target) > age(name) and (runs_dir / target).is_dir():
                    continue
            elif path.exists():  # somebody's own file or folder
                continue
            atomic.link(path, name)


def stale_links(runs_dir: Path, runs: Sequence[RunInfo], gone: Container[str] = ()) -> list[tuple[str, str | None]]:
    """Return the `latest` links that point at nothing, or at a run in `gone`, each with the run it should point at.

    That is the newest of `runs` (oldest first) that is not in `gone`, of the link's command; None where there is
    none, and for a draft of a link that a killed process left.
    """
    stale: list[tuple[str, str | None]] = []
    for name in sorted(os.listdir(runs_dir)):
        path = runs_dir / name
        if not path.is_symlink():
            continue
        if name.startswith(".latest") and atomic.is_temporary(path):
            stale.append((name, None))
        elif (name == "latest" or name.startswith("latest-")) and (os.readlink(path) in gone or not path.exists()):
            command = name.removeprefix("latest").removeprefix("-")
            left = [info.dir.name for info in runs if info.dir.name not in gone and command in ("", info.command)]
            stale.append((name, left[-1] if left else None))
    return stale


def repoint(runs_dir: Path, name: str, target: str | None) -> None:
    """Point a link of the runs folder at a run, or remove it; what is no link any more is left alone."""
    path = runs_dir / name
    with alone(runs_dir):
        if path.is_symlink() and target is None:
            path.unlink()
        elif path.is_symlink():
            atomic.link(path, str(target))
