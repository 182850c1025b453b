"""The command line: options and exit codes. No logic, no defaults, and no torch before a command needs it."""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

Options = dict[str, Any]
Deferred = Callable[[], int]  # what a command line asks for; run when Typer, which catches interrupts, is done
Words = list[str] | None

app = typer.Typer(
    name="rmsnorm",
    help="Verify a fused GPU RMSNorm before accelerating a network with it.",
    epilog="Exit codes: 0 passed, 1 a check failed, 2 usage or configuration, 3 internal error, 4 environment, "
    "130 and 143 interrupted. Start with: rmsnorm verify",
    rich_markup_mode=None,  # plain help: nothing in [brackets] vanishes, no colour codes under CI, no import of rich
    add_completion=False,
    no_args_is_help=True,
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; all else goes to stderr.")]
RunsDir = Annotated[str | None, typer.Option("--runs-dir", help="Folder of the run directories (run.dir).")]
DeviceName = Annotated[str | None, typer.Option("--device", help="auto, cuda, cuda:N or interpreter (run.device).")]

COMMON: dict[str, Any] = {  # what the five running commands share, in the order of the help page
    "config": Annotated[Path | None, typer.Option("--config", help="TOML file with the keys of configs/*.toml.")],
    "set_": Annotated[Words, typer.Option("--set", metavar="KEY=VALUE", help="Set one TOML key; repeatable.")],
    "impl": Annotated[
        Words,
        typer.Option("--impl", help="Implementation: a name, package.module:callable or path/file.py:callable."),
    ],
    "rounding": Annotated[str | None, typer.Option("--rounding", help="Where --impl rounds: fp32, llama or gemma.")],
    "device": DeviceName,
    "seed": Annotated[str | None, typer.Option("--seed", help="Whole number, or random (run.seed).")],
    "eps": Annotated[str | None, typer.Option("--eps", help="Added to the mean square (operator.eps).")],
    "name": Annotated[str | None, typer.Option("--name", help="Word appended to the run directory's name.")],
    "runs_dir": RunsDir,
    "quiet": Annotated[bool, typer.Option("--quiet", help="Print the verdict only.")],
    "dry_run": Annotated[bool, typer.Option("--dry-run", help="Print the resolved TOML and the plan; do nothing.")],
    "json": JsonFlag,
}


def words(given: Words) -> list[str] | None:
    """Split repeated and comma-separated values into one list; None where nothing was given."""
    if not given:
        return None
    return [word.strip() for item in given for word in item.split(",") if word.strip()]


def number(text: str | None) -> Any:
    """Return an int or a float where the text is one; else the text, which the configuration then refuses by key."""
    if text is None:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def numbers(given: Words) -> list[Any] | None:
    """Like `words`, with each value as a number where it is one."""
    found = words(given)
    return None if found is None else [number(word) for word in found]


def running(function: Callable[..., Options]) -> Callable[..., Deferred]:
    """Register a running command: its own options, then COMMON; `function` maps its own onto dotted TOML keys."""
    command = function.__name__
    own = inspect.signature(function)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=None)
        for name, kind in COMMON.items()
    ]

    def entry(**given: Any) -> Deferred:
        from rmsnorm_cli.session import Request, execute

        common = {name: given.pop(name) for name in COMMON}
        options = function(**given)
        request = Request(
            command=command,
            config=common["config"],
            sets=list(common["set_"] or ()),
            options={
                "run.impl": words(common["impl"]),
                "run.rounding": common["rounding"],
                "run.device": common["device"],
                "run.seed": number(common["seed"]),
                "operator.eps": number(common["eps"]),
                "run.name": common["name"],
                "run.dir": common["runs_dir"],
                **{key: value for key, value in options.items() if "." in key},
            },
            direct={key: value for key, value in options.items() if "." not in key},
            quiet=bool(common["quiet"]),
            dry_run=bool(common["dry_run"]),
            json=bool(common["json"]),
        )
        return partial(execute, request)

    keyword = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=None if p.default is p.empty else p.default)
        for p in own.parameters.values()
    ]
    signature = inspect.Signature([*keyword, *shared])
    entry.__signature__ = signature  # type: ignore[attr-defined]
    entry.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    app.command(name=command, help=function.__doc__)(entry)
    return entry


@running
def verify(
    dtype: Annotated[Words, typer.Option("--dtype", help="float32, float16, bfloat16; repeat or separate by commas.")],
    rows: Annotated[Words, typer.Option("--rows", help="Row counts M, for example 1,17.")],
    cols: Annotated[Words, typer.Option("--cols", help="Widths N, for example 256,257.")],
    distribution: Annotated[Words, typer.Option("--distribution", help="Value distributions by name.")],
    layout: Annotated[Words, typer.Option("--layout", help="Memory layouts by name.")],
    only: Annotated[Words, typer.Option("--only", help="Scopes: forward,dx,dgamma,contract,properties.")],
) -> Options:
    """Judge forward, dx and dgamma against a float64 oracle, and the contract and properties: the main job."""
    return {
        "verify.dtypes": words(dtype),
        "verify.rows": numbers(rows),
        "verify.cols": numbers(cols),
        "verify.distributions": words(distribution),
        "verify.layouts": words(layout),
        "verify.only": words(only),
    }


@running
def gradcheck(
    rows: Annotated[Words, typer.Option("--rows", help="Row counts M of the float64 cases.")],
    cols: Annotated[Words, typer.Option("--cols", help="Widths N of the float64 cases.")],
) -> Options:
    """Check first and second derivatives in float64, each labelled with the program that was tested."""
    return {"gradcheck.rows": numbers(rows), "gradcheck.cols": numbers(cols)}


@running
def train(
    steps: Annotated[str | None, typer.Option("--steps", help="Steps of each optimizer.")],
    width: Annotated[str | None, typer.Option("--width", help="Width N of the norm.")],
    batch: Annotated[str | None, typer.Option("--batch", help="Examples a step.")],
    optimizer: Annotated[Words, typer.Option("--optimizer", help="adam, sgd; repeat or separate by commas.")],
    fault: Annotated[str | None, typer.Option("--fault", help="Train through a mistake of the catalogue.")],
    resume: Annotated[str | None, typer.Option("--resume", metavar="RUN", help="Continue a run directory.")],
) -> Options:
    """Train a small network through the kernel beside the reference; save, reload, resume."""
    return {
        "train.steps": number(steps),
        "train.width": number(width),
        "train.batch": number(batch),
        "train.optimizers": words(optimizer),
        "train.fault": fault,
        "resume": resume,
    }


@running
def bench(
    shape: Annotated[Words, typer.Option("--shape", help="MxN, for example 128x257, 128x257+1 or 128x257:float16.")],
    dtype: Annotated[Words, typer.Option("--dtype", help="float32, float16, bfloat16.")],
    perimeter: Annotated[
        Words, typer.Option("--perimeter", help="forward, forward_train, backward, forward_backward.")
    ],
    measure: Annotated[Words, typer.Option("--measure", help="whole (calls), gpu (time), host (time).")],
    samples: Annotated[str | None, typer.Option("--samples", help="Samples of a measurement, at least.")],
    seconds: Annotated[str | None, typer.Option("--seconds", help="Longest sampling of a measurement.")],
    calls: Annotated[str | None, typer.Option("--calls", help="Calls in one sample.")],
    warmup: Annotated[str | None, typer.Option("--warmup", help="Calls before the first sample.")],
    compare: Annotated[str | None, typer.Option("--compare", metavar="RUN", help="Compare with an earlier run.")],
    across: Annotated[
        bool | None, typer.Option("--across/--no-across", help="Allow --compare across cards and drivers.")
    ],
    fail_if_slower_than: Annotated[
        str | None, typer.Option("--fail-if-slower-than", help="Exit 1 if an implementation is slower than this one.")
    ],
    wall: Annotated[
        bool | None, typer.Option("--wall/--no-wall", help="Without a GPU: wall clocks of CPU implementations.")
    ],
) -> Options:
    """Time implementations against each other, each verified first, with intervals and a measured ceiling."""
    return {
        "bench.shapes": words(shape),
        "bench.dtypes": words(dtype),
        "bench.perimeters": words(perimeter),
        "bench.measures": words(measure),
        "bench.samples": number(samples),
        "bench.seconds": number(seconds),
        "bench.calls": number(calls),
        "bench.warmup": number(warmup),
        "bench.compare": compare,
        "bench.across": across,
        "bench.fail_if_slower_than": fail_if_slower_than,
        "bench.wall": wall,
    }


@running
def exercise(
    fault: Annotated[str | None, typer.Option("--fault", help="The mistake to look at; see --list.")],
    predict: Annotated[Words, typer.Option("--predict", help="Answers given in advance, KEY=VALUE.")],
    no_input: Annotated[bool, typer.Option("--no-input", help="Ask nothing.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the mistakes of the catalogue.")] = False,
    all_: Annotated[bool | None, typer.Option("--all/--no-all", help="Every mistake against every gate.")] = None,
) -> Options:
    """Predict what a kernel mistake does, run it, and see which check catches it."""
    return {
        "exercise.fault": fault,
        "exercise.predict": words(predict),
        "exercise.all": all_,
        "no_input": no_input,
        "list": list_,
    }


@app.command()
def clean(
    scope: Annotated[str, typer.Option("--scope", help="generated, cache or all.")] = "generated",
    keep: Annotated[int, typer.Option("--keep", min=0, help="Keep the newest N runs.")] = 0,
    older_than: Annotated[str | None, typer.Option("--older-than", help="Only runs older than 30m, 12h or 7d.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List exactly what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    runs_dir: RunsDir = None,
    json: JsonFlag = False,
) -> Deferred:
    """Remove run directories and the tool's own cache; never a link's target, never anything else."""
    from rmsnorm_cli.session import aside

    given = {"scope": scope, "keep": keep, "older_than": older_than, "dry_run": dry_run, "yes": yes}
    return partial(aside, "clean", given, runs_dir=runs_dir, json=json)


@app.command()
def doctor(device: DeviceName = None, runs_dir: RunsDir = None, json: JsonFlag = False) -> Deferred:
    """Check this machine by using it, and say what to do about what is missing."""
    from rmsnorm_cli.session import aside

    return partial(aside, "doctor", {"device": device}, runs_dir=runs_dir, json=json)


@app.command()
def report(
    run: Annotated[
        list[str] | None, typer.Argument(help="Run directories; the newest run where none is named.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder of a page over several runs.")] = None,
    runs_dir: RunsDir = None,
    json: JsonFlag = False,
) -> Deferred:
    """Draw a run's figures and write one self-contained HTML page."""
    from rmsnorm_cli.session import aside

    return partial(aside, "report", {"runs": run or [], "output": output}, runs_dir=runs_dir, json=json)


@app.command()
def audit(
    run: Annotated[str, typer.Argument(help="A run directory.")] = "latest",
    runs_dir: RunsDir = None,
    json: JsonFlag = False,
) -> Deferred:
    """Re-check a run directory: hashes, configuration, checkpoints and the recorded test error."""
    from rmsnorm_cli.session import aside

    return partial(aside, "audit", {"run": run}, runs_dir=runs_dir, json=json)


def show_version(value: bool) -> None:
    """Print the versions of tool, torch, triton and CUDA without importing torch."""
    if value:
        from rmsnorm_cli.environment import version_line

        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print versions and stop.")
    ] = False,
) -> None:
    """Verify a fused GPU RMSNorm before accelerating a network with it."""


def main(argv: list[str] | None = None, early: Sequence[int] = ()) -> None:
    """Run the command line and exit with the code its outcome has; the only place that catches everything.

    `early` holds the signals that came while this module was being imported.
    """
    from rmsnorm_cli.session import guarded

    arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    sys.exit(guarded(lambda: app(args=arguments, prog_name="rmsnorm", standalone_mode=False), arguments, early))
