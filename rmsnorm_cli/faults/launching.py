"""Mistakes that only `fused` can make before its kernels run: where rows lie, which launch is taken, which is kept."""

from typing import TYPE_CHECKING

from rmsnorm_cli.faults.fault import AUTOGRAD, DECLARED, DETERMINISM, MEMORY, Change, Fault, rows
from rmsnorm_cli.inputs.cases import Case

if TYPE_CHECKING:
    from torch import Tensor

    from rmsnorm_cli.gates.hypotheses import Terms

HEADS = Case((3, 5, 129), layout="transposed_heads")  # two strides: 387 within five rows, 129 from five to five
SEVERAL = Case((17, 257))  # rows of which some have other last bits alone than together
FOUR = Case((2, 3, 5, 65), layout="transposed_heads")  # walked in the order 0, 2, 1 of the leading dimensions


def _swapped(t: "Terms") -> dict[str, "Tensor"]:
    """Predict each row from the one that lies where it was looked for: (i, j) is the row i + 3·j of memory."""
    memory = [5 * i + j for j in range(5) for i in range(3)]
    found = [memory[3 * i + j] for i in range(3) for j in range(5)]
    x_hat = t.xhat[found]
    dx = t.r[found] * (t.u - x_hat * (t.u * x_hat).mean(-1, keepdim=True))
    return {"y": t.gamma * x_hat, "dx": dx, "dgamma": (t.dy * x_hat).sum(0)}


FAULTS = (
    Fault(
        name="strides-swapped",
        stage="launch",
        file="tiles.py",
        story="Of the two strides by which rows are found, each is used in the other's place. Tensors whose leading "
        "dimensions are one stride, all contiguous ones, hide it.",
        changes=(
            Change(
                "rows // per * outer + rows % per * inner if TWO", "rows // per * inner + rows % per * outer if TWO"
            ),
        ),
        exposing=HEADS,
        hiding=rows(),
        expected=(DECLARED,),
        seen=("unslothai/unsloth #10617",),
        predicted=_swapped,
    ),
    Fault(
        name="y-in-another-order",
        stage="launch",
        file="frontplan.py",
        story="Rows are walked, and written one behind the other, in the order of x's strides, and the result is "
        "handed out as if they lay in the order of its dimensions. Where the two orders agree nothing shows.",
        changes=(
            Change(
                "return y, rstd, self.path",
                "return y.as_strided(x.shape, torch.empty(x.shape, device='meta').stride()), rstd, self.path",
            ),
        ),
        exposing=FOUR,
        hiding=rows(),
        expected=(DECLARED,),
        predicted=lambda t: {"y": (t.gamma * t.xhat).reshape(2, 3, 5, -1).permute(0, 2, 1, 3).reshape(len(t.x), -1)},
    ),
    Fault(
        name="dy-columns-taken-as-dense",
        stage="launch",
        file="backplan.py",
        story="The columns of dy are read as if they lay one behind the other. The gradient of a sum is one number "
        "with stride zero, and what lies behind it is not dy.",
        changes=(Change('"DY_UNIT": dy_rows.unit,', '"DY_UNIT": True,'),),
        exposing=Case((5, 257), layout="expanded_dy"),
        hiding=rows(),
        expected=(MEMORY, DECLARED, AUTOGRAD),
        seen=("NVIDIA/Fuser #806", "flagos-ai/FlagGems #1068"),
    ),
    Fault(
        name="rows-taken-as-aligned",
        stage="launch",
        file="rowlayout.py",
        story="Vectors are made as wide as the strides allow, and the address at which the tensor starts is not looked "
        "at. Fresh tensors start on 256 bytes; a view that starts one element later faults.",
        changes=(
            Change(
                "math.gcd(common, lie.inner, lie.outer, tensor.data_ptr() // itemsize if tensor.data_ptr() else 0)",
                "math.gcd(common, lie.inner, lie.outer)",
            ),
        ),
        exposing=Case((3, 5, 128), layout="misaligned"),
        hiding=rows(),
        expected=(DECLARED,),
        seen=("triton-lang/triton #1330",),
        crashes=True,
        cuda_only="the interpreter reads element by element, whatever width was promised",
    ),
    Fault(
        name="row-offset-past-2-31",
        stage="launch",
        file="tiles.py",
        story="The offset of a row is made in 32 bits, which wrap at 2^31 elements. Tensors of less than 4 GiB hide "
        "it. (It is judged by two rows 2^31 elements apart, with room where the wrapped address points.)",
        changes=(
            Change("    return tl.multiple_of(offset, ALIGN)", "    return tl.multiple_of(offset.to(tl.int32), ALIGN)"),
        ),
        exposing=Case((2, 257), "float16", layout="far_rows"),
        hiding=rows(),
        expected=(DECLARED,),
        seen=("linkedin/Liger-Kernel #1483", "linkedin/Liger-Kernel #803"),
        crashes=True,
        cuda_only="it takes 8 GiB of memory, which verify asks of a GPU alone",
    ),
    Fault(
        name="path-by-batch",
        stage="launch",
        file="frontplan.py",
        story="A single row is summed in small chunks, which suits a card that has nothing else to do. Every result is "
        "right, and a row's last bits depend on how many rows it comes with.",
        changes=(
            Change(
                "config = forward_table(self.N, x.element_size(), aligned=self.align * x.element_size())\n",
                'config = forward_table(self.N, x.element_size()) if self.M > 1 else Forward("loop", 128)\n',
            ),
        ),
        exposing=SEVERAL,
        hiding=SEVERAL,
        expected=(DETERMINISM,),
        seen=("vllm-project/vllm #48271",),
    ),
    Fault(
        name="plan-kept-for-other-strides",
        stage="launch",
        file="fused.py",
        story="The plan of a call is kept by shape and dtype, without the strides. The first tensor of a shape is "
        "read rightly, and the next, which lies differently, as if it lay like the first.",
        changes=(Change("tensor.shape, tensor.stride(), ", "tensor.shape, "),),
        exposing=rows(),
        hiding=rows(),
        expected=(AUTOGRAD,),
        seen=("Dao-AILab/quack #29", "Dao-AILab/flash-attention #2298"),
    ),
)
