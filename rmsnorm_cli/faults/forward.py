"""Mistakes in rstd = 1 / sqrt(mean(x²) + eps): what is summed, what it is divided by, where eps goes."""

from typing import TYPE_CHECKING

from rmsnorm_cli.faults.examples import BALANCED
from rmsnorm_cli.faults.fault import (
    DECLARED,
    FIT,
    UNIT_ROWS,
    ZERO_ROW,
    Change,
    Fault,
    rows,
)
from rmsnorm_cli.faults.predict import with_rstd

if TYPE_CHECKING:
    from torch import Tensor

    from rmsnorm_cli.gates.hypotheses import Terms

MEAN = "mean_square = tl.sum(x * x, axis=0) / N"
RSTD = "rstd = tl.rsqrt(mean_square + eps)"
LOAD_X = "x = tl.load(x_ptr + row * N + columns, mask=inside, other=0.0)"
EPS = "eps = tl.full((), eps, tl.float32)"


def _of_variance(t: "Terms") -> "Tensor":
    """Return rstd made from the variance of each row, (M, 1)."""
    return (t.m - t.x.mean(-1, keepdim=True) ** 2 + t.eps).rsqrt()


def _with_next_row(t: "Terms") -> "Tensor":
    """Return rstd where the padding lanes of a row hold the beginning of the next one, (M, 1)."""
    squares = t.x.square()
    following = squares.roll(-1, 0)[:, : t.B - t.N].sum(-1, keepdim=True)
    following[-1] = 0  # nothing follows the last row
    return ((squares.sum(-1, keepdim=True) + following) / t.N + t.eps).rsqrt()


FAULTS = (
    Fault(
        name="divide-by-block",
        stage="forward",
        story="The sum of squares is divided by the padded block, the lanes that were loaded, and not by the N "
        "numbers that are there. The padding is zero, so the sum is right and only the divisor is too large: y grows "
        "by up to the square root of 2.",
        changes=(Change(MEAN, "mean_square = tl.sum(x * x, axis=0) / BLOCK"),),
        exposing=rows(),
        hiding=rows(N=256),
        expected=(DECLARED, FIT),
        predicted=with_rstd(lambda t: (t.m * t.N / t.B + t.eps).rsqrt()),
    ),
    Fault(
        name="divide-by-n-minus-one",
        stage="forward",
        story="The divisor is N - 1, as in an unbiased variance. At N = 1 that is a division by zero, at N = 4096 an "
        "error of 1.2e-4, which 16-bit tolerances swallow.",
        changes=(Change(MEAN, "mean_square = tl.sum(x * x, axis=0) / (N - 1)"),),
        exposing=rows(),
        hiding=rows("normal", "float16", N=4096, M=1),
        expected=(DECLARED, FIT),
        predicted=with_rstd(lambda t: (t.m * t.N / (t.N - 1) + t.eps).rsqrt()),
    ),
    Fault(
        name="not-divided",
        stage="forward",
        story="The sum of squares is used as it is: an L2 norm, not a root mean square. y shrinks by the square root "
        "of N, which only a row of one number does not show.",
        changes=(Change(MEAN, "mean_square = tl.sum(x * x, axis=0)"),),
        exposing=rows(),
        hiding=rows(N=1),
        expected=(DECLARED, FIT),
        seen=("kyegomez/zeta #180",),
        predicted=with_rstd(lambda t: (t.m * t.N + t.eps).rsqrt()),
    ),
    Fault(
        name="layernorm",
        stage="forward",
        story="The mean is subtracted first: that is LayerNorm without its bias. Rows that already have mean zero, "
        "and most random tests nearly have it, hide it.",
        changes=(
            Change(
                MEAN,
                "x = tl.where(inside, x - tl.sum(x, axis=0) / N, 0.0)\n    mean_square = tl.sum(x * x, axis=0) / N",
            ),
        ),
        exposing=rows("offset"),
        hiding=BALANCED,
        expected=(DECLARED,),
        seen=("mit-han-lab/omniserve #32",),
        predicted=lambda t: {
            **with_rstd(_of_variance)(t),
            "y": t.gamma * (t.x - t.x.mean(-1, keepdim=True)) * _of_variance(t),
        },
    ),
    Fault(
        name="variance-for-mean-square",
        stage="forward",
        story="rstd is made from the variance, although x itself is not centred. The two differ by the square of the "
        "mean, so inputs around zero hide it.",
        changes=(
            Change(
                MEAN,
                "centred = tl.where(inside, x - tl.sum(x, axis=0) / N, 0.0)\n"
                "    mean_square = tl.sum(centred * centred, axis=0) / N",
            ),
        ),
        exposing=rows("offset"),
        hiding=BALANCED,
        expected=(DECLARED, FIT),
        seen=("huggingface/pytorch-image-models #2380", "keras-team/keras #22393"),
        predicted=with_rstd(_of_variance),
    ),
    Fault(
        name="eps-outside-root",
        stage="forward",
        story="eps is added to the root instead of the mean square. At rms 1 the two differ by 5e-7; where the mean "
        "square is near eps, by 41 %, and a row of zeros gets 1/eps instead of 1/sqrt(eps).",
        changes=(Change(RSTD, "rstd = 1.0 / (tl.sqrt(mean_square) + eps)"),),
        exposing=rows("tiny"),
        hiding=rows("normal", N=4096, M=1),
        expected=(DECLARED, FIT),
        seen=("allenai/OLMo #281", "tile-ai/tilelang #1243"),
        predicted=with_rstd(lambda t: 1 / (t.m.sqrt() + t.eps)),
    ),
    Fault(
        name="eps-forgotten",
        stage="forward",
        story="No eps is added. Nothing shows until a row is tiny, or zero: then rstd is infinite and zero times "
        "infinity is NaN.",
        changes=(Change(RSTD, "rstd = tl.rsqrt(mean_square)"),),
        exposing=rows("tiny"),
        hiding=rows("normal", N=4096, M=1),
        expected=(DECLARED, FIT),
        predicted=with_rstd(lambda t: t.m.rsqrt()),
    ),
    Fault(
        name="eps-in-the-sum",
        stage="forward",
        story="eps is added to the sum of squares, before the division, so that N times less of it arrives. Rows of "
        "ordinary size do not show it.",
        changes=(
            Change(MEAN, "mean_square = (tl.sum(x * x, axis=0) + eps) / N"),
            Change(RSTD, "rstd = tl.rsqrt(mean_square)"),
        ),
        exposing=rows("tiny"),
        hiding=rows("normal", N=4096, M=1),
        expected=(DECLARED, FIT),
        predicted=with_rstd(lambda t: (t.m + t.eps / t.N).rsqrt()),
    ),
    Fault(
        name="eps-as-floor",
        stage="forward",
        story="The mean square is kept from falling below eps instead of having eps added. Rows of ordinary size "
        "agree, rows of zeros agree too; between them y is up to 1.41 times too large.",
        changes=(Change(RSTD, "rstd = tl.rsqrt(tl.maximum(mean_square, eps))"),),
        exposing=rows("tiny"),
        hiding=ZERO_ROW,
        expected=(DECLARED, FIT),
        predicted=with_rstd(lambda t: t.m.clamp(min=t.eps).rsqrt()),
    ),
    Fault(
        name="eps-hard-coded",
        stage="forward",
        story="The kernel adds 1e-5 whatever eps it is given. Defaults that differ between a framework, a converter "
        "and a kernel do the same.",
        changes=(Change(EPS, "eps = tl.full((), 1e-5, tl.float32)"),),
        exposing=rows("tiny"),
        hiding=rows("normal", N=4096, M=1),
        expected=(DECLARED, FIT),
        seen=("goodfire-ai/spd #625", "huggingface/transformers #38025"),
        predicted=with_rstd(lambda t: (t.m + 1e-5).rsqrt()),
    ),
    Fault(
        name="eps-scaled-by-max",
        stage="forward",
        story="Rows are divided by their largest |x| so that squares cannot overflow, but eps is added after that: it "
        "is in effect multiplied by max²; a row of zeros is 0/0. A spike in a quiet row shows it most.",
        changes=(
            Change(
                MEAN,
                "largest = tl.max(tl.abs(x), axis=0)\n"
                "    mean_square = tl.sum((x / largest) * (x / largest), axis=0) / N",
            ),
            Change(RSTD, "rstd = tl.rsqrt(mean_square + eps) / largest"),
        ),
        exposing=rows("tiny"),
        hiding=UNIT_ROWS,
        expected=(DECLARED, FIT),
        seen=("apple/coremltools #2821",),
        predicted=with_rstd(lambda t: (t.m + t.eps * t.x.abs().amax(-1, keepdim=True) ** 2).rsqrt()),
    ),
    Fault(
        name="sqrt-for-rsqrt",
        stage="forward",
        story="The row is multiplied by its root mean square instead of divided by it. Rows of rms 1 hide it "
        "altogether, and unit-normal rows come close.",
        changes=(Change(RSTD, "rstd = tl.sqrt(mean_square + eps)"),),
        exposing=rows(),
        hiding=UNIT_ROWS,
        expected=(DECLARED, FIT),
        seen=("mosaicml/llm-foundry #371",),
        predicted=with_rstd(lambda t: (t.m + t.eps).sqrt()),
    ),
    Fault(
        name="mean-of-magnitudes",
        stage="forward",
        story="The mean of |x| takes the place of the root mean square: an L1 norm. On unit-normal rows y is 25 % too "
        "large; where all |x| of a row are equal the two are the same number.",
        changes=(
            Change(
                MEAN,
                "mean_square = (tl.sum(tl.abs(x), axis=0) / N) * (tl.sum(tl.abs(x), axis=0) / N)",
            ),
        ),
        exposing=rows(),
        hiding=UNIT_ROWS,
        expected=(DECLARED, FIT),
        predicted=with_rstd(lambda t: (t.x.abs().mean(-1, keepdim=True) ** 2 + t.eps).rsqrt()),
    ),
    Fault(
        name="first-row-statistics",
        stage="forward",
        story="Every row is normalised by the root mean square of the first one. Rows of equal size, or a single row, "
        "hide it.",
        changes=(
            Change(
                MEAN,
                "first = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)\n"
                "    mean_square = tl.sum(first * first, axis=0) / N",
            ),
        ),
        exposing=rows(),
        hiding=rows(M=1),
        expected=(DECLARED, FIT),
        predicted=with_rstd(lambda t: t.r[:1].expand_as(t.r)),
    ),
    Fault(
        name="half-the-columns",
        stage="forward",
        story="Only the first half of a row enters its sum of squares, as after a reduction that lost a step. Rows "
        "whose second half is empty, or rows of zeros, hide it.",
        changes=(Change(MEAN, "mean_square = tl.sum(tl.where(columns < N // 2, x * x, 0.0), axis=0) / N"),),
        exposing=rows(),
        hiding=ZERO_ROW,
        expected=(DECLARED, FIT),
        predicted=with_rstd(lambda t: (t.x[:, : t.N // 2].square().sum(-1, keepdim=True) / t.N + t.eps).rsqrt()),
    ),
    Fault(
        name="next-row-in-the-sum",
        stage="forward",
        story="The mask keeps the load inside the tensor but not inside the row, so the padding lanes of a row bring "
        "in the beginning of the next. Where N is a power of two there are no such lanes.",
        changes=(
            Change(
                LOAD_X,
                "x = tl.load(x_ptr + row * N + columns, mask=row * N + columns < tl.num_programs(0) * N, other=0.0)",
            ),
        ),
        exposing=rows(),
        hiding=rows(N=256),
        expected=(DECLARED,),
        seen=("flagos-ai/FlagGems #4985",),
        predicted=with_rstd(_with_next_row),
    ),
    Fault(
        name="padding-of-ones",
        stage="forward",
        story="The padding lanes are loaded as 1, not 0, and enter the sum. The same happens when lanes are changed "
        "after the load (a mean subtracted, say) and not masked again.",
        changes=(
            Change(
                LOAD_X,
                "x = tl.load(x_ptr + row * N + columns, mask=inside, other=1.0)",
            ),
        ),
        exposing=rows(),
        hiding=rows(N=256),
        expected=(DECLARED, FIT),
        seen=(
            "tenstorrent/tt-metal #43350",
            "linkedin/Liger-Kernel #518",
            "triton-lang/triton #9838",
            "unslothai/unsloth #1867",
        ),
        predicted=with_rstd(lambda t: (t.m + (t.B - t.N) / t.N + t.eps).rsqrt()),
    ),
)
