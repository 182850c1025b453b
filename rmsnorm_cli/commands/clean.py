"""`rmsnorm clean`: remove run directories and the tool's own kernel cache, and nothing else.

What is ours says so itself: a run directory holds a run.json of this tool, the cache a CACHEDIR.TAG. Every step is
taken relative to an open handle of the runs folder, by names of one component, without following a link
(`shutil.rmtree` is safe against links put in its way where it says `avoids_symlink_attacks`, as on Linux). A run's
run.json goes last, so that a removal cut short can be taken up again.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rmsnorm_cli.console import Console
from rmsnorm_cli.environment import CACHE, TAG_NAME, is_our_cache
from rmsnorm_cli.errors import ConfigError, EnvironmentProblem
from rmsnorm_cli.results import STATUSES, Outcome, Table
from rmsnorm_cli.rundir import liveness
from rmsnorm_cli.rundir.history import RunInfo, list_runs, read_facts, repoint, stale_links, unreadable

SCOPES = ("generated", "cache", "all")
SECONDS = {"m": 60, "h": 3600, "d": 86_400}
UNKNOWN_REST = 86_400.0  # seconds a run of unknown process must have been silent before it may go


@dataclass(frozen=True)
class Item:
    """One thing that goes: its name in the runs folder, what it is, which (device, inode), its bytes, a remark."""

    name: str
    kind: Literal["run", "cache", "link"]
    identity: tuple[int, int] = (0, 0)
    bytes: int = 0
    remark: str = ""


@dataclass(frozen=True)
class Plan:
    """What goes, and what stays although its scope was asked for: (name, reason)."""

    going: tuple[Item, ...]
    staying: tuple[tuple[str, str], ...]


def clean(
    *,
    scope: str = "generated",
    keep: int = 0,
    older_than: str | None = None,
    dry_run: bool = False,
    yes: bool = False,
    runs_dir: Path,
    console: Console,
) -> Outcome:
    """Remove what `scope` names (generated, cache, all) from the runs folder, after showing the list and asking.

    `keep`: the newest N runs stay, whatever their command. `older_than`: only runs that ended longer ago than that
    (30m, 12h, 7d). `dry_run` lists exactly what would go. Raises ConfigError for wrong words, for a runs folder that
    is a link, and where nobody can be asked and `yes` is not given.
    """
    if scope not in SCOPES:
        raise ConfigError(f"--scope: {scope!r} is none of {', '.join(SCOPES)}")
    if keep < 0:
        raise ConfigError(f"--keep: {keep} is below 0")
    seconds = None if older_than is None else duration(older_than)
    with opened(runs_dir) as folder:
        if folder is None:
            return verdict(Plan((), ()), f"nothing to remove: {runs_dir} is not there", dry_run=dry_run)
        plan = make_plan(folder, scope, keep, seconds)
        console.table(shown(plan, runs_dir))
        if not plan.going:
            return verdict(plan, "nothing to remove", dry_run=dry_run)
        if dry_run:
            return verdict(plan, f"{len(plan.going)} would go, nothing was removed (--dry-run)", dry_run=True)
        if not yes and not agreed(plan):
            return verdict(plan, "nothing was removed", status="interrupted")
        removed, problems = remove_all(folder, plan.going)
    status: Literal["passed", "error"] = "error" if problems else "passed"
    return verdict(plan, f"{len(removed)} removed", removed=removed, problems=problems, status=status)


def duration(text: str) -> float:
    """Return the seconds of 30m, 12h or 7d."""
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", text.strip())
    if not found:
        raise ConfigError(f"--older-than: {text!r} is no duration; expected a whole number and m, h or d, such as 7d")
    return float(found[1]) * SECONDS[found[2]]


@contextmanager
def opened(runs_dir: Path) -> Iterator[int | None]:
    """Open the runs folder itself, None where there is none; ConfigError where it is a link or a file."""
    try:
        folder = os.open(runs_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        if runs_dir.is_symlink():
            raise ConfigError(
                f"{runs_dir} is a link, and clean follows none; name the folder itself: --runs-dir {runs_dir.resolve()}"
            ) from error
        if isinstance(error, NotADirectoryError):
            raise ConfigError(f"{runs_dir} is not a folder; name the runs folder: --runs-dir") from error
        raise EnvironmentProblem(f"{runs_dir} cannot be opened ({error.strerror})") from error
    try:
        yield folder
    finally:
        os.close(folder)


def inside(folder: int) -> Path:
    """Return a path to the open folder itself, whatever has taken its name meanwhile."""
    return Path(f"/proc/self/fd/{folder}")


def make_plan(folder: int, scope: str, keep: int, older_than: float | None) -> Plan:
    """Decide what goes and what stays, without changing anything."""
    runs = list_runs(inside(folder))
    asked: list[tuple[str, Literal["run", "cache"], str | None]] = []
    if scope != "cache":
        newest = {info.dir.name for info in runs[-keep:]} if keep else set()
        for info in runs:
            name = info.dir.name
            asked.append((name, "run", f"among the newest {keep}" if name in newest else why_stay(info, older_than)))
    if scope != "generated" and os.path.lexists(inside(folder) / CACHE):
        asked.append((CACHE, "cache", why_cache_stays(folder, runs)))
    going: list[Item] = []
    staying: list[tuple[str, str]] = []
    for name, kind, reason in asked:
        entry = None if reason else item(folder, name, kind)
        if entry:
            going.append(entry)
        else:
            staying.append((name, reason or "another file system is mounted in it"))
    if scope != "cache":
        staying += [(name, "its run.json is missing, damaged or not readable: look, and remove it yourself")
                    for name in unreadable(inside(folder))]  # fmt: skip
        for name, target in stale_links(inside(folder), runs, {entry.name for entry in going}):
            going.append(Item(name, "link", remark=f"will point at {target}" if target else "goes"))
    return Plan(tuple(going), tuple(staying))


def why_cache_stays(folder: int, runs: Sequence[RunInfo]) -> str | None:
    """Return why the cache stays, or None."""
    if not is_our_cache(inside(folder) / CACHE):
        return "not made by rmsnorm"
    return next((f"{info.dir.name} may be using it" for info in runs if info.alive is not False), None)


def why_stay(info: RunInfo, older_than: float | None) -> str | None:
    """Return why a run stays, or None."""
    if info.alive:
        return "still running"
    quiet = time.time() - max(
        (path.lstat().st_mtime for path in [info.dir, info.dir / "metrics.jsonl"] if path.exists()), default=0.0
    )
    if info.alive is None and quiet < UNKNOWN_REST:
        return "may be running on another machine: it wrote within a day"
    if older_than is None:
        return None
    try:
        ended = datetime.fromisoformat(info.finished or info.started)
        age = (datetime.now(UTC) - (ended if ended.tzinfo else ended.replace(tzinfo=UTC))).total_seconds()
    except ValueError:
        age = quiet
    return None if age > older_than else "not old enough"


def item(folder: int, name: str, kind: Literal["run", "cache"]) -> Item | None:
    """Return a directory as an Item with its size, or None where another file system is mounted inside."""
    top = os.stat(name, dir_fd=folder, follow_symlinks=False)
    size = 0
    for _, _, files, handle in os.fwalk(name, dir_fd=folder, follow_symlinks=False):
        if os.fstat(handle).st_dev != top.st_dev:
            return None
        for file in files:
            with suppress(FileNotFoundError):  # it may go while it is counted
                size += os.stat(file, dir_fd=handle, follow_symlinks=False).st_size
    return Item(name, kind, (top.st_dev, top.st_ino), size)


def remove_all(folder: int, going: Sequence[Item]) -> tuple[list[str], list[tuple[str, str]]]:
    """Remove item by item; return the names that went and, for those that did not, (name, reason)."""
    removed: list[str] = []
    problems: list[tuple[str, str]] = []
    for entry in going:
        if entry.kind != "link":
            reason = remove_directory(folder, entry)
            if reason is None:
                removed.append(entry.name)
            else:
                problems.append((entry.name, reason))
    planned = {entry.name for entry in going if entry.kind == "link"}
    for name, target in stale_links(inside(folder), list_runs(inside(folder))):  # by what is there now
        if name in planned:
            try:
                repoint(inside(folder), name, target)
                removed.append(name)
            except (OSError, EnvironmentProblem) as error:
                problems.append((name, str(error)))
    return removed, problems


def remove_directory(folder: int, entry: Item) -> str | None:
    """Remove one planned directory; return why it did not go, or None."""
    try:
        handle = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:  # another clean was faster
        return None
    except OSError as error:
        return error.strerror
    try:
        now = os.fstat(handle)
        if (now.st_dev, now.st_ino) != entry.identity or (entry.kind == "run" and read_facts(handle) is None):
            return "something else has taken its name"
        if not liveness.lock(handle):
            return "a process has taken it up"
        empty(handle, last="run.json" if entry.kind == "run" else TAG_NAME)
        os.rmdir(entry.name, dir_fd=folder)
    except OSError as error:
        return f"{error.strerror} ({error.filename})"
    finally:
        os.close(handle)
    return None


def empty(handle: int, last: str) -> None:
    """Remove all that an open directory holds, `last` at the end; links go, what they point at stays."""
    with os.scandir(handle) as found:
        inner = sorted((entry.name == last, entry.name, entry.is_dir(follow_symlinks=False)) for entry in found)
    for _, name, is_folder in inner:
        if is_folder:
            shutil.rmtree(name, dir_fd=handle)
        else:
            os.unlink(name, dir_fd=handle)


def agreed(plan: Plan) -> bool:
    """Ask on the terminal; ConfigError where there is none."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError("clean asks before it removes, and there is no terminal to ask on; add --yes or --dry-run")
    sys.stderr.write(f"Remove these {len(plan.going)}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def shown(plan: Plan, runs_dir: Path) -> Table:
    """Return the plan as a table: what goes, then what stays and why."""
    rows: list[tuple[str, str, str, str]]
    rows = [(entry.name, entry.kind, readable(entry.bytes), entry.remark or "goes") for entry in plan.going]
    rows += [(name, "", "", f"stays: {reason}") for name, reason in plan.staying]
    printable = tuple((name if name.isprintable() else ascii(name), *rest) for name, *rest in rows)
    total = readable(sum(entry.bytes for entry in plan.going))
    return Table(f"clean {runs_dir}", ("name", "kind", "size", "what happens"), printable, f"{total} in all")


def readable(size: int) -> str:
    """Return a number of bytes in a unit that leaves few digits."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def verdict(
    plan: Plan,
    said: str,
    *,
    dry_run: bool = False,
    removed: Sequence[str] = (),
    problems: Sequence[tuple[str, str]] = (),
    status: Literal["passed", "interrupted", "error"] = "passed",
) -> Outcome:
    """Return the outcome; `passed` counts what went, `skipped` what stayed, `error` what should have gone.

    `said` is what the last line says, with how many stay.
    """
    counted = {"passed": len(removed), "skipped": len(plan.staying), "error": len(problems)}
    counts: dict[str, int] = {name: counted.get(name, 0) for name in STATUSES}
    summary = {
        "dry_run": dry_run,
        "listed": [entry.name for entry in plan.going],
        "bytes": sum(entry.bytes for entry in plan.going),
        "removed": list(removed),
        "kept": [{"name": name, "reason": reason} for name, reason in plan.staying],
        "problems": [{"name": name, "reason": reason} for name, reason in problems],
    }
    notes = tuple(f"{name} did not go: {reason}" for name, reason in problems)
    said += f", {len(problems)} did not go" if problems else ""
    said += f", {len(plan.staying)} stay{'s' if len(plan.staying) == 1 else ''}" if plan.staying else ""
    return Outcome(status, "none", counts, summary, notes=notes, said=said)
