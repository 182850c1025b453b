"""From a parsed command line to an exit code: load, open the run, call the command, hand its outcome on."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_cli.console import Console
from rmsnorm_cli.errors import ConfigError, EnvironmentProblem, Interrupted, RmsnormError, exit_code_of, sentence
from rmsnorm_cli.results import Outcome
from rmsnorm_cli.rundir import interrupts
from rmsnorm_cli.rundir.run import open_run, rank, reopen

if TYPE_CHECKING:
    from rmsnorm_cli.environment import Device

SCHEMA = 1  # of the --json document; a change of a field's meaning raises it


@dataclass(frozen=True)
class Request:
    """One running command as it was asked for. `options` are dotted TOML keys; `direct` go to the command itself."""

    command: str
    config: Path | None
    sets: Sequence[str]
    options: Mapping[str, Any]
    direct: Mapping[str, Any]
    quiet: bool
    dry_run: bool
    json: bool


def execute(request: Request) -> int:
    """Run a command in a run directory of its own and return the exit code."""
    from rmsnorm_cli import config
    from rmsnorm_cli.config import callables

    refuse_nowhere()
    leads = rank() == 0  # under torchrun rank 0 speaks for all
    if request.command != "train" and not leads:
        raise ConfigError(
            f"RANK is {rank()}, and {request.command} is one process's work; start it without torchrun, or unset RANK"
        )
    console = Console(json=request.json and leads, quiet=request.quiet or not leads, silent=not leads)
    settings = config.load(
        request.command, file=request.config, environ=os.environ, sets=list(request.sets), options=request.options
    )
    if request.direct.get("resume"):
        refuse_changes(request)
    command = importlib.import_module(f"rmsnorm_cli.commands.{request.command}")
    if hasattr(command, "check"):
        command.check(settings)  # what only the command knows to be wrong is said before anything is made
    callables.refuse_unreadable(settings.run.impl)
    if request.direct.get("list"):
        return _finish(console, request.command, command.listing(settings), {})
    if request.dry_run:
        return _dry_run(console, settings, command)

    from rmsnorm_cli import environment

    device = environment.choose_device(settings.run.device, settings.folder)
    facts = environment.snapshot(device)
    from rmsnorm_cli.kernels import peers  # the device decides how kernels are imported

    peers.refuse_missing(settings.run.impl)
    if resume := request.direct.get("resume"):
        steps = settings.train.steps if request.options.get("train.steps") is not None else None
        opened = reopen(resume, settings, sys.argv, device, facts, steps, command.refuse_unusable)
    else:
        opened = open_run(settings, sys.argv, device, facts)
    with opened as run, console.reserved():
        where = executing(run.settings.run.impl, device)
        console.note(f"rmsnorm {request.command} on {where}; run directory {run.dir}")
        extra = {name: value for name, value in request.direct.items() if name not in ("resume", "list")}
        try:
            outcome: Outcome = command.run(run.settings, run, console, device, **extra)
        except BaseException as problem:
            if run.writes:  # another rank's directory is gone by then
                problem.run_dir = str(run.dir)  # type: ignore[attr-defined]
            raise
        if request.command in ("verify", "gradcheck"):
            from rmsnorm_cli.junit import junit

            run.write("junit.xml", junit(outcome.results, request.command))
        run.finish(outcome)
    return _finish(console, request.command, outcome, {"run_dir": str(run.dir), "environment": facts})


def refuse_nowhere() -> None:
    """Raise EnvironmentProblem where the current folder is gone: every path of a command begins there."""
    try:
        os.getcwd()
    except OSError as problem:
        raise EnvironmentProblem(
            "the current folder was removed, or cannot be reached; change into one that is there: cd"
        ) from problem


def executing(names: Sequence[str], device: "Device") -> str:
    """Say what executes these implementations; a stranger's may hold Triton kernels, which is not known yet."""
    from rmsnorm_cli.kernels import implementation
    from rmsnorm_cli.kernels.foreign import IN_PROCESS

    ours = [implementation(name) for name in names if name in IN_PROCESS]
    if device.execution == "cuda" or any(impl.triton for impl in ours):
        return f"{device.name} ({device.execution})"
    return "CPU (cpu)" if len(ours) == len(names) else "CPU (cpu; Triton kernels, if it has any, by the interpreter)"


def refuse_changes(request: Request) -> None:
    """Raise ConfigError where a resumed run is asked to be another one: it continues with what it recorded."""
    free = ("run.dir", "run.device", "train.steps")
    given = [key for key, value in request.options.items() if value is not None and key not in free]
    given += [f"--set {word}" for word in request.sets] + ([f"--config {request.config}"] if request.config else [])
    if given:
        raise ConfigError(
            [f"{what}: a resumed run keeps its recorded configuration; expected none but --steps" for what in given]
        )


def aside(command: str, given: Mapping[str, Any], *, runs_dir: str | None, json: bool) -> int:
    """Run one of the commands that leave no run directory: clean, doctor, report, audit."""
    from rmsnorm_cli import config

    refuse_nowhere()
    console = Console(json=json)
    folder = config.runs_folder(runs_dir, os.environ)
    module = importlib.import_module(f"rmsnorm_cli.commands.{command}")
    outcome: Outcome = getattr(module, command)(**given, runs_dir=folder, console=console)
    return _finish(console, command, outcome, {"run_dir": None})


def _dry_run(console: Console, settings: Any, command: Any) -> int:
    from rmsnorm_cli import config

    plan = [f"command: {settings.command}", *(command.plan(settings) if hasattr(command, "plan") else ())]
    resolved = config.to_toml(settings)
    if console.json:
        console.document(
            {"schema": SCHEMA, "command": settings.command, "status": "dry-run", "config": resolved, "plan": plan}
        )
    else:
        console.verdict(resolved + "\n" + "\n".join(f"# {line}" for line in plan))
    return _told(console, 0)


def _finish(console: Console, command: str, outcome: Outcome, facts: Mapping[str, Any]) -> int:
    console.outcome(outcome)
    counted = ", ".join(f"{number} {status}" for status, number in outcome.counts.items() if number)
    where = f" ({facts['run_dir']})" if facts.get("run_dir") else ""
    console.verdict(f"{command}: {outcome.status}: {outcome.said or counted or 'nothing was judged'}{where}")
    console.document(
        {
            "schema": SCHEMA,
            "command": command,
            "status": outcome.status,
            "execution": outcome.execution,
            "exit_code": outcome.exit_code,
            "run_dir": None,
            "counts": dict(outcome.counts),
            "environment": {},
            **facts,
            **outcome.summary,
        }
    )
    return _told(console, outcome.exit_code)


def _told(console: Console, code: int) -> int:
    """Return the exit code, which is no success where its evidence did not reach stdout."""
    lost = console.lost()
    if lost:
        console.error(lost)
    return EnvironmentProblem.exit_code if lost and code == 0 else code


def guarded(call: Callable[[], Any], arguments: Sequence[str], early: Sequence[int] = ()) -> int:
    """Parse, then run what was asked for; turn whatever is raised into one clear sentence and an exit code.

    `early` holds the signals that came before anything of ours could take them.
    """
    with interrupts.handled(_interrupt):
        try:
            if early:
                raise Interrupted(early[0])
            with interrupts.deferred():  # Typer makes 130 of whatever interrupts it
                asked = call()
            code = asked() if callable(asked) else asked
            return code if isinstance(code, int) else 0
        except SystemExit:  # click's, where the reader of a help page has gone
            return 0
        except (Exception, KeyboardInterrupt) as problem:
            try:
                return _failed(problem, arguments)
            except (
                KeyboardInterrupt
            ):  # one more signal: the sentence can wait for no longer, the first one's code stays
                return exit_code_of(problem) or RmsnormError.exit_code


def _interrupt(number: int, frame: object) -> None:
    """Let every `finally` run, and the exit code say which signal it was."""
    raise Interrupted(number)


def _failed(problem: BaseException, arguments: Sequence[str]) -> int:
    code = exit_code_of(problem)
    problems = problem.problems if isinstance(problem, ConfigError) else [sentence(problem)]
    if code is None:  # a fault of ours
        code = RmsnormError.exit_code
        where = traceback.extract_tb(problem.__traceback__)[-1]
        problems = [
            f"internal error: {type(problem).__name__}: {problem} ({Path(where.filename).name}:{where.lineno})",
            "this is a fault of rmsnorm itself; RMSNORM_TRACEBACK=1 in the environment shows where",
        ]
        if os.environ.get("RMSNORM_TRACEBACK") == "1":
            traceback.print_exception(problem)
    console = Console(json="--json" in arguments)
    console.error("\n".join(problems))
    run_dir = getattr(problem, "run_dir", None)
    if run_dir:
        console.warn(f"the run directory says how far it came: {run_dir}")
    console.document(
        {
            "schema": SCHEMA,
            "command": next((word for word in arguments if not word.startswith("-")), ""),
            "status": "interrupted" if code > 128 else "error",
            "execution": None,
            "exit_code": code,
            "run_dir": run_dir,
            "counts": {},
            "environment": {},
            "errors": problems,
        }
    )
    return _told(console, code)
