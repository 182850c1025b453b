"""Mistakes in y = x · rstd · gamma: which x, which gamma, and whether it is multiplied at all."""

from rmsnorm_cli.faults.examples import ones
from rmsnorm_cli.faults.fault import DECLARED, FIT, NAIVE, UNIT_ROWS, ZERO_ROW, Change, Fault, rows
from rmsnorm_cli.faults.predict import only
from rmsnorm_cli.inputs.cases import Case

Y = "y = x * rstd * gamma.to(tl.float32)"
LOAD_X = "x = tl.load(x_ptr + row * N + columns, mask=inside, other=0.0)"
LOAD_GAMMA = "gamma = tl.load(gamma_ptr + columns, mask=inside, other=0.0)"

FAULTS = (
    Fault(
        name="no-normalisation",
        stage="forward",
        story="y is gamma times x: nothing is normalised. On wide unit-normal rows that is right to one part in "
        "sqrt(2N), so a loose tolerance passes it.",
        changes=(Change(Y, "y = x * gamma.to(tl.float32)"),),
        exposing=rows(),
        hiding=UNIT_ROWS,
        expected=(DECLARED, FIT),
        predicted=only("y", lambda t: t.gamma * t.x),
    ),
    Fault(
        name="gamma-ignored",
        stage="forward",
        story="y is not multiplied by gamma. A test whose gamma is all ones, as modules are initialised, cannot see "
        "it.",
        changes=(Change(Y, "y = x * rstd"),),
        exposing=rows(),
        hiding=NAIVE,
        expected=(DECLARED,),
        predicted=only("y", lambda t: t.xhat),
    ),
    Fault(
        name="gamma-squared",
        stage="forward",
        story="gamma is applied twice, once by the kernel and once by what calls it. gamma = 1 is its own square.",
        changes=(Change(Y, "y = x * rstd * gamma.to(tl.float32) * gamma.to(tl.float32)"),),
        exposing=rows(),
        hiding=NAIVE,
        expected=(DECLARED,),
        predicted=only("y", lambda t: t.gamma**2 * t.xhat),
    ),
    Fault(
        name="gamma-shifted",
        stage="forward",
        story="Each column takes the gamma of the next one. Equal weights hide it.",
        changes=(Change(LOAD_GAMMA, "gamma = tl.load(gamma_ptr + (columns + 1) % N, mask=inside, other=0.0)"),),
        exposing=rows(),
        hiding=NAIVE,
        expected=(DECLARED,),
        predicted=only("y", lambda t: t.gamma.roll(-1) * t.xhat),
    ),
    Fault(
        name="gamma-plus-one",
        stage="forward",
        story="y is multiplied by 1 + gamma, the convention of one family of models, in the forward alone. Which of "
        "the two a checkpoint means cannot be told from its file.",
        changes=(Change(Y, "y = x * rstd * (1.0 + gamma.to(tl.float32))"),),
        exposing=rows(),
        hiding=ZERO_ROW,
        expected=(DECLARED,),
        seen=("NVIDIA/Megatron-LM #6859",),
        predicted=only("y", lambda t: (1 + t.gamma) * t.xhat),
    ),
    Fault(
        name="sign-lost",
        stage="forward",
        story="y is made from |x|. Tests that draw their inputs from [0, 1) never see a negative number.",
        changes=(Change(Y, "y = tl.abs(x) * rstd * gamma.to(tl.float32)"),),
        exposing=rows(),
        hiding=ones(257, M=2),
        expected=(DECLARED,),
        predicted=only("y", lambda t: t.xhat.abs() * t.gamma),
    ),
    Fault(
        name="row-starts-at-block",
        stage="forward",
        story="Row i is read from i times the padded block, where it would lie if rows were padded in memory. (What "
        "would lie beyond the tensor reads as 0 here, so that the demonstration stays inside its memory.)",
        changes=(
            Change(
                LOAD_X,
                "x = tl.load(\n"
                "        x_ptr + row * BLOCK + columns,\n"
                "        mask=inside & (row * BLOCK + columns < tl.num_programs(0) * N),\n"
                "        other=0.0,\n"
                "    )",
            ),
        ),
        exposing=rows(),
        hiding=Case((1, 257)),
        expected=(DECLARED,),
    ),
)
