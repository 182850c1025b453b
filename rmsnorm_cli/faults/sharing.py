"""Mistakes that only `fused` can make where programs work together: partial sums of dgamma, and rows that K share.

The interpreter runs one program after the other, so a program that waits for another would wait for ever: rows that
programs share are run on a GPU alone. A mistake that makes them wait for what never comes is not shown, since a kernel
that hangs can only be killed with its process.
"""

from rmsnorm_cli.faults.fault import DECLARED, MEMORY, Change, Fault, rows
from rmsnorm_cli.faults.predict import contributions, only, walk_tile, walkers
from rmsnorm_cli.faults.tiling import WALKED
from rmsnorm_cli.inputs.cases import Case

ALONE = "programs that wait for one another cannot run one after the other, as the interpreter runs them"
SHARED = Case((5, 65537))  # 33 programs a row in float32, and no power of two
POWER = Case((5, 131072))  # 64 programs a row
ROUND = Case((97, 131073))  # so many rows that a group of programs goes round its ring of eight steps
WAIT = "    while tl.max((word >> 32 != tag).to(tl.int32)) != 0:"

FAULTS = (
    Fault(
        name="last-partial-not-summed",
        stage="dgamma",
        file="backward.py",
        story="The column sum leaves out the last program's row of partial sums. Few rows have no partial sums, and "
        "where they are many one missing row is a small share.",
        changes=(Change("first + parts < P, n, BLOCK_P", "first + parts < P - 1, n, BLOCK_P"),),
        exposing=WALKED,
        hiding=rows(),
        expected=(DECLARED,),
        seen=("pytorch/pytorch #193016",),
        predicted=only(
            "dgamma",
            lambda t: contributions(t)[[row for row in range(len(t.x)) if (row // walk_tile(t) + 1) % walkers(t)]].sum(
                0
            ),
        ),
    ),
    Fault(
        name="mean-over-programs",
        stage="dgamma",
        file="backward.py",
        story="The partial sums are averaged over the programs that made them, not added. One program, and the launch "
        "for few rows, hide it; Adam divides such a factor out again.",
        changes=(
            Change(
                "BLOCK_P, False, True)\n    dgamma = tl.sum(total, axis=0)",
                "BLOCK_P, False, True)\n    dgamma = tl.sum(total, axis=0) / P",
            ),
        ),
        exposing=WALKED,
        hiding=rows(),
        expected=(DECLARED,),
        predicted=only("dgamma", lambda t: contributions(t).sum(0) / walkers(t)),
    ),
    Fault(
        name="scratch-of-idle-programs",
        stage="memory",
        file="backplan.py",
        story="The scratch has a row for every program that the card could hold, and all are added up, but only those "
        "with work are launched. What the others never wrote is often zero, as fresh memory is.",
        changes=(
            Change(
                "self.scalars = (self.M, self.N, *self.layout)\n        self._sum(programs, self.early)",
                "self.scalars = (self.M, self.N, *self.layout)\n"
                "        self._sum(self.sms * config.per_sm, self.early)",
            ),
        ),
        exposing=rows(M=300, N=9),
        hiding=rows(),
        expected=(MEMORY,),
        seen=("Dao-AILab/flash-attention #781", "flagos-ai/FlagGems #1080"),
    ),
    Fault(
        name="last-part-repeated",
        stage="forward",
        file="split.py",
        story="The parts of a shared row are read in a block of a power of two, whose lanes past the last part repeat "
        "it, and all lanes are added up. A number of programs that is a power of two has no such lanes.",
        changes=(Change("tl.where(here if ROWS == 1 else here[None, :], sums, 0.0)", "sums"),),
        exposing=SHARED,
        hiding=POWER,
        expected=(DECLARED,),
        cuda_only=ALONE,
    ),
    Fault(
        name="last-part-left-out",
        stage="forward",
        file="split.py",
        story="The sum over the programs that share a row stops one part early. The share that is missing is small "
        "where many programs share a row, and narrower rows are not shared.",
        changes=(Change("here = tl.arange(0, PARTS) < K", "here = tl.arange(0, PARTS) < K - 1"),),
        exposing=SHARED,
        hiding=rows(),
        expected=(DECLARED,),
        cuda_only=ALONE,
    ),
    Fault(
        name="parts-not-waited-for",
        stage="forward",
        file="split.py",
        story="A program that finds parts of its row missing looks once more and goes on. On an idle card the second "
        "look often finds them all.",
        changes=(Change(WAIT, WAIT.replace("while", "if")),),
        exposing=ROUND,
        hiding=rows(),
        expected=(DECLARED,),
        seen=("NVIDIA/Fuser #2391",),
        cuda_only=ALONE,
    ),
    Fault(
        name="flag-of-a-step-before",
        stage="forward",
        file="split.py",
        story="A part counts as there when its word holds any step's number, not this step's. In the first eight steps "
        "the words are fresh; from then on the parts of the row eight steps back are taken for this row's.",
        changes=(Change(WAIT, WAIT.replace("!= tag", "== 0")),),
        exposing=ROUND,
        hiding=SHARED,
        expected=(DECLARED,),
        seen=("ROCm/aiter #2877",),
        cuda_only=ALONE,
    ),
    Fault(
        name="partial-in-wrong-row",
        stage="dgamma",
        file="split.py",
        story="A program of a shared row writes its partial sums of dgamma into the scratch row of its part, not of "
        "its group. Some cells are written by several groups and others by none.",
        changes=(
            Change(
                "partial_row = row_pointers(partial_ptr, group.to(tl.int64), 1,",
                "partial_row = row_pointers(partial_ptr, (part % groups).to(tl.int64), 1,",
            ),
        ),
        exposing=SHARED,
        hiding=rows(),
        expected=(DECLARED,),
        cuda_only=ALONE,
    ),
)
