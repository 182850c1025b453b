"""`rmsnorm audit`: whether a run directory is what it was when it was finished, and still means what it said.

It re-reads, and executes nothing of what it reads: hashes of all files, the configuration, and for `train` every
checkpoint, whose weights must reproduce the recorded test error from examples made anew from the seed, and whose losses
must be those of metrics.jsonl.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_cli import environment
from rmsnorm_cli.errors import ConfigError, RmsnormError
from rmsnorm_cli.results import CaseResult, Outcome, Status, Table, count, overall, strict_json
from rmsnorm_cli.rundir import atomic, history

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.console import Console
    from rmsnorm_cli.rundir.history import RunInfo

EXACT = 1e-9  # relative, of a float64 error from the same weights: processors differ in the order of a sum only
ROUNDED = 1e-4  # relative, of the fp32 error that the run's own norm and device gave


def audit(run: str, runs_dir: Path, console: "Console") -> Outcome:
    """Re-check a run directory, named by path or by its name in `runs_dir`.

    Raises ConfigError where there is no such run or a process still works in it.
    """
    info = history.find(run, runs_dir)
    if info.alive:
        raise ConfigError(f"{info.dir}: a process is still working in that run; audit it when it has finished")
    console.note(f"audit of {info.dir}: {info.command}, recorded as {info.status}")
    results = tuple(checks(info))
    counts = count(results)
    wrong = [result for result in results if result.status != "passed"]
    rows = tuple((r.gate, r.case, r.status, r.detail) for r in wrong)
    tables = (Table("not as recorded", ("check", "what", "status", "detail"), rows),) if rows else ()
    return Outcome(
        status=overall(counts),
        execution="cpu",
        counts=counts,
        summary={"audited": str(info.dir), "checks": [result.record() for result in results]},
        tables=tables,
        results=results,
    )


def checks(info: "RunInfo") -> Iterator[CaseResult]:
    """Ask everything that can be asked of this run."""
    yield from hashes(info)
    settings, result = configuration(info)
    yield result
    if settings is not None and info.command == "train":
        environment.load("torch")
        yield from checkpoints(info, settings)


def verdict(gate: str, case: str, status: Status, detail: str, worst: float | None = None) -> CaseResult:
    """Make one verdict about the directory."""
    return CaseResult("", "cpu", "properties", gate, "", case, status, worst, detail)


def hashes(info: "RunInfo") -> Iterator[CaseResult]:
    """Hold every file against SHA256SUMS, and the list against the files that are there."""
    sums = info.dir / "SHA256SUMS"
    if not sums.is_file():
        why = "the run was killed" if info.status == "running" else "it has been removed"
        yield verdict("hashes", "SHA256SUMS", "failed", f"there is none ({why}), so no file can be checked")
        return
    with atomic.readable(sums):
        recorded = listed(sums.read_text(encoding="utf-8", errors="replace"))
    present = listed(history.checksums(info.dir))
    for name in sorted(recorded.keys() | present.keys()):
        if name not in present:
            yield verdict("hashes", name, "failed", "listed and not there")
        elif name not in recorded:
            yield verdict("hashes", name, "failed", "there and not listed")
        elif recorded[name] != present[name]:
            yield verdict("hashes", name, "failed", f"its sha256 is {present[name][:16]}…, not {recorded[name][:16]}…")
        else:
            yield verdict("hashes", name, "passed", "as recorded")
    for name, what in history.unlisted(info.dir):
        yield verdict("hashes", name, "failed", f"{what}, which no run of this tool leaves")


def listed(text: str) -> dict[str, str]:
    """Return name -> sha256 of lines as `sha256sum` writes them."""
    pairs = (line.partition("  ") for line in text.splitlines())
    return {name: digest for digest, _, name in pairs}


def configuration(info: "RunInfo") -> "tuple[Settings | None, CaseResult]":
    """Load config.toml as a new run would, and hold its seed against run.json's."""
    from rmsnorm_cli import config

    try:
        settings = config.load(info.command, file=info.dir / "config.toml")
    except (RmsnormError, OSError, LookupError) as problem:
        return None, verdict("configuration", "config.toml", "failed", f"does not load: {problem}")
    if settings.run.seed != info.facts.get("seed"):
        said = f"its seed is {settings.run.seed}, and run.json says {info.facts.get('seed')}"
        return settings, verdict("configuration", "config.toml", "failed", said)
    return settings, verdict("configuration", "config.toml", "passed", "loads")


def checkpoints(info: "RunInfo", settings: "Settings") -> Iterator[CaseResult]:
    """Load every checkpoint safely and compute its test errors again."""
    from rmsnorm_cli import checkpoint, network

    examples = network.partitions(settings.run.seed, settings.data)
    paths = checkpoint.listing(info.dir / "checkpoints")
    if not paths:
        yield verdict("checkpoint", "checkpoints", "failed", "there is none")
    for path in paths:
        try:
            _, state = checkpoint.load(path)
            found = list(reproduced(path.name, state, examples, settings))
            if path == paths[-1]:
                found += [*reported(info, path.name, state), logged(info, path.name, state, settings)]
        except RmsnormError as problem:
            yield verdict("checkpoint", path.name, "failed", str(problem))
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as problem:
            yield verdict("checkpoint", path.name, "failed", f"its state is not a training run's ({problem!r})")
        else:
            yield verdict("checkpoint", path.name, "passed", "loads safely")
            yield from found


def reproduced(
    name: str, state: Mapping[str, Any], examples: Mapping[str, Any], settings: "Settings"
) -> Iterator[CaseResult]:
    """Hold hashes of the examples and test errors of finished phases against those in the checkpoint."""
    from rmsnorm_cli.kernels import implementation
    from rmsnorm_cli.training.plan import implementation_path
    from rmsnorm_cli.training.protocol import test_error64

    for part, data in examples.items():
        same = state["data"][part] == data.sha256
        detail = f"the {part} examples of seed {settings.run.seed} {'are' if same else 'are not'} those of the run"
        yield verdict("examples", f"{name} {part}", "passed" if same else "failed", detail)
    judged_by_itself = implementation_path(state["identity"]["implementation"])
    for key, phase in state["phases"].items():
        if "errors" not in phase:
            continue  # this checkpoint was written before the phase had its last step
        again = test_error64(phase["model"], examples["test"], implementation("reference"), settings.operator.eps)
        for kind, limit in (("test_float64", EXACT), ("test", ROUNDED)):
            if kind == "test" and key.endswith(f"/{judged_by_itself}"):
                continue  # a wrong implementation's own error is not the reference's
            was = phase["errors"][kind]
            share = abs(again - was) / (limit * abs(was))
            status: Status = "passed" if share <= 1.0 else "failed"
            detail = f"test error {again:.12g}, recorded {was:.12g} ({kind.replace('test_float64', 'in float64')})"
            yield verdict("test error", f"{name} {key}", status, detail, share)


def reported(info: "RunInfo", name: str, state: Mapping[str, Any]) -> Iterator[CaseResult]:
    """Hold what run.json reports against what the newest checkpoint holds."""
    summary = info.facts.get("summary")
    if not summary or "test_mse" not in summary:
        return  # the run was interrupted before it could report
    told = {f"{o}/{path}": value for o, paths in summary["test_mse"].items() for path, value in paths.items()}
    held = {key: phase["errors"]["test"] for key, phase in state["phases"].items()}
    same = told == held
    detail = f"run.json reports {'the' if same else 'other'} test errors {'of' if same else 'than'} {name}"
    yield verdict("report", "run.json", "passed" if same else "failed", detail)


def logged(info: "RunInfo", name: str, state: Mapping[str, Any], settings: "Settings") -> CaseResult:
    """Hold the losses and gradient norms of metrics.jsonl against the history in the newest checkpoint.

    A run that was cut short may have recorded steps after that checkpoint; one that was finished may not.
    """
    from rmsnorm_cli.training import plan, protocol

    told: dict[str, list[Any]] = {}  # by phase: a run that was resumed with more steps goes through them twice
    for row in history.read_records(info.dir):
        told.setdefault(f"{row.get('optimizer')}/{row.get('path')}", []).append(row)
    phases = plan.phases(settings, state["identity"]["implementation"])
    finished = info.status in ("passed", "failed", "inconclusive")
    for phase in phases:
        held = [json.loads(strict_json(row)) for row in protocol.records([phase], state["phases"])]
        found = told.pop(phase.key, [])
        for row, had in zip(found, held, strict=False):
            if row != had:
                differing = ", ".join(key for key in {**row, **had} if row.get(key) != had.get(key))
                detail = f"step {had['step']} of {phase.key} is not as {name} holds it: {differing} differ"
                return verdict("metrics", "metrics.jsonl", "failed", detail)
        if len(found) < len(held) or (finished and len(found) > len(held)):
            detail = f"{len(found)} steps of {phase.key} are recorded, and {name} holds {len(held)}"
            return verdict("metrics", "metrics.jsonl", "failed", detail)
    if told:
        return verdict("metrics", "metrics.jsonl", "failed", f"steps of {', '.join(told)}, which the run does not have")
    return verdict("metrics", "metrics.jsonl", "passed", f"every step is as {name} holds it")
