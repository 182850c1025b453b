"""Mistakes of `rowwise` that `fused` can make too: the same slip of the formula, in the kernel with tiles."""

from typing import TYPE_CHECKING

from rmsnorm_cli.faults.fault import DECLARED, EXACT, FIT, NAIVE, UNIT_ROWS, Change, Fault, rows
from rmsnorm_cli.faults.predict import first_tile, only, tiles, with_rstd

if TYPE_CHECKING:
    from torch import Tensor

    from rmsnorm_cli.gates.hypotheses import Terms

NARROW = rows(M=17, N=31)  # one tile of 32


def _gamma_in(t: "Terms", *, first: bool) -> "Tensor":
    """Return gamma in the first tile of a row or in the second, and 1 in the other, (N,)."""
    gamma = t.gamma.clone()
    (gamma[first_tile(t) :] if first else gamma[: first_tile(t)]).fill_(1.0)
    return gamma


FAULTS = (
    Fault(
        name="divide-by-tiles",
        stage="forward",
        file="forward.py",
        story="The mean is taken over the lanes of the tiles, not over the numbers of the row. The famous width 257 "
        "hides it, since tiles of 256 and 1 fit it exactly; 31 in a tile of 32 does not.",
        changes=(
            Change(
                "square_sum += row_sum(xb * xb, ROWS)\n    rstd = inverse_rms(square_sum, N, eps, DTYPE)",
                "square_sum += row_sum(xb * xb, ROWS)\n    rstd = inverse_rms(square_sum, A + B, eps, DTYPE)",
            ),
        ),
        exposing=NARROW,
        hiding=rows("aligned", M=17, N=257),
        expected=(DECLARED,),
        predicted=with_rstd(lambda t: (t.m * t.N / tiles(t) + t.eps).rsqrt()),
    ),
    Fault(
        name="eps-left-out",
        stage="forward",
        file="tiles.py",
        story="eps is not added to the mean square. Rows whose rms is near one do not miss it, tiny rows and rows of "
        "zeros do.",
        changes=(
            Change(
                "return tl.rsqrt(square_sum / N + tl.full((), eps, DTYPE))",
                "return tl.rsqrt((square_sum / N).to(DTYPE))",
            ),
        ),
        exposing=rows("tiny"),
        hiding=UNIT_ROWS,
        expected=(DECLARED, EXACT),
        predicted=with_rstd(lambda t: t.m.rsqrt()),
    ),
    Fault(
        name="y-without-gamma",
        stage="forward",
        file="forward.py",
        story="The second tile of a row is normalised and not multiplied by gamma. Fresh weights, all ones, hide it, "
        "and so does a row of one tile.",
        changes=(
            Change(
                "store_tile(y_rows, b, weighted(xb * spread(rstd, ROWS), gb, ROWS, GAMMA)",
                "store_tile(y_rows, b, weighted(xb * spread(rstd, ROWS), gb, ROWS, False)",
            ),
        ),
        exposing=rows(),
        hiding=rows(N=256),
        expected=(DECLARED,),
        predicted=only("y", lambda t: t.xhat * _gamma_in(t, first=True)),
    ),
    Fault(
        name="dot-divided-by-tiles",
        stage="dx",
        file="backward.py",
        story="The backward's own mean, of u · x̂, is taken over the lanes of the tiles. A forward that was mended "
        "leaves it as it is, and widths that tiles fit exactly hide it.",
        changes=(Change("mean = dot / N", "mean = dot / (A + B)", times=2),),
        exposing=NARROW,
        hiding=rows("aligned", M=17, N=257),
        expected=(DECLARED,),
        predicted=only("dx", lambda t: t.dx(t.r, t.N / tiles(t))),
    ),
    Fault(
        name="rstd-missing-in-front",
        stage="dx",
        file="tiles.py",
        story="dx lacks the factor rstd in front of everything, on every path. Rows of rms 1 hide it.",
        changes=(
            Change(
                "return tl.fma(x_hat, spread(-mean_ux_hat, ROWS), u) * spread(rstd, ROWS)",
                "return tl.fma(x_hat, spread(-mean_ux_hat, ROWS), u)",
            ),
        ),
        exposing=rows(),
        hiding=UNIT_ROWS,
        expected=(DECLARED, FIT),
        predicted=only("dx", lambda t: t.u - t.xhat * t.c),
    ),
    Fault(
        name="gamma-missing-in-dot",
        stage="dx",
        file="backward.py",
        story="The launch for few rows takes the mean of dy · x̂ in its first tile, without gamma. With gamma = 1 the "
        "two are the same.",
        changes=(
            Change(
                "dot = row_sum(weighted(da, ga, ROWS, GAMMA) * xa, ROWS)",
                "dot = row_sum(weighted(da, ga, ROWS, False) * xa, ROWS)",
            ),
        ),
        exposing=rows("aligned"),
        on_gpu=rows("aligned", M=5, N=5120),
        hiding=NAIVE,
        expected=(DECLARED,),
        predicted=only(
            "dx",
            lambda t: t.r * (t.u - t.xhat * (t.dy * _gamma_in(t, first=False) * t.xhat).mean(-1, keepdim=True)),
        ),
    ),
    Fault(
        name="dgamma-without-rstd",
        stage="dgamma",
        file="backward.py",
        story="In the launch for few rows each row adds dy · x to dgamma, not dy · x̂, so that large rows drown small "
        "ones. Rows of rms 1 hide it.",
        changes=(
            Change(
                "live, n, TILE_ROWS, False, UNIT).to(DTYPE) * rstd[:, None]",
                "live, n, TILE_ROWS, False, UNIT).to(DTYPE)",
            ),
        ),
        exposing=rows(),
        on_gpu=rows(M=17, N=31),
        hiding=UNIT_ROWS,
        expected=(DECLARED,),
        predicted=only("dgamma", lambda t: (t.dy * t.x).sum(0)),
    ),
)
