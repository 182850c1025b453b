"""Mistakes in dx = rstd · (u − x̂ · mean(u · x̂)), u = dy · gamma: a term, a divisor, a power of rstd, a gamma lost."""

from typing import TYPE_CHECKING

from rmsnorm_cli.faults.examples import BALANCED
from rmsnorm_cli.faults.fault import DECLARED, FIT, NAIVE, UNIT_ROWS, Change, Fault, rows
from rmsnorm_cli.faults.predict import only, saved_rstd, with_rstd

if TYPE_CHECKING:
    from torch import Tensor

    from rmsnorm_cli.gates.hypotheses import Terms

U = "u = dy * gamma\n"
MEAN = "mean_ux_hat = tl.sum(u * x_hat, axis=0) / N"
DX = "dx = rstd * (u - x_hat * mean_ux_hat)"
LOAD_RSTD = "rstd = tl.load(rstd_ptr + pid)"
SAVE_RSTD = "tl.store(rstd_ptr + row, rstd)"


def _padded(t: "Terms") -> "Tensor":
    """Return rstd whose mean is over the padded block, (M, 1)."""
    return (t.m * t.N / t.B + t.eps).rsqrt()


FAULTS = (
    Fault(
        name="second-term-missing",
        stage="dx",
        story="dx is rstd times u, as if rstd did not depend on x. The missing term is a mean over the row, which "
        "shrinks like 1/sqrt(N) when dy has nothing to do with x.",
        changes=(Change(DX, "dx = rstd * u"),),
        exposing=rows("parallel"),
        hiding=BALANCED,
        expected=(DECLARED, FIT),
        seen=("ooples/AiDotNet #695",),
        predicted=only("dx", lambda t: t.r * t.u),
    ),
    Fault(
        name="backward-divides-by-block",
        stage="dx",
        story="The backward has a mean of its own, and it is this one that is divided by the padded block. Mending "
        "the forward's divisor leaves it as it was; N = 256 shows neither.",
        changes=(Change(MEAN, "mean_ux_hat = tl.sum(u * x_hat, axis=0) / BLOCK"),),
        exposing=rows("aligned"),
        hiding=rows("aligned", N=256),
        expected=(DECLARED, FIT),
        predicted=only("dx", lambda t: t.dx(t.r, t.N / t.B)),
    ),
    Fault(
        name="both-divide-by-block",
        stage="dx",
        story="Forward and backward both divide by the padded block. The backward is then the true gradient of the "
        "wrong forward, so gradcheck, which compares the two with each other, passes.",
        changes=(
            Change("mean_square = tl.sum(x * x, axis=0) / N", "mean_square = tl.sum(x * x, axis=0) / BLOCK"),
            Change(MEAN, "mean_ux_hat = tl.sum(u * x_hat, axis=0) / BLOCK"),
        ),
        exposing=rows("aligned"),
        hiding=rows("aligned", N=256),
        expected=(DECLARED, FIT),
        predicted=lambda t: {
            **with_rstd(_padded)(t),
            "dx": t.dx(_padded(t), t.N / t.B),
        },
    ),
    Fault(
        name="mean-not-divided",
        stage="dx",
        story="The sum of u · x̂ is not divided at all. A row of one number is its own mean.",
        changes=(Change(MEAN, "mean_ux_hat = tl.sum(u * x_hat, axis=0)"),),
        exposing=rows("aligned"),
        hiding=rows("aligned", N=1),
        expected=(DECLARED, FIT),
        predicted=only("dx", lambda t: t.dx(t.r, t.N)),
    ),
    Fault(
        name="second-term-added",
        stage="dx",
        story="The second term has the wrong sign. Where u is at right angles to x there is no second term.",
        changes=(Change(DX, "dx = rstd * (u + x_hat * mean_ux_hat)"),),
        exposing=rows("parallel"),
        hiding=BALANCED,
        expected=(DECLARED, FIT),
        predicted=only("dx", lambda t: t.dx(t.r, -1.0)),
    ),
    Fault(
        name="two-powers-lost",
        stage="dx",
        story="The second term is made from x, not from x̂: rstd instead of its cube, the most common slip of the "
        "algebra. Rows of rms 1, which is what unit-normal tests have, hide it.",
        changes=(
            Change(MEAN, "mean_ux_hat = tl.sum(u * x, axis=0) / N"),
            Change(DX, "dx = rstd * (u - x * mean_ux_hat)"),
        ),
        exposing=rows("large"),
        hiding=UNIT_ROWS,
        expected=(DECLARED, FIT),
        predicted=only("dx", lambda t: t.r * (t.u - t.x * (t.u * t.x).mean(-1, keepdim=True))),
    ),
    Fault(
        name="one-power-lost",
        stage="dx",
        story="x stands where x̂ should in one place of two: rstd² instead of rstd³. Rows of rms 1 hide it.",
        changes=(Change(DX, "dx = rstd * (u - x * mean_ux_hat)"),),
        exposing=rows("large"),
        hiding=UNIT_ROWS,
        expected=(DECLARED, FIT),
        predicted=only("dx", lambda t: t.r * (t.u - t.x * t.c)),
    ),
    Fault(
        name="outer-rstd-missing",
        stage="dx",
        story="The factor rstd in front of everything is missing, so dx has the wrong scale. Rows of rms 1 hide it.",
        changes=(Change(DX, "dx = u - x_hat * mean_ux_hat"),),
        exposing=rows(),
        hiding=UNIT_ROWS,
        expected=(DECLARED, FIT),
        predicted=only("dx", lambda t: t.u - t.xhat * t.c),
    ),
    Fault(
        name="gamma-missing-in-mean",
        stage="dx",
        story="The mean is taken of dy · x̂, without gamma. With gamma = 1 the two are the same.",
        changes=(Change(MEAN, "mean_ux_hat = tl.sum(dy * x_hat, axis=0) / N"),),
        exposing=rows("aligned"),
        hiding=NAIVE,
        expected=(DECLARED, FIT),
        predicted=only("dx", lambda t: t.r * (t.u - t.xhat * (t.dy * t.xhat).mean(-1, keepdim=True))),
    ),
    Fault(
        name="gamma-missing-in-first-term",
        stage="dx",
        story="The first term is dy, not dy · gamma. With gamma = 1 the two are the same.",
        changes=(Change(DX, "dx = rstd * (dy - x_hat * mean_ux_hat)"),),
        exposing=rows(),
        hiding=NAIVE,
        expected=(DECLARED,),
        predicted=only("dx", lambda t: t.r * (t.dy - t.xhat * t.c)),
    ),
    Fault(
        name="gamma-missing-in-dx",
        stage="dx",
        story="gamma is forgotten in the backward altogether. Whoever tests with fresh weights, all ones, finds out "
        "days later.",
        changes=(Change(U, "u = dy\n"),),
        exposing=rows(),
        hiding=NAIVE,
        expected=(DECLARED,),
        seen=("karpathy/llm.c #763",),
        predicted=only("dx", lambda t: t.r * (t.dy - t.xhat * (t.dy * t.xhat).mean(-1, keepdim=True))),
    ),
    Fault(
        name="y-for-x-hat",
        stage="dx",
        story="The second term uses y, which a kernel may have at hand, for x̂: gamma enters it twice. With gamma = 1 "
        "the two are the same.",
        changes=(Change(DX, "dx = rstd * (u - x_hat * gamma * mean_ux_hat)"),),
        exposing=rows("aligned"),
        hiding=NAIVE,
        expected=(DECLARED, FIT),
        seen=("NVIDIA/Megatron-LM #6859",),
        predicted=only("dx", lambda t: t.r * (t.u - t.gamma * t.xhat * t.c)),
    ),
    Fault(
        name="layernorm-dx",
        stage="dx",
        story="The mean of u is subtracted too, as LayerNorm's backward does. It survives where that mean is zero by "
        "construction, and almost survives where it is only small.",
        changes=(Change(DX, "dx = rstd * (u - tl.sum(u, axis=0) / N - x_hat * mean_ux_hat)"),),
        exposing=rows(),
        hiding=BALANCED,
        expected=(DECLARED,),
        predicted=only("dx", lambda t: t.dx(t.r) - t.r * t.u.mean(-1, keepdim=True)),
    ),
    Fault(
        name="rstd-again-without-eps",
        stage="dx",
        story="The backward computes rstd again, to save the memory of keeping it, and forgets eps. Only tiny rows "
        "and rows of zeros show it.",
        changes=(Change(LOAD_RSTD, "rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N)"),),
        exposing=rows("tiny"),
        hiding=rows("normal", N=4096, M=1),
        expected=(DECLARED, FIT),
        predicted=saved_rstd(lambda t: t.m.rsqrt()),
    ),
    Fault(
        name="rstd-again-with-block",
        stage="dx",
        story="The backward computes rstd again and divides by the padded block, which the forward does not. Two "
        "divisors for one mean can disagree; a saved number cannot.",
        changes=(Change(LOAD_RSTD, "rstd = tl.rsqrt(tl.sum(x * x, axis=0) / BLOCK + 1e-6)"),),
        exposing=rows(),
        hiding=rows(N=256),
        expected=(DECLARED, FIT),
        predicted=saved_rstd(lambda t: (t.m * t.N / t.B + 1e-6).rsqrt()),
    ),
    Fault(
        name="mean-square-saved",
        stage="dx",
        story="The forward is right, but what it saves for the backward is the mean square, not rstd. The output "
        "cannot show it, and gradients only where the two numbers differ: at rms 1 they do not.",
        changes=(Change(SAVE_RSTD, "tl.store(rstd_ptr + row, mean_square)"),),
        exposing=rows(),
        hiding=UNIT_ROWS,
        expected=(DECLARED, FIT),
        seen=("flagos-ai/FlagGems #5771", "flagos-ai/FlagGems #5222"),
        predicted=saved_rstd(lambda t: t.m),
    ),
    Fault(
        name="rstd-of-next-row",
        stage="dx",
        story="Each row takes the saved rstd of the row after it. Rows of equal size, or a single row, hide it.",
        changes=(Change(LOAD_RSTD, "rstd = tl.load(rstd_ptr + (pid + 1) % tl.num_programs(0))"),),
        exposing=rows(),
        hiding=rows(M=1),
        expected=(DECLARED, FIT),
        predicted=saved_rstd(lambda t: t.r.roll(-1, 0)),
    ),
)
