"""Mistakes in dgamma, the sum over rows of dy · x̂: what each row contributes, and which contributions are added up."""

from typing import TYPE_CHECKING

from rmsnorm_cli.faults.examples import ones
from rmsnorm_cli.faults.fault import DECLARED, DETERMINISM, MANY, MEMORY, NAIVE, UNIT_ROWS, Change, Fault, rows
from rmsnorm_cli.faults.predict import only

if TYPE_CHECKING:
    from torch import Tensor

    from rmsnorm_cli.gates.hypotheses import Terms

PARTIAL = "tl.store(partial_ptr + cells, dy * x_hat, mask=valid)"
X_HAT = "x_hat = x * rstd\n"
TILES = "for first in range(0, M, BLOCK_M):"
ROWS = "rows = first + tl.arange(0, BLOCK_M)"
IS_CELL = "is_cell = (rows < M)[:, None] & is_column[None, :]"
SUM = "dgamma = tl.sum(total, axis=0)"
STORE = "tl.store(dgamma_ptr + column, dgamma.to(dgamma_ptr.dtype.element_ty), mask=is_column)"
ALLOCATE = "dgamma = torch.zeros_like(gamma) if need_dgamma else None"


def _without_last_columns(t: "Terms") -> "Tensor":
    full = (t.dy * t.xhat).sum(0)
    full[max(t.N // 64, 1) * 64 :] = 0
    return full


FAULTS = (
    Fault(
        name="dgamma-of-u",
        stage="dgamma",
        story="Each row contributes u · x̂, gamma included, instead of dy · x̂: what one gets by reusing u, or y for "
        "x̂. With gamma = 1 it is right.",
        changes=(
            Change(
                PARTIAL,
                "weight = tl.load(gamma_ptr + lanes, mask=valid, other=0.0).to(tl.float32)\n"
                "        tl.store(partial_ptr + cells, dy * weight * x_hat, mask=valid)",
            ),
        ),
        exposing=rows(),
        hiding=NAIVE,
        expected=(DECLARED,),
        predicted=only("dgamma", lambda t: (t.u * t.xhat).sum(0)),
    ),
    Fault(
        name="dgamma-of-x",
        stage="dgamma",
        story="Each row contributes dy · x: rstd is missing, so large rows drown small ones. Rows of rms 1 hide it.",
        changes=(Change(PARTIAL, "tl.store(partial_ptr + cells, dy * x, mask=valid)"),),
        exposing=rows(),
        hiding=UNIT_ROWS,
        expected=(DECLARED,),
        predicted=only("dgamma", lambda t: (t.dy * t.x).sum(0)),
    ),
    Fault(
        name="dgamma-of-dy",
        stage="dgamma",
        story="Each row contributes dy alone: that is the gradient of a bias, which LayerNorm has and RMSNorm has "
        "not. Rows of ones hide it.",
        changes=(Change(PARTIAL, "tl.store(partial_ptr + cells, dy, mask=valid)"),),
        exposing=rows(),
        hiding=ones(257, M=2),
        expected=(DECLARED,),
        predicted=only("dgamma", lambda t: t.dy.sum(0)),
    ),
    Fault(
        name="x-hat-from-y",
        stage="dgamma",
        story="x̂ is recovered by dividing y by gamma, to save reading x. Where a weight is zero that is 0/0, and a "
        "network that prunes its weights gets NaN.",
        changes=(
            Change(
                X_HAT,
                "weight = tl.load(gamma_ptr + lanes, mask=valid, other=1.0).to(tl.float32)\n"
                "    x_hat = (x * rstd * weight) / weight\n",
            ),
        ),
        exposing=rows(),
        hiding=NAIVE,
        expected=(DECLARED,),
        predicted=lambda t: {
            "dx": t.dx(t.r) + t.u.sum(-1, keepdim=True) * float("nan"),
            "dgamma": (t.dy * (t.gamma * t.xhat / t.gamma)).sum(0),
        },
    ),
    Fault(
        name="last-row-dropped",
        stage="dgamma",
        story="The column sum stops one row early. A last row that contributes nothing hides it.",
        changes=(Change(IS_CELL, "is_cell = (rows < M - 1)[:, None] & is_column[None, :]"),),
        exposing=rows(),
        hiding=rows("zero_rows", M=2),
        expected=(DECLARED,),
        seen=("BobMcDear/attorch #18",),
        predicted=only("dgamma", lambda t: (t.dy * t.xhat)[:-1].sum(0)),
    ),
    Fault(
        name="last-tile-dropped",
        stage="dgamma",
        story="The number of tiles of rows is rounded down, so rows beyond the last full tile are left out. Batches "
        "that are multiples of the tile, as most are, hide it.",
        changes=(Change(TILES, "for first in range(0, M // BLOCK_M * BLOCK_M, BLOCK_M):"),),
        exposing=MANY,
        hiding=rows(M=64),
        expected=(DECLARED,),
        seen=("BobMcDear/attorch #18",),
        predicted=only("dgamma", lambda t: (t.dy * t.xhat)[: len(t.x) // 64 * 64].sum(0)),
    ),
    Fault(
        name="last-row-repeated",
        stage="dgamma",
        story="Rows past the end are clamped to the last one, a habit that is right for loads and wrong for sums: the "
        "last row is counted once for every missing one. Full tiles have none missing.",
        changes=(Change(ROWS, "rows = tl.minimum(first + tl.arange(0, BLOCK_M), M - 1)"),),
        exposing=rows(),
        hiding=rows(M=64),
        expected=(DECLARED,),
        predicted=only("dgamma", lambda t: (t.dy * t.xhat).sum(0) + (-len(t.x) % 64) * (t.dy * t.xhat)[-1]),
    ),
    Fault(
        name="first-tile-only",
        stage="dgamma",
        story="The loop over tiles of rows runs once, so that only the first 64 rows count. Small batches hide it.",
        changes=(Change(TILES, "for first in range(0, BLOCK_M, BLOCK_M):"),),
        exposing=MANY,
        hiding=rows(M=64),
        expected=(DECLARED,),
        predicted=only("dgamma", lambda t: (t.dy * t.xhat)[:64].sum(0)),
    ),
    Fault(
        name="mean-over-rows",
        stage="dgamma",
        story="The contributions are averaged, not added. Adam divides such a factor out again, so training with it "
        "looks the same; a batch of one row hides it too.",
        changes=(Change(SUM, "dgamma = tl.sum(total, axis=0) / M"),),
        exposing=rows(),
        hiding=rows(M=1),
        expected=(DECLARED,),
        predicted=only("dgamma", lambda t: (t.dy * t.xhat).mean(0)),
    ),
    Fault(
        name="last-columns-dropped",
        stage="dgamma",
        story="The grid of the column sum is rounded down, so columns past the last full tile keep the zero they "
        "started with. Widths that are multiples of 64 hide it.",
        changes=(Change("grid = (triton.cdiv(N, BLOCK_N),)", "grid = (max(N // BLOCK_N, 1),)"),),
        exposing=rows(),
        hiding=rows(N=256),
        expected=(DECLARED,),
        seen=("pytorch/pytorch #183861",),
        predicted=only("dgamma", _without_last_columns),
    ),
    Fault(
        name="buffer-kept",
        stage="dgamma",
        story="dgamma is added to a buffer that is kept between calls and never cleared. The first call of a process, "
        "all that many tests make, is right; the second returns the sum of both.",
        changes=(
            Change("def backward(\n", "KEPT: dict[tuple[object, ...], Tensor] = {}\n\n\ndef backward(\n"),
            Change(
                ALLOCATE,
                "dgamma = None\n"
                "    if need_dgamma:\n"
                "        dgamma = KEPT.setdefault((N, gamma.dtype, gamma.device), torch.zeros_like(gamma))",
            ),
            Change(
                STORE,
                "before = tl.load(dgamma_ptr + column, mask=is_column, other=0.0)\n"
                "    tl.store(dgamma_ptr + column, (before + dgamma).to(dgamma_ptr.dtype.element_ty), mask=is_column)",
            ),
        ),
        exposing=rows(),
        hiding=rows(),
        expected=(MEMORY,),
        seen=("triton-lang/triton #54", "ooples/AiDotNet.Tensors #760"),
    ),
    Fault(
        name="atomic-sum",
        stage="dgamma",
        story="Programs add their rows to one buffer with atomics, in whatever order they finish. Each result is "
        "within rounding of the right one, and no two need be equal.",
        changes=(
            Change(PARTIAL, "tl.atomic_add(partial_ptr + lanes, dy * x_hat, mask=valid)"),
            Change(
                "partial = torch.empty((M, N), dtype=torch.float32, device=x.device) if need_dgamma else None",
                "partial = torch.zeros(N, dtype=torch.float32, device=x.device) if need_dgamma else None",
            ),
            Change("column_sum_kernel[grid](partial, dgamma, M, N,", "column_sum_kernel[grid](partial, dgamma, 1, N,"),
        ),
        exposing=MANY,
        hiding=rows(M=1),
        expected=(DETERMINISM,),
        cuda_only="the interpreter runs programs one after the other, so that the order is always the same",
    ),
)
