"""The schema: one frozen model per TOML table. Every key is here with its default, unit, range and meaning.

Models are strict: no unknown key, no text for a number, no bool for an integer, no NaN; an integer may stand for a
float. What two keys must agree on is in `conflicts`, which is asked of the resolved configuration alone.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from rmsnorm_cli.config.fields import (
    Cols,
    Count,
    Device,
    Distribution,
    Dtype,
    Eps,
    Features,
    Implementation,
    Layout,
    Many,
    Measure,
    Optimizer,
    Perimeter,
    Rate,
    Repeats,
    Rows,
    Scope,
    Seconds,
    Seed,
    Shape,
    Text,
    Tightened,
    TimedDtype,
    Word,
)
from rmsnorm_cli.inputs.cases import COLS, DISTRIBUTIONS, LAYOUTS, ROWS
from rmsnorm_cli.judging.tolerances import DECLARED, Tolerance

COMMANDS = ("verify", "gradcheck", "train", "bench", "exercise")
USES_DATA = ("gradcheck", "train")  # the commands that make the synthetic partitions

KERNELS = ("rowwise", "fused")  # that a command takes when none is named: the one to read, and the one to use
DEFAULT_IMPL: dict[str, tuple[str, ...]] = {
    "verify": KERNELS,
    "gradcheck": KERNELS,
    "train": KERNELS[-1:],
    "bench": (*KERNELS, "reference", "torch", "compile"),
    "exercise": KERNELS[:1],
}


class Table(BaseModel):
    """What every table has in common: frozen, strict, no unknown key, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Operator(Table):
    """[operator]: what defines the computation."""

    eps: Eps = Field(default=1e-6, description="added to the mean square of a row")


class RunTable(Table):
    """[run]: where a run is kept, where it executes, and which implementations it is about."""

    dir: Text = Field(default="runs", description="folder of the run directories")
    name: Word = Field(default="", description="word appended to the run directory's name; empty for none")
    seed: Seed = Field(default=0, description='origin of every random number; "random" draws one and records it')
    device: Device = Field(
        default="auto", description="auto (CUDA where it works, else interpreter), cuda, cuda:N, interpreter"
    )
    impl: Many[Implementation] = Field(
        default=KERNELS, description="implementations, by name, module:callable or file:callable"
    )
    rounding: Literal["fp32", "llama", "gemma"] = Field(
        default="fp32", description="where a foreign implementation rounds, which the oracle then follows"
    )


class Data(Table):
    """[data]: the synthetic partitions, which `gradcheck` writes and `train` makes again from the seed."""

    inputs: Features = Field(default=16, description="features of an example")
    outputs: Features = Field(default=4, description="targets of an example")
    noise: Annotated[float, Field(ge=0, le=10)] = Field(
        default=0.05, description="standard deviation of the targets' noise"
    )
    train: Count = Field(default=2048, description="examples of the training partition")
    validation: Count = Field(default=512, description="examples of the validation partition")
    test: Count = Field(default=512, description="examples of the test partition")


def _declared(dtype: str, bound: Literal["atol", "rtol"]) -> Any:
    limit = getattr(DECLARED[dtype], bound)
    meaning = "absolute" if bound == "atol" else "relative to the oracle's value"
    return Field(default=limit, le=limit, description=f"{dtype} tolerance, {meaning}; may only be tightened")


class Bounds(Table):
    """Tolerances of one dtype; the declared ones are the upper limits."""

    atol: Tightened
    rtol: Tightened


class Float32(Bounds):
    """[verify.tolerances.float32]."""

    atol: Tightened = _declared("float32", "atol")
    rtol: Tightened = _declared("float32", "rtol")


class Float16(Bounds):
    """[verify.tolerances.float16]."""

    atol: Tightened = _declared("float16", "atol")
    rtol: Tightened = _declared("float16", "rtol")


class BFloat16(Bounds):
    """[verify.tolerances.bfloat16]."""

    atol: Tightened = _declared("bfloat16", "atol")
    rtol: Tightened = _declared("bfloat16", "rtol")


class Float64(Bounds):
    """[verify.tolerances.float64]."""

    atol: Tightened = _declared("float64", "atol")
    rtol: Tightened = _declared("float64", "rtol")


class Tolerances(Table):
    """[verify.tolerances]: one table for each dtype."""

    float32: Float32 = Float32()
    float16: Float16 = Float16()
    bfloat16: BFloat16 = BFloat16()
    float64: Float64 = Float64()

    def of(self, dtype: str) -> Tolerance:
        """Return the tolerance in force for a dtype, by its name."""
        bounds: Bounds = getattr(self, dtype)
        return Tolerance(bounds.atol, bounds.rtol)


class Verify(Table):
    """[verify]: which cases each implementation is asked, and how tightly it is judged."""

    dtypes: Many[Dtype] = Field(default=("float32", "float16", "bfloat16"), description="dtypes of x")
    rows: Many[Rows] = Field(default=ROWS, description="row counts M")
    cols: Many[Cols] = Field(default=COLS, description="row widths N")
    distributions: Many[Distribution] = Field(
        default=tuple(DISTRIBUTIONS), description="how the values of x, gamma and dy lie; shapes take them in turn"
    )
    layouts: Many[Layout] = Field(default=tuple(LAYOUTS), description="how x and dy lie in memory")
    only: Many[Scope] = Field(default=get_args(Scope), description="what is checked")
    repeats: Repeats = Field(default=20, description="runs whose bits are compared for determinism")
    timeout: Seconds = Field(
        default=60.0, description="seconds a foreign implementation may take for one question before it is killed"
    )
    tolerances: Tolerances = Tolerances()

    @property
    def default_grid(self) -> bool:
        """Tell whether rows and cols are the defaults, to which a GPU or a wide implementation adds its own."""
        return (self.rows, self.cols) == (ROWS, COLS)

    @property
    def default_dtypes(self) -> bool:
        """Tell whether nobody has named dtypes: those outside a contract are then not asked about."""
        return bool(self.dtypes == type(self).model_fields["dtypes"].default)

    @property
    def default_repeats(self) -> bool:
        """Tell whether nobody has named the number of runs."""
        return bool(self.repeats == type(self).model_fields["repeats"].default)

    @property
    def default_layouts(self) -> bool:
        """Tell whether nobody has named layouts."""
        return bool(self.layouts == type(self).model_fields["layouts"].default)


class Gradcheck(Table):
    """[gradcheck]: derivatives in float64, by finite differences and in closed form."""

    rows: Many[Count] = Field(default=(1, 3), description="row counts M")
    cols: Many[Cols] = Field(default=(1, 2, 7, 33, 257), description="row widths N")
    step: Annotated[float, Field(gt=0, le=1e-3)] = Field(default=1e-6, description="of finite differences, in rms of x")
    atol: Tightened = Field(le=1e-7, default=1e-7, description="absolute tolerance; may only be tightened")
    rtol: Tightened = Field(le=1e-5, default=1e-5, description="relative tolerance; may only be tightened")
    second: bool = Field(default=True, description="check second derivatives too")
    opcheck: bool = Field(default=True, description="check how the operators are registered with PyTorch")


class Lr(Table):
    """[train.lr]: the learning rate of each optimizer."""

    adam: Rate = Field(default=3e-3, description="learning rate of Adam")
    sgd: Rate = Field(default=3e-2, description="learning rate of SGD")


class Train(Table):
    """[train]: the small network, and what its loss curves are held against."""

    width: Cols = Field(default=257, description="width N of the norm; a power of two would hide mistakes")
    steps: Count = Field(default=100, description="steps of each optimizer")
    batch: Count = Field(default=32, description="examples of a step")
    optimizers: Many[Optimizer] = Field(
        default=get_args(Optimizer), description="Adam hides a scaled dgamma, SGD does not"
    )
    lr: Lr = Lr()
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="momentum of SGD")
    validate_every: Count = Field(default=10, description="steps between two validation losses")
    checkpoint_every: Count = Field(default=25, description="steps between two checkpoints; the last step has one too")
    keep: Count = Field(default=2, description="checkpoints that are kept, the newest first")
    twins: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3, description="reference runs with one rounding perturbed"
    )
    twin_factor: Tightened = Field(
        le=3, default=3.0, description="allowed loss difference in multiples of the twins'; may only be tightened"
    )
    seed_noise_runs: Annotated[int, Field(ge=0, le=100)] = Field(
        default=3, description="reference runs from other seeds"
    )
    fault: Word = Field(default="", description="train through this mistake of the catalogue; empty for none")


class Bench(Table):
    """[bench]: what is timed, how often, and when a difference counts as one."""

    shapes: Many[Shape] = Field(
        default=("128x257", "65536x256", "2048x4096", "4096x4096", "8192x5120"),
        description="rows x cols, M x N; +1 behind: x and dy start a number after 16 bytes; :dtype: in that one alone",
    )
    dtypes: Many[TimedDtype] = Field(
        default=("float32", "float16"), description="dtypes of x, for the shapes that name none"
    )
    perimeters: Many[Perimeter] = Field(default=get_args(Perimeter), description="what lies inside the timed interval")
    measures: Many[Measure] = Field(
        default=get_args(Measure),
        description="whole calls as a loop pays them, GPU time of a captured graph, host time of a call",
    )
    caches: Many[Literal["cold", "warm"]] = Field(default=("cold",), description="state of the L2 cache for GPU time")
    samples: Annotated[int, Field(ge=2, le=100_000)] = Field(
        default=50, description="samples of a measurement, at least"
    )
    seconds: Seconds = Field(
        default=5.0,
        description="longest sampling of a measurement; after `samples` it goes on until the A/A control is narrow",
    )
    calls: Annotated[int, Field(ge=1, le=100_000)] = Field(default=20, description="calls in one sample")
    warmup: Annotated[int, Field(ge=0, le=100_000)] = Field(default=20, description="calls before the first sample")
    compile_seconds: Seconds = Field(
        default=120.0, description="longest that first calls on a cell may take, compiling included"
    )
    min_blocks: Annotated[int, Field(ge=2, le=100_000)] = Field(
        default=20, description="interleaved blocks below which no verdict is spoken"
    )
    bootstrap: Annotated[int, Field(ge=100, le=1_000_000)] = Field(
        default=10_000, description="resamples of an interval"
    )
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = Field(default=0.99, description="coverage of an interval")
    band: Annotated[float, Field(ge=0, le=0.5)] = Field(
        default=0.01, description="ratios this close to 1 count as equal"
    )
    compare: Text | None = Field(default=None, description="run directory of an earlier bench to compare with")
    across: bool = Field(default=False, description="let compare cross cards and drivers")
    fail_if_slower_than: Implementation | None = Field(
        default=None, description="fail where a kernel is slower than this one"
    )
    wall: bool = Field(default=False, description="without a GPU, time CPU implementations by a wall clock")


class Exercise(Table):
    """[exercise]: a mistake, what it is predicted to do, and what it does."""

    fault: Word = Field(default="", description="mistake of the catalogue; empty for dividing by the padded block")
    predict: tuple[Text, ...] = Field(default=(), description="answers given in advance, each key=value")
    all: bool = Field(default=False, description="every mistake against every gate")


class Document(Table):
    """A whole config file: the common tables and one for each command."""

    operator: Operator = Operator()
    run: RunTable = RunTable()
    data: Data = Data()
    verify: Verify = Verify()
    gradcheck: Gradcheck = Gradcheck()
    train: Train = Train()
    bench: Bench = Bench()
    exercise: Exercise = Exercise()


def conflicts(document: Document, command: str) -> list[tuple[tuple[str, ...], str, str]]:
    """Return (keys, what is wrong, what is expected) for each contradiction in a resolved configuration."""
    found: list[tuple[tuple[str, ...], str, str]] = []
    run, train, bench, exercise = document.run, document.train, document.bench, document.exercise
    if command == "train":
        if len(run.impl) > 1:
            found.append((("run.impl",), f"got {len(run.impl)} names", "one, which trains beside the reference"))
        if train.batch > (most := document.data.train):
            wrong = f"a batch of {train.batch} is larger than the training partition"
            found.append((("train.batch", "data.train"), wrong, f"train.batch at most data.train, which is {most}"))
    if command == "bench":
        other = bench.fail_if_slower_than
        if other is not None and other not in run.impl:
            timed = ", ".join(run.impl)
            found.append((("bench.fail_if_slower_than", "run.impl"), f'"{other}" is not timed', f"one of {timed}"))
        if bench.across and bench.compare is None:
            found.append((("bench.across",), "does nothing without bench.compare", "both or neither"))
    if command == "exercise" and exercise.all and exercise.fault:
        found.append((("exercise.all", "exercise.fault"), "contradicts exercise.fault", "one of the two"))
    return found
