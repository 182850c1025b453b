"""Changes that look like mistakes and are none: each is argued, run, and left out of the score."""

from rmsnorm_cli.faults.fault import Change, Fault, rows

FAULTS = (
    Fault(
        name="row-offset-in-32-bits",
        stage="memory",
        story="The row offset is computed in 32 bits. Kernels that take any size wrap to a negative address from 2^31 "
        "elements on.",
        changes=(Change("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),),
        exposing=rows(),
        hiding=rows(),
        expected=(),
        seen=("linkedin/Liger-Kernel #803",),
        equivalent="rowwise refuses partials beyond 64 MiB, that is more than 2^24 elements: every offset it is asked "
        "for fits in 32 bits. In a kernel without that limit this is a mistake.",
    ),
    Fault(
        name="gamma-padding-of-ones",
        stage="forward",
        story="The padding lanes of gamma are loaded as 1 in the forward. The same change to x is a mistake.",
        changes=(
            Change(
                "gamma = tl.load(gamma_ptr + columns, mask=inside, other=0.0)",
                "gamma = tl.load(gamma_ptr + columns, mask=inside, other=1.0)",
            ),
        ),
        exposing=rows(),
        hiding=rows(),
        expected=(),
        equivalent="gamma enters no sum in the forward, and the lanes it fills are not stored: whatever they hold is "
        "computed and thrown away.",
    ),
    Fault(
        name="x-padding-of-ones-in-backward",
        stage="dx",
        story="The padding lanes of x are loaded as 1 in the backward, where x̂ enters a mean. In the forward the "
        "same change is a mistake.",
        changes=(
            Change(
                "x = tl.load(x_ptr + cells, mask=valid, other=0.0).to(tl.float32)",
                "x = tl.load(x_ptr + cells, mask=valid, other=1.0).to(tl.float32)",
            ),
        ),
        exposing=rows(),
        hiding=rows(),
        expected=(),
        equivalent="in the mean x̂ is multiplied by u, whose padding lanes are zero because dy's are: one mask does "
        "for both. Two masks instead of one are a precaution, and no test can tell them apart.",
    ),
    Fault(
        name="dgamma-in-fp32",
        stage="dgamma",
        story="dgamma is returned in fp32 for fp16 weights. Called by hand the launcher breaks its promise.",
        changes=(
            Change(
                "dgamma = torch.zeros_like(gamma) if need_dgamma else None",
                "dgamma = torch.zeros_like(gamma, dtype=torch.float32) if need_dgamma else None",
            ),
        ),
        exposing=rows(dtype="float16"),
        hiding=rows(),
        expected=(),
        equivalent="autograd casts a gradient to the dtype of its tensor, so the one rounding happens there instead "
        "of at the store: the same bits reach gamma.grad.",
    ),
    Fault(
        name="partials-cleared-first",
        stage="dgamma",
        story="The partial sums are cleared before the kernel writes them. It looks like a repair, and costs a pass "
        "over memory.",
        changes=(Change("partial = torch.empty((M, N)", "partial = torch.zeros((M, N)"),),
        exposing=rows(),
        hiding=rows(),
        expected=(),
        equivalent="every element of the partial sums is written before any is read, so what was there first never "
        "shows.",
    ),
    Fault(
        name="masks-that-mask-nothing",
        stage="forward",
        file="frontplan.py",
        story="The forward masks its columns also where its tiles fit the row exactly. It looks like caution, and "
        "costs a comparison for every number.",
        changes=(Change('"FULL": config.A + config.B == N,', '"FULL": False,'),),
        exposing=rows(N=256),
        hiding=rows(N=256),
        expected=(),
        equivalent="where the tiles fit the row no lane lies past its end, so that the mask lets everything through: "
        "the same numbers are loaded, added in the same order and stored.",
    ),
)
