"""What the reports leave open is decided once (README, the contract of all of ours); every door gives the same answer.

Doors: the function, the module, the reference behind both, and the command line where it has a key for it.
"""

import math

import numpy
import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from rmsnorm_cli.config import load
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.gates import declared
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.judging.tolerances import DECLARED
from rmsnorm_cli.kernels import ContractError, RMSNorm, implementation, reference, rms_norm
from rmsnorm_cli.kernels.contract import CallSpec

DOORS = pytest.mark.parametrize("door", ["function", "module"])


def call(door, x, gamma, impl, eps=1e-6):
    """Normalise through one door."""
    if door == "function":
        return rms_norm(x, gamma, eps, impl)
    shape = x.shape[-1] if getattr(x, "dim", lambda: 0)() else 1
    module = RMSNorm(shape, eps, gamma is not None, impl=impl)
    if gamma is not None:
        module.weight = torch.nn.Parameter(gamma, requires_grad=gamma.requires_grad)
    return module(x)


NO_EPS = [
    0,
    0.0,
    -1,
    -1e-6,
    math.nan,
    math.inf,
    True,
    "1e-6",
    None,
    [1e-6],
    1e-46,
    1e39,
    torch.ones(1),
    torch.tensor(1),
]
EPS = [1, 1.0, 1e-12, 3.5, numpy.float32(1e-6), torch.tensor(1e-6)]


@pytest.mark.case("B29", "B58")
@DOORS
@pytest.mark.parametrize("eps", NO_EPS, ids=repr)
def test_what_is_no_eps_is_refused_at_every_door(eps, door, impl, device):
    """None is the module's way to say 1e-6, as torch.nn.RMSNorm's is to say its own."""
    x, gamma = torch.ones(2, 4, device=device), torch.ones(4, device=device)
    if eps is None and door == "module":
        assert torch.equal(call(door, x, gamma, impl, eps), rms_norm(x, gamma, 1e-6, impl))
        return
    with pytest.raises(ContractError, match=r"^eps is "):
        call(door, x, gamma, impl, eps)


@pytest.mark.case("B29", "B89")
@pytest.mark.parametrize("eps", ["0", "0.0", "-1", "nan", "inf", "true", "'1e-6'", "[1e-6]", "1e-46", "1e39"])
def test_what_is_no_eps_is_refused_by_every_command(eps):
    for command in ("verify", "gradcheck", "train", "bench", "exercise"):
        with pytest.raises(ConfigError, match=r"operator\.eps.*expected a finite number above 0 that fp32 can hold"):
            load(command, sets=[f"operator.eps={eps}"])


@pytest.mark.case("B58")
@DOORS
@pytest.mark.parametrize("eps", EPS, ids=repr)
def test_every_kind_of_number_is_an_eps_at_every_door(eps, door, impl, device):
    x, gamma = torch.full((2, 4), 0.5, device=device), torch.ones(4, device=device)
    assert torch.equal(call(door, x, gamma, impl, eps), rms_norm(x, gamma, float(eps), impl))
    if not isinstance(eps, (torch.Tensor, numpy.generic)):
        assert load("verify", options={"operator.eps": eps}).operator.eps == float(eps)


@pytest.mark.case("B62")
@DOORS
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 0)], ids=str)
def test_no_columns_and_no_dimensions_have_no_mean_at_any_door(shape, door, impl, device):
    with pytest.raises(ContractError, match=r"x has (0 dimensions|shape)"):
        call(door, torch.ones(shape, device=device), torch.ones(shape[-1:] or (1,), device=device), impl)


@pytest.mark.case("B62")
def test_no_columns_are_refused_by_the_command_and_no_rows_are_judged(impl, device):
    with pytest.raises(ConfigError, match="cols"):
        load("verify", sets=["verify.cols=[0]"])
    assert load("verify", sets=["verify.rows=[0]"]).verify.rows == (0,)
    execution = "cuda" if device.startswith("cuda") else "cpu" if impl == "reference" else "interpreter"
    verdicts = declared.check(
        implementation(impl), cases.case((0, 33), "float32", "normal", 1e-6, 0), execution, device, DECLARED
    )
    assert {verdict.status for verdict in verdicts} == {"passed"}


@pytest.mark.case("B62")
@DOORS
@pytest.mark.parametrize("shape", [(1,), (3,), (5,), (1, 4), (4, 1), ()], ids=str)
def test_gamma_has_the_shape_of_a_row_and_no_other(shape, door, impl, device):
    if door == "module" and len(shape) != 1:
        pytest.skip("a module's weight has the shape it normalises")
    with pytest.raises(ContractError, match=r"gamma has shape .*: it must be \(4,\)"):
        call(door, torch.ones(2, 4, device=device), torch.ones(shape, device=device), impl)


@pytest.mark.case("B28")
@DOORS
@pytest.mark.parametrize("value", [2e19, 1e30, 3e38, math.inf, -math.inf, math.nan])
def test_rows_whose_squares_leave_float32_are_alike_at_every_door(value, door, impl, device):
    """Finite: y is 0 and so is dx. Infinite or NaN: NaN there (inf · 0), 0 beside an infinity, NaN beside a NaN."""
    x = torch.tensor([[1.0, value, -2.0, 3.0], [1.0, 2.0, 3.0, 4.0]], device=device, requires_grad=True)
    gamma = torch.tensor([1.0, -1.0, 2.0, 0.5], device=device, requires_grad=True)
    y = call(door, x, gamma, impl)
    (dx,) = torch.autograd.grad(y.sum(), x)
    want = torch.zeros(4) if math.isfinite(value) else torch.full((4,), math.nan) if math.isnan(value) else None
    if want is None:
        want = torch.tensor([0.0, math.nan, 0.0, 0.0])
    torch.testing.assert_close(y[0].detach().cpu(), want, atol=0, rtol=0, equal_nan=True)
    if math.isfinite(value):
        assert not dx[0].any()
    alone = call(door, x[1:].detach(), gamma, impl)
    torch.testing.assert_close(y[1:], alone, atol=0, rtol=1e-6 if impl == "reference" else 0)
    assert dx[1].isfinite().all()


@pytest.mark.case("B28")
def test_float64_holds_what_float32_cannot(free, device):
    """The mean square is 14/3 · 1e60. y has five roundings in it, the right value here half as many.

    Four of squares, sums and the division, of which the root takes half; two of the root, one of the product.
    """
    x = torch.tensor([[1e30, -2e30, 3e30]], dtype=torch.float64, device=device)
    y = rms_norm(x, None, impl=free)
    right = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64) / math.sqrt(14 / 3)
    torch.testing.assert_close(y.cpu(), right, atol=0, rtol=8 * 2.0**-53)
    assert float(y[0, 2]) == pytest.approx(1.38873015)


@pytest.mark.case("B35", "B44")
def test_a_second_derivative_is_right_or_refused(impl, device):
    """`reference` and `fused` have one, `rowwise` says that it has none; none is ever wrong."""
    x = torch.tensor([[1.0, 2.0, -1.0]], device=device, requires_grad=True)
    gamma = torch.tensor([1.0, 0.5, 2.0], device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm(x, gamma, impl=impl).square().sum(), x, create_graph=True)
    if impl == "rowwise":
        with pytest.raises(ContractError, match="rowwise has no second derivative"):
            dx.square().sum().backward()
        return
    second = torch.autograd.grad(dx.square().sum(), (x, gamma))
    wide = x.detach().double().requires_grad_(), gamma.detach().double().requires_grad_()
    (wide_dx,) = torch.autograd.grad(reference.forward(*wide, 1e-6).square().sum(), wide[0], create_graph=True)
    for got, want in zip(second, torch.autograd.grad(wide_dx.square().sum(), wide), strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.case("B46")
@DOORS
@pytest.mark.parametrize("of", ["x", "gamma"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # forward mode loads it, in torch itself
def test_a_forward_mode_derivative_is_right_or_refused(of, door, impl, device):
    """A launcher sees numbers and no tangent: it would hand back a derivative of zero without a word."""
    x, gamma = torch.tensor([[1.0, 2.0, -1.0]], device=device), torch.tensor([1.0, 0.5, 2.0], device=device)
    step = torch.tensor([0.3, -0.2, 0.1], device=device)
    with forward_ad.dual_level():
        dual_x = forward_ad.make_dual(x, step[None]) if of == "x" else x
        dual_gamma = forward_ad.make_dual(gamma, step) if of == "gamma" else gamma
        if impl != "reference":
            with pytest.raises(ContractError, match=f"{impl} has no forward-mode derivative"):
                rms_norm(dual_x, dual_gamma, impl=impl)
            call(door, x, gamma, impl)  # a plain call within a dual level is a plain call
            return
        tangent = forward_ad.unpack_dual(rms_norm(dual_x, dual_gamma, impl=impl)).tangent
    h = 1e-6
    ahead = [t.double() + (h * step if name == of else 0) for name, t in (("x", x), ("gamma", gamma))]
    behind = [t.double() - (h * step if name == of else 0) for name, t in (("x", x), ("gamma", gamma))]
    want = (reference.forward(*ahead, 1e-6) - reference.forward(*behind, 1e-6)) / (2 * h)
    torch.testing.assert_close(tangent.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.case("B46")
@DOORS
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_numbers_are_the_same_and_there_is_no_graph(context, door, impl, device):
    x = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    gamma = torch.linspace(0.5, 2, 9, device=device).requires_grad_()
    with context():
        y = call(door, x, gamma, impl)
    assert not y.requires_grad
    assert torch.equal(y, call(door, x, gamma, impl))


@pytest.mark.case("B46")
def test_a_tensor_made_in_inference_mode_is_refused_or_right_where_a_gradient_is_asked(impl, device):
    """PyTorch lets no such tensor be saved, and says what to do; the reference saves none and is right."""
    with torch.inference_mode():
        x = torch.ones(2, 3, device=device)
    gamma = torch.ones(3, device=device, requires_grad=True)
    if impl == "reference":
        rms_norm(x, gamma, impl=impl).sum().backward()
        torch.testing.assert_close(gamma.grad, torch.full((3,), 2 * (1 + 1e-6) ** -0.5, device=device))
        return
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        rms_norm(x, gamma, impl=impl)


@pytest.mark.case("B46")
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # forward mode loads it, in torch itself
def test_a_function_transform_is_refused_by_name_or_right(transform, impl, device):
    x, gamma = torch.tensor([[1.0, 2.0], [3.0, 5.0]], device=device), torch.ones(2, device=device)

    def ask():
        if transform == "vmap":
            return torch.func.vmap(lambda row: rms_norm(row[None], gamma, impl=impl)[0])(x)
        if transform == "grad":
            return torch.func.grad(lambda t: rms_norm(t, gamma, impl=impl).sum())(x)
        return torch.func.jvp(lambda t: rms_norm(t, gamma, impl=impl), (x,), (torch.ones_like(x),))[1]

    if impl != "reference":
        with pytest.raises(ContractError, match=r"inside a torch\.func transform"):
            ask()
        return
    want = {
        "vmap": lambda: reference.forward(x, gamma, 1e-6),
        "grad": lambda: reference.backward(torch.ones_like(x), x, gamma, 1e-6)[0],
        "jvp": lambda: reference.backward(torch.ones_like(x), x, gamma, 1e-6)[0],  # the Jacobian of a row is symmetric
    }[transform]()
    torch.testing.assert_close(ask(), want, atol=1e-6, rtol=1e-5)


@pytest.mark.case("B11")
@pytest.mark.parametrize(("name", "widest"), [("rowwise", 4096), ("fused", 2**30), ("reference", None)])
def test_the_width_limit_is_where_the_contract_says(name, widest, device):
    """Asked without tensors; the command's own limit lies below that of `fused`."""
    accepts = implementation(name).accepts
    kind = torch.device(device).type

    def spec(N):
        return CallSpec((1, N), torch.float32, torch.float32, True, 1e-6, kind)

    if widest is None:
        assert accepts(spec(2**40)) is None
        return
    assert accepts(spec(widest)) is None
    assert f"at most {widest:,}".replace(",", "" if widest == 4096 else ",") in accepts(spec(widest + 1))
    with pytest.raises(ConfigError, match="cols"):
        load("verify", sets=[f"verify.cols=[{2**24 + 1}]"])


@pytest.mark.case("B37")
@pytest.mark.parametrize("dtype", ["int32", "complex64", "float8_e4m3fn", "bool", "double"])
def test_a_dtype_that_no_operand_has_is_refused_by_the_command(dtype):
    with pytest.raises(ConfigError, match=r"--dtype: item 1: got "):
        load("verify", options={"verify.dtypes": [dtype]})
