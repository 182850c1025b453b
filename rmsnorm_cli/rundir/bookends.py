"""What stands at both ends of a run: its first records, and status and hashes, however it ends."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rmsnorm_cli import __version__
from rmsnorm_cli.errors import EnvironmentProblem, Interrupted, RmsnormError, exit_code_of, sentence
from rmsnorm_cli.results import strict_json
from rmsnorm_cli.rundir import atomic, history, interrupts, liveness
from rmsnorm_cli.rundir.history import RESERVE, checksums

if TYPE_CHECKING:
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.rundir.run import Run

RESERVED_BYTES = 64 * 1024  # in .reserve: room kept for the last words of a run whose disk fills up


def begin(
    run: "Run",
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
def completed(run: "Run", lock: int | None) -> Iterator[None]:
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


def close(run: "Run", status: str, exit_code: int, message: str) -> None:
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


def now() -> datetime:
    """Return the time in UTC."""
    return datetime.now(UTC)


def stamp(time: datetime) -> str:
    """Return a time as run.json and log.txt have it: ISO 8601, milliseconds, UTC."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
