"""The run directory: made exclusively, filled while a command works, finished with a status whatever happens.

    run.json        what ran, where, when, and how it ended     config.toml   the resolved settings
    env.json        versions, device, driver, git               metrics.jsonl one record per case, step or sample
    log.txt         dated lines                                 checkpoints/  whole files only
    SHA256SUMS      of all but figures/ and report.html

JSON here is strict: a number that is not finite is the string "nan", "inf" or "-inf". All times are UTC.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_cli import __version__
from rmsnorm_cli.errors import ConfigError, EnvironmentProblem, Interrupted, RmsnormError, exit_code_of, sentence
from rmsnorm_cli.results import Outcome, strict_json
from rmsnorm_cli.rundir import atomic, history, interrupts, liveness
from rmsnorm_cli.rundir.history import RESERVE, checksums, find, point_latest, read_info

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.environment import Device

RESERVED_BYTES = 64 * 1024  # in .reserve: room kept for the last words of a run whose disk fills up


class Run:
    """One run directory, as a command sees it while it works. Made by `open_run` and `reopen`.

    `settings` are the run's (the recorded ones after a resume); `resumed` says whether it continues an earlier start.
    Under torchrun only rank 0 writes; the other ranks' records and files go nowhere.
    """

    def __init__(self, directory: Path, settings: "Settings", *, resumed: bool = False, writes: bool = True) -> None:
        self.dir, self.settings, self.resumed, self.writes = directory, settings, resumed, writes
        self.outcome: Outcome | None = None
        self._facts: dict[str, Any] = {}
        self._metrics = self.path("metrics.jsonl")

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints, made on first use."""
        folder = self.path("checkpoints")
        with atomic.explained(folder):
            folder.mkdir(exist_ok=True)
        return folder

    def path(self, name: str) -> Path:
        """Return the path of a file of this run; ValueError for a name that leaves the directory."""
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name!r} is not a name inside a run directory")
        return self.dir / name

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a whole file of this run atomically and return its path; folders in the name are made."""
        path = self.path(name)
        if self.writes:
            with atomic.explained(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(path, content)
        return path

    def record(self, values: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl: a whole line, given to the system at once, or nothing."""
        if self.writes:
            atomic.append_line(self._metrics, strict_json(values, indent=None))

    def log(self, text: str) -> None:
        """Append a dated line to log.txt."""
        if self.writes:
            atomic.append_line(self.path("log.txt"), f"{stamp(now())} {' '.join(text.split())}")

    def records(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl so far; a last line that a kill cut short is left out."""
        return history.read_records(self.dir)

    def keep_records(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite metrics.jsonl with the records that are wanted: a resumed command drops what it will do again."""
        if self.writes:
            lines = [strict_json(record, indent=None) + "\n" for record in self.records() if wanted(record)]
            atomic.write(self._metrics, "".join(lines))

    def keep(self, summary: Mapping[str, Any]) -> None:
        """Record what a run that is ended before its outcome has come to."""
        self._facts["summary"] = dict(summary)

    def finish(self, outcome: Outcome) -> None:
        """Say how the command came out; the directory is completed when its `with` block ends."""
        self.outcome = outcome


@contextmanager
def open_run(
    settings: "Settings", argv: Sequence[str], device: "Device", environment: Mapping[str, Any]
) -> Iterator[Run]:
    """Make a run directory under settings.run.dir and complete it, with status and hashes, when the block ends.

    Raises EnvironmentProblem where the folder cannot be written.
    """
    if rank() > 0:
        with tempfile.TemporaryDirectory(prefix="rmsnorm-rank-") as nowhere:
            yield Run(Path(nowhere), settings, writes=False)
        return
    runs_dir = settings.folder
    with atomic.elsewhere():
        directory = make_directory(runs_dir, settings.command, settings.run.name)
    run = Run(directory, settings)
    begun = False
    try:
        with completed(run, liveness.hold(directory)):
            with interrupts.deferred(), atomic.elsewhere():
                begin(run, argv, device, environment, sessions=[])
                begun = True
            try:
                point_latest(runs_dir, directory.name, settings.command)
            except (OSError, EnvironmentProblem) as error:  # a disk without links, say: the run itself can do without
                run.log(f"the latest links were left as they are: {error}")
            yield run
    finally:
        if not begun:  # nothing has run yet: no half directory stays
            with interrupts.ignored():
                shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def reopen(
    resume: str | Path,
    settings: "Settings",
    argv: Sequence[str],
    device: "Device",
    environment: Mapping[str, Any],
    steps: int | None = None,
    refuse: Callable[[Path, "Settings"], object] = lambda directory, recorded: None,
) -> Iterator[Run]:
    """Continue in a run directory, named by path or by its name in settings.run.dir, with the settings it recorded.

    `steps` replaces the recorded number of training steps by a larger one. Raises ConfigError where it is smaller, and
    where this is no run of this command or is still being written; EnvironmentProblem where it cannot be written; what
    `refuse` raises for the directory and the settings.
    """
    from rmsnorm_cli import config

    info = find(resume, settings.folder)
    if info.command != settings.command:
        raise ConfigError(f"--resume {resume}: that run is of {info.command}, not of {settings.command}")
    if info.facts.get("execution") != device.execution:
        before = info.facts.get("execution")
        raise ConfigError(f"--resume {resume}: that run executed on {before}, and this device is {device.execution}")
    recorded = config.load(info.command, file=info.dir / "config.toml")
    if not history.keeps_its_configuration(info):  # an emptied one would load, as the defaults
        raise ConfigError(
            f"--resume {resume}: {info.dir / 'config.toml'} is not as it was written; put back a copy of it"
        )
    if steps is not None:
        if steps < recorded.train.steps:
            done = f"the {recorded.train.steps} steps of the run that is resumed"
            raise ConfigError(f"--steps: {steps} is less than {done}; expected as many or more")
        recorded = replace(recorded, table=recorded.train.model_copy(update={"steps": steps}))
    run = Run(info.dir, recorded, resumed=True, writes=rank() == 0)
    if not run.writes:
        yield run
        return
    with atomic.explained(info.dir):
        lock = None if info.alive else liveness.hold(info.dir)
    if lock is None:
        raise ConfigError(f"--resume {resume}: a process is still working in that run; stop it first")
    facts = (read_info(info.dir) or info).facts  # as they are now that nobody else can change them
    run._facts = dict(facts)
    try:
        run.records(), refuse(info.dir, recorded)  # what is damaged is refused before anything is changed
    except BaseException:
        liveness.release(lock)
        raise
    with completed(run, lock):
        with atomic.explained(info.dir):
            for leftover in (*filter(atomic.is_temporary, info.dir.iterdir()), run.path("SHA256SUMS")):
                leftover.unlink(missing_ok=True)
        run.keep_records(lambda record: True)  # whole lines only
        earlier = {key: facts.get(key) for key in ("argv", "started", "finished", "status", "exit_code")}
        begin(run, argv, device, environment, sessions=[*facts.get("sessions", []), earlier])
        ended = "was killed" if earlier["status"] == "running" else f"ended as {earlier['status']}"
        run.log(f"resumed; the earlier start {ended}")
        yield run


def make_directory(runs_dir: Path, command: str, name: str) -> Path:
    """Make `runs_dir`/<UTC time>-<command>[-name] that did not exist before; a number tells equal ones apart."""
    assert "/" not in name, "the configuration lets no such name through"
    stem = "-".join(filter(None, (f"{now():{history.STAMP}}", command, name)))
    with atomic.explained(runs_dir):
        runs_dir.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        directory = runs_dir / (stem if number == 1 else f"{stem}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise atomic.problem(error, runs_dir) from error
        return directory
    raise EnvironmentProblem(f"{runs_dir} holds 9,999 runs called {stem}; run rmsnorm clean")


def begin(
    run: Run,
    argv: Sequence[str],
    device: "Device",
    environment: Mapping[str, Any],
    sessions: list[dict[str, Any]],
) -> None:
    """Write what is known before the command works: run.json with status running, config.toml, env.json."""
    from rmsnorm_cli import config

    home = re.compile(rf"(^|=){re.escape(os.path.expanduser('~'))}(?=/|$)")  # its name is nobody else's business
    run._facts = {
        "schema": history.SCHEMA,
        "tool": history.TOOL,
        "version": __version__,
        "command": run.settings.command,
        "argv": ["rmsnorm", *(home.sub(r"\1~", word) for word in argv[1:])],  # argv[0] is where it is installed
        "name": run.settings.run.name,
        "status": "running",
        "exit_code": None,
        "message": "",
        "started": stamp(now()),
        "finished": None,
        "seed": run.settings.run.seed,
        "device": {"asked": device.asked, "torch_device": device.torch_device, "name": device.name},
        "execution": device.execution,
        "process": liveness.identity(),
        "sessions": sessions,
        "counts": {},
        "summary": {},
    }
    resolved = config.to_toml(run.settings)
    run._facts["config_sha256"] = hashlib.sha256(resolved.encode()).hexdigest()
    atomic.write(run.path("run.json"), strict_json(run._facts) + "\n")
    atomic.write(run.path("config.toml"), resolved)
    atomic.write(run.path("env.json"), strict_json(environment) + "\n")
    with atomic.explained(run.path(RESERVE)):
        run.path(RESERVE).write_bytes(os.urandom(RESERVED_BYTES))  # random: a compressing disk must keep its size
        run.path("metrics.jsonl").touch()
    run.log(f"{run.settings.command} started on {device.name} ({device.execution})")


@contextmanager
def completed(run: Run, lock: int | None) -> Iterator[None]:
    """Write status, exit code and hashes when the block ends, however it ends; then let the directory go."""
    try:
        with interrupts.raised():
            try:
                yield
            except BaseException as error:
                # The error on its way says more than a second one about the disk, or than one more signal.
                with suppress(RmsnormError, Interrupted):
                    close(run, *verdict_of(error))
                raise
            said: tuple[str, int, str] = ("error", RmsnormError.exit_code, "the command ended without an outcome")
            if run.outcome is not None:
                run._facts |= {"counts": dict(run.outcome.counts), "summary": dict(run.outcome.summary)}
                said = run.outcome.status, run.outcome.exit_code, ""
            try:
                close(run, *said)
            except Interrupted as late:  # the process will end by it, so the record says the same
                with suppress(RmsnormError, Interrupted):
                    close(run, *verdict_of(late))
                raise
    finally:
        liveness.release(lock)


def close(run: Run, status: str, exit_code: int, message: str) -> None:
    """Write the final run.json and, last, SHA256SUMS; a disk that is full by then turns a pass into an error."""
    with interrupts.deferred():
        run._facts |= {"status": status, "exit_code": exit_code, "message": message, "finished": stamp(now())}
        try:
            with atomic.explained(run.dir):
                history.tidy(run.dir)
                run.log(f"{status}, exit code {exit_code}{f': {message}' if message else ''}")
                atomic.write(run.path("run.json"), strict_json(run._facts) + "\n")
                atomic.write(run.path("SHA256SUMS"), checksums(run.dir))
        except (EnvironmentProblem, Interrupted) as problem:  # of signals the second, for which the hashes are left out
            if exit_code == 0:
                run._facts |= dict(zip(("status", "exit_code", "message"), verdict_of(problem), strict=True))
            with suppress(EnvironmentProblem), interrupts.ignored():
                atomic.write(run.path("run.json"), strict_json(run._facts) + "\n")
            raise


def verdict_of(error: BaseException) -> tuple[str, int, str]:
    """Return status, exit code and message of a run that an exception ended."""
    code = exit_code_of(error)
    if code is None:
        return "error", RmsnormError.exit_code, f"{type(error).__name__}: {error}"
    return "interrupted" if code > 128 else "error", code, sentence(error)


def rank() -> int:
    """Return this process's rank under torchrun, else 0."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and "WORLD_SIZE" in os.environ else 0


def now() -> datetime:
    """Return the time in UTC."""
    return datetime.now(UTC)


def stamp(time: datetime) -> str:
    """Return a time as run.json and log.txt have it: ISO 8601, milliseconds, UTC."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
