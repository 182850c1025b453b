"""The wrong values that algebra predicts, in float64; the terms are those of `gates.hypotheses`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rmsnorm_cli.gates.hypotheses import Terms

Term = Callable[["Terms"], "Tensor"]
Prediction = Callable[["Terms"], dict[str, "Tensor"]]


def with_rstd(rstd: Term) -> Prediction:
    """Predict what a wrong rstd (M, 1) does: the backward takes it from the forward, so all three are wrong."""

    def predict(t: "Terms") -> dict[str, "Tensor"]:
        r = rstd(t)
        return {"y": t.gamma * t.x * r, "dx": t.dx(r), "dgamma": (t.dy * t.x * r).sum(0)}

    return predict


def saved_rstd(rstd: Term) -> Prediction:
    """Predict what an rstd (M, 1) that is wrong in the backward alone does: y is right, the gradients are not."""

    def predict(t: "Terms") -> dict[str, "Tensor"]:
        r = rstd(t)
        return {"dx": t.dx(r), "dgamma": (t.dy * t.x * r).sum(0)}

    return predict


def only(name: str, value: Term) -> Prediction:
    """Predict one wrong tensor, y, dx or dgamma; the others stay right."""
    return lambda t: {name: value(t)}


def contributions(t: "Terms") -> "Tensor":
    """Return what each row adds to dgamma, (M, N)."""
    return t.dy * t.xhat


# What `fused` does with a row of fp32 depends on its tables, so they are asked.


def first_tile(t: "Terms") -> int:
    """Return how many columns of a row the first of its two tiles covers."""
    from rmsnorm_cli.kernels.tables import forward_table

    return forward_table(t.N, 4).A


def tiles(t: "Terms") -> int:
    """Return how many lanes the tiles of a row have together."""
    from rmsnorm_cli.kernels.tables import forward_table

    return forward_table(t.N, 4).A + forward_table(t.N, 4).B


def walk_tile(t: "Terms") -> int:
    """Return how many rows a program of the backward takes at a time."""
    from rmsnorm_cli.kernels.tables import backward_table

    return backward_table(t.N, 4).rows


def walkers(t: "Terms") -> int:
    """Return how many programs walk the rows in the backward."""
    from rmsnorm_cli.kernels.frontplan import multiprocessors
    from rmsnorm_cli.kernels.tables import backward_table

    resident = multiprocessors(t.x.get_device()) * backward_table(t.N, 4).per_sm
    return min(resident, -(-len(t.x) // walk_tile(t)))
