"""`rmsnorm exercise`: say what a kernel mistake will do, run it, and see which check catches it."""

import re
from typing import TYPE_CHECKING

from rmsnorm_cli import faults
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.exercise import questions, summary
from rmsnorm_cli.results import Outcome, Table

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.console import Console
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.rundir.run import Run


def run(
    settings: "Settings", run: "Run", console: "Console", device: "Device", *, no_input: bool | None = None
) -> Outcome:
    """Do the default exercise, or show one mistake (exercise.fault), or run all of them (exercise.all)."""
    check(settings)
    if settings.exercise.all:
        from rmsnorm_cli.exercise import matrix

        return matrix.run(settings, run, console, device)
    if settings.exercise.fault:
        from rmsnorm_cli.exercise import page

        return page.run(settings, run, console, device)
    from rmsnorm_cli.exercise import lesson

    return lesson.run(settings, run, console, device, bool(no_input))


def plan(settings: "Settings") -> list[str]:
    """Say what would be run, without running it."""
    check(settings)
    if settings.exercise.all:
        return [f"would run {len(faults.CATALOGUE)} changes of the kernels against every gate"]
    if settings.exercise.fault:
        return [f"would run the kernel with the mistake {settings.exercise.fault}"]
    return [f"would ask, then run the kernel with the mistake {faults.DEFAULT}"]


def check(settings: "Settings") -> None:
    """Raise ConfigError, with all problems, for what the command cannot do."""
    problems, asked = [], settings.exercise
    default = not (asked.all or asked.fault)
    if settings.run.impl != ("rowwise",):
        problems.append(
            f"run.impl: {', '.join(settings.run.impl)}, expected rowwise or nothing: a mistake has its kernel, rowwise "
            "or fused, and rmsnorm exercise --list says which"
        )
    if settings.run.rounding != "fp32":
        problems.append(f"run.rounding: {settings.run.rounding}, expected fp32 or nothing: both kernels round so")
    if asked.fault:
        try:
            faults.find(asked.fault)
        except ConfigError as problem:
            problems += problem.problems
    if asked.predict and not default:
        problems.append("exercise.predict: only the default exercise asks; leave out exercise.fault and exercise.all")
    elif asked.predict:
        try:
            questions.read_predictions(asked.predict)
        except ConfigError as problem:
            problems += problem.problems
    if default and settings.operator.eps > questions.LARGEST_EPS:
        problems.append(
            f"operator.eps: {settings.operator.eps:g}, expected at most {questions.LARGEST_EPS:g} in the default "
            "exercise: beside a larger one the wrong mean makes no difference"
        )
    if problems:
        raise ConfigError(problems)


def listing(settings: "Settings") -> Outcome:
    """Return the catalogue: each mistake's name, the pass it is in, and what is wrong; a table for each kernel.

    Raises ConfigError where something is to be run besides.
    """
    asked = settings.exercise
    given = [key for key in ("fault", "predict", "all") if getattr(asked, key)]
    if given:
        raise ConfigError(f"--list: it runs nothing; leave out {' and '.join(f'exercise.{key}' for key in given)}")
    return Outcome(
        status="passed",
        execution="",
        counts={},
        summary={"faults": [describe(fault) for fault in faults.CATALOGUE]},
        tables=tuple(_listed(kernel) for kernel in faults.KERNELS),
        notes=(summary.LETTERS, "one in full: rmsnorm exercise --fault NAME; all against every check: --all"),
        said=f"{len(faults.CATALOGUE)} changes are listed, none was run",
    )


def _listed(kernel: str) -> Table:
    here = [fault for fault in faults.CATALOGUE if fault.kernel == kernel]
    mistakes = sum(not fault.equivalent for fault in here)
    body = tuple(
        (fault.name, "no mistake" if fault.equivalent else fault.stage, re.split(r"[.:;] ", fault.story)[0].rstrip("."))
        for fault in here
    )
    title = f"{kernel}: {mistakes} mistakes, and {len(here) - mistakes} changes that are none"
    caption = f"not shown by the interpreter: {', '.join(fault.name for fault in here if fault.cuda_only)}"
    return Table(title, ("name", "pass", "what is wrong"), body, caption)


def describe(fault: faults.Fault) -> dict[str, object]:
    """Return a mistake as the JSON document lists it."""
    return {
        "name": fault.name,
        "kernel": fault.kernel,
        "pass": fault.stage,
        "story": fault.story,
        "file": fault.file,
        "changes": [{"before": change.before, "after": change.after} for change in fault.changes],
        "seen": list(fault.seen),
        "exposing": fault.exposing.id,
        "exposing_on_gpu": fault.on("cuda").exposing.id,
        "hiding": fault.hiding.id if fault.hiding else None,
        "expected": list(fault.expected),
        "equivalent": fault.equivalent or None,
        "cuda_only": fault.cuda_only or None,
        "interpreter_only": fault.interpreter_only or None,
    }
