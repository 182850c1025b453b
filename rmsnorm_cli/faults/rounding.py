"""Mistakes of precision: the formula is right, but something is squared, summed, kept or rounded in too few bits."""

from rmsnorm_cli.faults.fault import BUDGET, DECLARED, MANY, NAIVE, Change, Fault, rows
from rmsnorm_cli.faults.predict import with_rstd

OF_X = "x_ptr.dtype.element_ty"
MEAN = "mean_square = tl.sum(x * x, axis=0) / N"
RSTD = "rstd = tl.rsqrt(mean_square + eps)"
Y = "y = x * rstd * gamma.to(tl.float32)"
EPS = "eps = tl.full((), eps, tl.float32)"
SAVED = "rstd = torch.empty(M, dtype=torch.float32, device=x.device)"
PARTIAL = "partial = torch.empty((M, N), dtype=torch.float32, device=x.device) if need_dgamma else None"

FAULTS = (
    Fault(
        name="squares-in-half",
        stage="forward",
        story="x is squared in its own dtype. In fp16 the square of 256 is infinite, which makes y zero, and the "
        "square of 1e-4 is zero; fp32 inputs and unit-scale fp16 inputs hide both.",
        changes=(
            Change(
                MEAN,
                f"square = (x.to({OF_X}) * x.to({OF_X})).to(tl.float32)\n    mean_square = tl.sum(square, axis=0) / N",
            ),
        ),
        exposing=rows("fp16_range", "float16"),
        hiding=rows("normal", "float16"),
        expected=(DECLARED,),
        seen=("pytorch/pytorch #133085", "xlite-dev/LeetCUDA #335"),
        predicted=with_rstd(lambda t: (t.x.half().square().double().mean(-1, keepdim=True) + t.eps).rsqrt()),
    ),
    Fault(
        name="sum-in-half",
        stage="forward",
        story="The squares are right, but their sum is kept in x's dtype: in fp16 it is infinite beyond 65504. A row "
        "of 258 numbers around 30 is enough; unit-scale rows are not.",
        changes=(Change(MEAN, f"mean_square = tl.sum((x * x).to({OF_X}), axis=0).to(tl.float32) / N"),),
        exposing=rows("large", "float16"),
        hiding=rows("normal", "float16"),
        expected=(DECLARED,),
        seen=("nntrainer/nntrainer #3935",),
    ),
    Fault(
        name="eps-in-half",
        stage="forward",
        story="eps passes through fp16, where 1e-6 is 1.0133e-6 and 1e-8 is zero. Tiny rows show it by 0.3 %.",
        changes=(Change(EPS, "eps = tl.full((), eps, tl.float16).to(tl.float32)"),),
        exposing=rows("tiny"),
        hiding=rows("normal", N=4096, M=1),
        expected=(DECLARED,),
        predicted=with_rstd(lambda t: (t.m + 2.0**-24 * 17).rsqrt()),  # 1e-6 is 16.8 of fp16's smallest steps
    ),
    Fault(
        name="rstd-in-bfloat16",
        stage="forward",
        story="rstd is rounded to bf16, which keeps 8 bits of it: a whole row is off by up to 0.4 % in one direction. "
        "Tolerances made for bf16 results accept that.",
        changes=(Change(RSTD, "rstd = tl.rsqrt(mean_square + eps).to(tl.bfloat16).to(tl.float32)"),),
        exposing=rows(),
        hiding=rows("exact"),
        expected=(DECLARED,),
    ),
    Fault(
        name="rstd-in-half",
        stage="forward",
        story="rstd is rounded to the dtype of x before it is used and kept. In fp16 that costs half a unit in the "
        "last place for the whole row at once, six times below the declared tolerance.",
        changes=(Change(RSTD, f"rstd = tl.rsqrt(mean_square + eps).to({OF_X}).to(tl.float32)"),),
        exposing=rows("large", "float16"),
        hiding=rows("large"),
        expected=(BUDGET,),
    ),
    Fault(
        name="rstd-kept-in-half",
        stage="dx",
        story="The forward is right, but rstd is kept for the backward in the dtype of x. y is exact, the gradients "
        "are off by up to 2^-11 in each row, and infinite where rstd leaves fp16.",
        changes=(
            Change(SAVED, "rstd = torch.empty(M, dtype=x.dtype, device=x.device)"),
            Change("tl.store(rstd_ptr + row, rstd)", "tl.store(rstd_ptr + row, rstd.to(rstd_ptr.dtype.element_ty))"),
            Change("rstd = tl.load(rstd_ptr + pid)", "rstd = tl.load(rstd_ptr + pid).to(tl.float32)"),
        ),
        exposing=rows("large", "float16"),
        hiding=rows("large"),
        expected=(BUDGET,),
        seen=("pytorch/helion #2273",),
    ),
    Fault(
        name="rounded-before-gamma",
        stage="forward",
        story="x̂ is rounded to x's dtype before gamma multiplies it: two roundings where one was promised. Some "
        "model families define it so, which is why it must be declared and not guessed.",
        changes=(Change(Y, "y = (x * rstd).to(y_ptr.dtype.element_ty).to(tl.float32) * gamma.to(tl.float32)"),),
        exposing=rows(dtype="float16"),
        hiding=rows(),
        expected=(BUDGET,),
        seen=("NVIDIA/TransformerEngine #1132",),
    ),
    Fault(
        name="truncated-store",
        stage="forward",
        story="y is cut to 16 bits instead of rounded. Each element is off by less than one unit in the last place, "
        "but all in one direction: the mean of |y| shrinks.",
        changes=(
            Change(
                Y,
                f"{Y}\n"
                "    if y_ptr.dtype.element_ty == tl.float16:  # clear the 13 bits of fp32 that fp16 does not have\n"
                "        y = (y.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)",
            ),
        ),
        exposing=rows(dtype="float16"),
        hiding=rows(),
        expected=(BUDGET,),
    ),
    Fault(
        name="gamma-in-bfloat16",
        stage="forward",
        story="gamma is read as bf16, as where a kernel assumes the weights' dtype. Weights of exactly one have no "
        "bits to lose.",
        changes=(Change(Y, "y = x * rstd * gamma.to(tl.bfloat16).to(tl.float32)"),),
        exposing=rows(),
        hiding=NAIVE,
        expected=(DECLARED,),
        seen=("linkedin/Liger-Kernel #1462",),
    ),
    Fault(
        name="output-in-fp32",
        stage="forward",
        story="y comes back as fp32 for fp16 inputs, and the next layer fails or silently computes in fp32. A "
        "comparison that promotes its operands before it looks sees nothing.",
        changes=(Change("y = torch.empty_like(x)", "y = torch.empty_like(x, dtype=torch.float32)"),),
        exposing=rows(dtype="float16"),
        hiding=rows(),
        expected=(DECLARED,),
        seen=("huggingface/transformers #30236",),
    ),
    Fault(
        name="u-in-half",
        stage="dx",
        story="dy · gamma is multiplied in the dtype of dy. In fp16 u loses its last bits, which shows where the two "
        "terms of dx nearly cancel, and becomes infinite for large gradients.",
        changes=(
            Change(
                "u = dy * gamma\n",
                "u = (dy.to(dy_ptr.dtype.element_ty) * gamma.to(dy_ptr.dtype.element_ty)).to(tl.float32)\n",
            ),
        ),
        exposing=rows("parallel", "float16"),
        hiding=rows("parallel"),
        expected=(BUDGET,),
    ),
    Fault(
        name="partials-in-half",
        stage="dgamma",
        story="The rows' contributions to dgamma are kept in the dtype of x until they are added up. Each rounding is "
        "small, but there is one for every row, and columns whose sum nearly cancels show them.",
        changes=(
            Change(PARTIAL, PARTIAL.replace("torch.float32", "x.dtype")),
            Change(
                "tl.store(partial_ptr + cells, dy * x_hat, mask=valid)",
                "tl.store(partial_ptr + cells, (dy * x_hat).to(partial_ptr.dtype.element_ty), mask=valid)",
            ),
        ),
        exposing=rows("parallel", "float16", M=67, N=257),
        hiding=MANY,
        expected=(BUDGET,),
    ),
    Fault(
        name="dgamma-summed-in-half",
        stage="dgamma",
        story="The sum over rows runs in the dtype of x. A 16-bit sum stops growing: fp16 loses additions below a "
        "half once it has reached 1024, and a long batch of equal contributions stands still.",
        changes=(
            Change(
                "total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)",
                "total = tl.zeros((BLOCK_M, BLOCK_N), dgamma_ptr.dtype.element_ty)",
            ),
            Change("total += tl.load(", "total = total + tl.load("),
            Change("mask=is_cell, other=0.0)", "mask=is_cell, other=0.0).to(dgamma_ptr.dtype.element_ty)"),
        ),
        exposing=rows("parallel", "float16", M=67, N=257),
        hiding=MANY,
        expected=(BUDGET,),
        seen=("linkedin/Liger-Kernel #950",),
    ),
)
