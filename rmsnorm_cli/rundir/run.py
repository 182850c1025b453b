"""The run directory: made exclusively, filled while a command works, finished with a status whatever happens.

    run.json        what ran, where, when, and how it ended     config.toml   the resolved settings
    env.json        versions, device, driver, git               metrics.jsonl one record per case, step or sample
    log.txt         dated lines                                 checkpoints/  whole files only
    SHA256SUMS      of all but figures/ and report.html

JSON here is strict: a number that is not finite is the string "nan", "inf" or "-inf". All times are UTC.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_cli.errors import ConfigError, EnvironmentProblem
from rmsnorm_cli.results import Outcome, strict_json
from rmsnorm_cli.rundir import atomic, history, interrupts, liveness
from rmsnorm_cli.rundir.bookends import begin, completed, now, stamp
from rmsnorm_cli.rundir.history import find, point_latest, read_info

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.environment import Device


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
        run.records()  # what is damaged is refused before anything is changed
        refuse(info.dir, recorded)
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


def rank() -> int:
    """Return this process's rank under torchrun, else 0."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and "WORLD_SIZE" in os.environ else 0
