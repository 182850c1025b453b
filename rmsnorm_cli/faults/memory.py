"""Mistakes in memory: what is not written, what is written over, and what is read as if it lay elsewhere."""

from rmsnorm_cli.faults.fault import CONTRACT, DECLARED, MEMORY, Change, Fault, rows
from rmsnorm_cli.inputs.cases import Case

ROW = "row = tl.program_id(0).to(tl.int64)"
STORE_Y = "tl.store(y_ptr + row * N + columns, y.to(y_ptr.dtype.element_ty), mask=inside)"
ALLOCATE_Y = "y = torch.empty_like(x)"
ALLOCATE_DX = "dx = torch.empty_like(x) if need_dx else None"
SLICED = Case((5, 257), layout="sliced_rows")

FAULTS = (
    Fault(
        name="tail-not-written",
        stage="memory",
        story="y is stored four numbers at a time and the one or two left over at the end of a row are forgotten: "
        "they hold whatever was in memory. Fresh memory is often zero, reused memory often the right answer of a "
        "moment ago.",
        changes=(Change(STORE_Y, STORE_Y.replace("mask=inside", "mask=columns < N // 4 * 4")),),
        exposing=rows(),
        hiding=rows(N=256),
        expected=(MEMORY,),
        seen=("tile-ai/tilelang-ascend #890", "facebookresearch/xformers #785"),
    ),
    Fault(
        name="store-without-mask",
        stage="memory",
        story="The padding lanes are stored too and run over the beginning of the next row. Where rows are written in "
        "ascending order each repairs the damage of the one before; a GPU promises no order. (Here rows run "
        "backwards, and y has room behind its end, so that nothing else is harmed.)",
        changes=(
            Change(ROW, "row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)", times=1),
            Change(STORE_Y, "tl.store(y_ptr + row * N + columns, y.to(y_ptr.dtype.element_ty))"),
            Change(
                ALLOCATE_Y,
                "y = torch.empty(x.numel() + 4096, dtype=x.dtype, device=x.device)[: x.numel()].view(x.shape)",
            ),
        ),
        exposing=rows(),
        hiding=rows(N=256),
        expected=(DECLARED,),
        seen=("ROCm/aiter #5044", "flagos-ai/FlagGems #4985"),
    ),
    Fault(
        name="odd-row-not-run",
        stage="memory",
        story="The forward is launched for pairs of rows and their number is rounded down, so that an odd last row is "
        "never written. Batches are rarely odd.",
        changes=(Change("forward_kernel[(M,)](", "forward_kernel[(M // 2 * 2,)]("),),
        exposing=rows(),
        hiding=rows(M=64),
        expected=(MEMORY,),
        seen=("thu-ml/TurboDiffusion #103",),
    ),
    Fault(
        name="odd-row-not-differentiated",
        stage="memory",
        story="The backward is launched for pairs of rows and their number is rounded down. An odd last row gets no "
        "dx, and its part of dgamma is read from memory that nobody wrote.",
        changes=(Change("backward_kernel[(M,)](", "backward_kernel[(M // 2 * 2,)]("),),
        exposing=rows(),
        hiding=rows(M=64),
        expected=(MEMORY,),
        seen=("flagos-ai/FlagGems #1082",),
    ),
    Fault(
        name="y-over-x",
        stage="memory",
        story="y is written into x to save memory. The output is right; the residual connection that still needs x, "
        "and the backward that reads it again, get y.",
        changes=(Change(ALLOCATE_Y, "y = x"),),
        exposing=rows(),
        hiding=None,
        expected=(MEMORY,),
    ),
    Fault(
        name="dx-over-dy",
        stage="memory",
        story="dx is written into dy to save memory. Every gradient of this norm is right, and whoever else holds "
        "that dy, a residual branch or a hook, finds dx in it.",
        changes=(Change(ALLOCATE_DX, "dx = dy if need_dx else None"),),
        exposing=rows(),
        hiding=rows(),
        expected=(MEMORY,),
        seen=("linkedin/Liger-Kernel #376", "linkedin/Liger-Kernel #1305"),
    ),
    Fault(
        name="layout-not-checked",
        stage="memory",
        story="The contract is checked on a contiguous copy of x and the kernel then runs on x itself. Slices and "
        "transposes are accepted and read as if they were dense: neighbours and permutations come out.",
        changes=(Change("eps = check_rowwise(x, gamma, eps)", "eps = check_rowwise(x.contiguous(), gamma, eps)"),),
        exposing=SLICED,
        hiding=rows(),
        expected=(CONTRACT,),
        seen=("ModelTC/LightLLM #1467",),
    ),
    Fault(
        name="nothing-checked",
        stage="memory",
        story="The launcher checks nothing. A gamma of the wrong length is read past its end, and a dtype that the "
        "kernel was never meant for gives numbers all the same.",
        changes=(Change("eps = check_rowwise(x, gamma, eps)", "eps = float(eps)"),),
        exposing=SLICED,
        hiding=rows(),
        expected=(CONTRACT,),
    ),
)
