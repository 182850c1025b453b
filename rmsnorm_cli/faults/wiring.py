"""Mistakes in the wiring to autograd: kernels that are right, called with, keeping or returning the wrong thing."""

from rmsnorm_cli.faults.examples import ones
from rmsnorm_cli.faults.fault import AUTOGRAD, DECLARED, EXACT, MEMORY, Change, Fault, rows
from rmsnorm_cli.inputs.cases import Case

ENTRY = "        eps = eps_value(eps)\n"
SAVE = "ctx.save_for_backward(x, gamma, rstd)"
RESTORE = "x, gamma, rstd = ctx.saved_tensors"
RETURN = "return dx, dgamma, None, None"
TRANSPOSED_DY = Case((5, 257), layout="transposed_dy")

FAULTS = (
    Fault(
        name="dy-strides-ignored",
        stage="wiring",
        file="autograd.py",
        story="dy is read as if it lay in memory like x. Gradients that arrive transposed or sliced are permuted or "
        "mixed with their neighbours; gradcheck never sends one.",
        changes=(Change("dy = dy.resolve_neg().contiguous()", "dy = dy.as_strided(x.shape, x.stride())"),),
        exposing=TRANSPOSED_DY,
        hiding=rows(),
        expected=(DECLARED,),
        seen=("unslothai/unsloth #10617", "flagos-ai/FlagGems #1068"),
    ),
    Fault(
        name="x-cut-off",
        stage="wiring",
        file="autograd.py",
        story="x is detached on its way in, as by a fast path without a backward. The output is right, gamma learns, "
        "and everything below the norm gets no gradient.",
        changes=(Change(ENTRY, ENTRY + "        x = x.detach()\n"),),
        exposing=rows(),
        hiding=None,
        expected=(DECLARED, AUTOGRAD),
        seen=("huggingface/candle #2168",),
    ),
    Fault(
        name="gamma-gets-no-gradient",
        stage="wiring",
        file="autograd.py",
        story="The backward returns None in gamma's place, so that gamma never changes. Fine-tuning that freezes its "
        "norms cannot notice.",
        changes=(Change(RETURN, "return dx, None, None, None"),),
        exposing=rows(),
        hiding=None,
        expected=(DECLARED, AUTOGRAD),
        seen=("unslothai/unsloth #4533", "unslothai/unsloth #45"),
    ),
    Fault(
        name="needs-swapped",
        stage="wiring",
        file="autograd.py",
        story="Which gradients are needed is read in the wrong order. Where both are needed nothing shows; with gamma "
        "frozen it is dx that is missing.",
        changes=(
            Change(
                "need_dx, need_dgamma = ctx.needs_input_grad[:2]", "need_dgamma, need_dx = ctx.needs_input_grad[:2]"
            ),
        ),
        exposing=rows(),
        hiding=rows(),
        expected=(AUTOGRAD,),
        seen=("PaddlePaddle/Paddle #77274",),
    ),
    Fault(
        name="kept-as-attribute",
        stage="wiring",
        file="autograd.py",
        story="x, gamma and rstd are kept as an attribute, where PyTorch cannot see that x was changed in place "
        "before the backward. The gradient is then that of another input, without a word.",
        changes=(Change(SAVE, "ctx.kept = (x, gamma, rstd)"), Change(RESTORE, "x, gamma, rstd = ctx.kept")),
        exposing=rows(),
        hiding=rows(),
        expected=(AUTOGRAD,),
        seen=("pytorch/pytorch #5569",),
    ),
    Fault(
        name="y-kept-for-x",
        stage="wiring",
        file="autograd.py",
        story="The backward is handed y in place of x. Rows that normalisation leaves as they are hide it.",
        changes=(Change(SAVE, SAVE.replace("(x,", "(y,")),),
        exposing=rows(),
        hiding=ones(257, M=2),
        expected=(DECLARED,),
        predicted=lambda t: {
            "dx": t.r * (t.u - t.gamma * t.xhat * t.r * (t.u * t.gamma * t.xhat * t.r).mean(-1, keepdim=True)),
            "dgamma": (t.dy * t.gamma * t.xhat * t.r).sum(0),
        },
    ),
    Fault(
        name="rstd-taken-for-constant",
        stage="wiring",
        file="autograd.py",
        story="A second derivative is offered, but in it rstd counts as a constant, as it does when a backward that "
        "keeps rstd is differentiated by machine. First derivatives are right and second ones are wrong by as much as "
        "they are large.",
        changes=(
            Change("if not pair.second_derivative:", "if pair is None:"),
            Change(
                "results = reference.backward(*operands, ctx.eps)",
                "dy, x, gamma = operands\n"
                "            rstd = reference.statistics(x.detach(), ctx.eps)\n"
                "            u, x_hat = dy.float() * gamma.float(), x.float() * rstd\n"
                "            dx = rstd * (u - x_hat * (u * x_hat).mean(-1, keepdim=True))\n"
                "            results = (dx.to(x.dtype), (dy.float() * x_hat).sum(0).to(gamma.dtype))",
            ),
        ),
        exposing=rows(),
        hiding=rows(),
        expected=(AUTOGRAD,),
        seen=("pytorch/pytorch #104040",),
    ),
    Fault(
        name="eps-dropped",
        stage="wiring",
        file="autograd.py",
        story="The wrapper checks eps and passes its own default on. Whoever tests with the default sees nothing.",
        changes=(Change(ENTRY, ENTRY + "        eps = 1e-6\n"),),
        exposing=rows("exact"),
        hiding=rows(),
        expected=(DECLARED, EXACT),
        seen=("meta-pytorch/torchtune #29",),
        predicted=lambda t: {
            "y": t.gamma * t.x * (t.m + 1e-6).rsqrt(),
            "dx": t.dx((t.m + 1e-6).rsqrt()),
            "dgamma": (t.dy * t.x * (t.m + 1e-6).rsqrt()).sum(0),
        },
    ),
    Fault(
        name="result-reused",
        stage="wiring",
        story="The forward keeps its result by shape and hands it out again for the next input of that shape. A check "
        "that calls once, or times one input over and over, sees a right answer and a fast kernel.",
        changes=(
            Change(
                "def forward(x: Tensor",
                "KEPT: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}\n\n\ndef forward(x: Tensor",
            ),
            Change("return y, rstd", "return KEPT.setdefault((x.shape, x.dtype, x.device, eps), (y, rstd))"),
        ),
        exposing=rows(),
        hiding=rows(),
        expected=(MEMORY,),
        seen=("gpu-mode/kernelbot #501",),
    ),
)
