"""What a mistake of the catalogue is: the expression it changes, inputs that show or hide it, what algebra predicts.

Gates are named here by the names they carry; this module imports no torch, so that a list is quick to print.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rmsnorm_cli.errors import RmsnormError
from rmsnorm_cli.inputs.cases import Case

if TYPE_CHECKING:
    from torch import Tensor

    from rmsnorm_cli.faults.examples import Example
    from rmsnorm_cli.gates.hypotheses import Terms

Stage = Literal["forward", "dx", "dgamma", "wiring", "memory", "launch"]
STAGES: tuple[Stage, ...] = ("forward", "dx", "dgamma", "wiring", "memory", "launch")
Kernel = Literal["rowwise", "fused"]
KERNELS: tuple[Kernel, ...] = ("rowwise", "fused")
Source = Literal[
    "rowwise.py", "autograd.py",
    "tiles.py", "forward.py", "backward.py", "reread.py", "split.py", "chunks.py",
    "rowlayout.py", "frontplan.py", "backplan.py", "fused.py",
]  # fmt: skip

CONTRACT = "contract"
MEMORY = "memory"
EXACT = "exact class"
DECLARED = "declared tolerance"
BUDGET = "rounding budget"
FIT = "fit"
IDENTITIES = "identities"
AUTOGRAD = "autograd"
DETERMINISM = "determinism"


class FaultNotApplicable(RmsnormError):
    """The kernel's source no longer holds the expression that a mistake changes: the catalogue must follow it."""

    exit_code = 3


@dataclass(frozen=True)
class Change:
    """One replacement in the source: `before` must stand there exactly `times` times."""

    before: str
    after: str
    times: int = 1


@dataclass(frozen=True)
class Fault:
    """One mistake, as a change of a kernel's own source.

    `exposing` is an input whose result shows it, `hiding` one whose result does not (None where every input shows it);
    they are equal where it is not the input that matters but how often, or in which graph, it is called. `on_gpu` is
    the exposing input where many programs run at once, if that takes another (`on` puts it in place). `predicted`
    gives, in float64, the wrong y (M, N), dx (M, N) and dgamma (N,) that the mistake must produce; what it leaves out
    stays right. `expected` are the gates that must catch it. `equivalent` argues why a change is no mistake;
    `cuda_only` why the interpreter cannot show it, `interpreter_only` why a GPU is not asked for it. One that `crashes`
    can take a GPU's context with it, and runs in a process of its own.
    """

    name: str
    stage: Stage
    story: str
    changes: tuple[Change, ...]
    exposing: "Case | Example"
    hiding: "Case | Example | None"
    expected: tuple[str, ...]
    seen: tuple[str, ...] = ()
    file: Source = "rowwise.py"
    predicted: "Callable[[Terms], dict[str, Tensor]] | None" = None
    equivalent: str = ""
    cuda_only: str = ""
    interpreter_only: str = ""
    crashes: bool = False
    on_gpu: "Case | None" = None

    @property
    def kernel(self) -> Kernel:
        """Return the kernel that the mistake is in."""
        return "rowwise" if self.file in ("rowwise.py", "autograd.py") else "fused"

    @property
    def launcher(self) -> str:
        """Return the module that is called when the mistake runs."""
        return "fused" if self.kernel == "fused" else self.file.removesuffix(".py")

    def elsewhere(self, execution: str) -> str:
        """Return why this execution ("cuda", "interpreter") says nothing about the mistake; "" where it does."""
        return self.interpreter_only if execution == "cuda" else self.cuda_only

    def on(self, execution: str) -> "Fault":
        """Return the mistake with the input that exposes it in this execution."""
        return self if execution != "cuda" or self.on_gpu is None else replace(self, exposing=self.on_gpu, on_gpu=None)

    @property
    def shown_by(self) -> str:
        """Return the name of the exposing input, or that it is not the input that matters."""
        there = "" if self.on_gpu is None else f"; on a GPU {self.on_gpu.id}"
        return "how it is called, not an input" if self.exposing == self.hiding else self.exposing.id + there

    @property
    def hidden_by(self) -> str:
        """Return the name of the hiding input; "" where there is none."""
        return "" if self.hiding is None else self.hiding.id

    def applied(self, source: str) -> str:
        """Return the source with the mistake in it; FaultNotApplicable where an expression is not there as said."""
        for change in self.changes:
            found = source.count(change.before)
            if found != change.times:
                raise FaultNotApplicable(
                    f"fault {self.name}: {self.file} holds {change.before!r} {found} times, expected {change.times}; "
                    "the source has changed, so the fault must be written anew"
                )
            source = source.replace(change.before, change.after)
        return source


# The inputs below are among those that `verify` asks by default. 258 columns are two past a power of two, so that half
# of the block of 512 is padding; 7 rows are odd, so that no tile of rows is full.


def rows(distribution: str = "spread", dtype: str = "float32", *, M: int = 7, N: int = 258) -> Case:
    """Return a case of `verify`: by default 7 rows of 258 numbers whose rms runs from 1e-3 to 1e2."""
    return Case((M, N), dtype, distribution=distribution, eps=3.0 if distribution in ("exact", "stalling") else 1e-6)


MANY = Case((67, 257), distribution="parallel")  # more rows than one tile of 64
ZERO_ROW = Case((1, 258), distribution="zero_rows")  # one row of zeros: y and dgamma vanish whatever rstd is
UNIT_ROWS = Case((7, 258), distribution="exact", eps=1e-6)  # rows of ±1: mean square, rms, mean of |x| and rstd are 1
NAIVE = Case((64, 4096), distribution="normal")  # what kernels are mostly tested with: unit normal, gamma 1, 2^k
