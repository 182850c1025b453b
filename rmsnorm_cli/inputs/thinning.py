"""What is asked less often where it is dear and would repeat another question; what somebody names is never thinned.

Triton's interpreter pays for every program of a launch, some milliseconds each, and for every element of a wide row.
Launches are chosen by row width and element size, so bfloat16 runs float16's, and differs in a store that the
interpreter cuts instead of rounding. Programs run there one after another, so that repeated runs cannot meet a race,
only what a call has left over for the next.
An implementation that compiles anew for each shape (`costly`) takes seconds for each: it is asked fewer shapes, and
more distributions of each. This module imports no torch, so that a plan can be told without it.
"""

from collections.abc import Sequence
from itertools import cycle, islice

from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.cases import Case

WIDE = 4096  # columns that the teaching kernel takes at most
RUNS = 3  # in the interpreter, whose bits must agree
COMPILED = 3  # shapes and dtypes of one gate that a costly implementation is asked
TURNS = 3  # distributions that it is asked of each shape of the declared plan

IN_THE_INTERPRETER = (
    f"rows of more than {WIDE} columns not again in bfloat16, which has float16's launches; "
    f"bits compared over {RUNS} runs, since programs that run one after another cannot race"
)
OF_THE_COSTLY = (
    f"each width with one row count and {TURNS} distributions, every third in bfloat16, {2 * COMPILED} layouts in one "
    f"dtype, none of the wide rows; of the other gates at most {COMPILED} shapes"
)


def spared(case: Case) -> bool:
    """Tell whether the interpreter need not run a case of the default plan: another one runs the same kernels."""
    return case.dtype == "bfloat16" and case.N > WIDE


def few_shapes(
    rows: Sequence[int], cols: Sequence[int], dtypes: Sequence[str], distributions: Sequence[str], eps: float, seed: int
) -> list[Case]:
    """Return each width once, the row counts in turn, with TURNS distributions each; bfloat16 every third width."""
    plain = [name for name in distributions if name not in ("exact", "stalling")]  # their eps would compile once more
    asked = []
    for dtype in dtypes:
        names = cycle(plain)
        for at, shape in enumerate(zip(cycle(rows), cols)):
            turn = list(islice(names, min(TURNS, len(plain))))
            if dtype != "bfloat16" or at % 3 == 1:
                asked += [cases.case(shape, dtype, name, eps, seed) for name in turn]
    return cases.unique(asked)


def bounded(asked: Sequence[Case], most: int) -> list[Case]:
    """Keep the cases of at most `most` shapes, dtypes and layouts, evenly over all, those of one kept together."""
    kinds = list(dict.fromkeys(_program(case) for case in asked))
    kept = [kinds[at * len(kinds) // most] for at in range(most)] if len(kinds) > most else kinds
    return [case for kind in kept for case in asked if _program(case) == kind]


def _program(case: Case) -> tuple[object, ...]:
    return case.shape, case.dtype, case.gamma_dtype, case.layout, case.eps
