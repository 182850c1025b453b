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
