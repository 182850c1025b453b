"""Reports about dtypes: mixed operands, autocast, and weights that mean one more than they say."""

import pytest
import torch

from rmsnorm_cli.gates import declared
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.inputs.layouts import Inputs
from rmsnorm_cli.judging.tolerances import DECLARED
from rmsnorm_cli.kernels import ContractError, Implementation, RMSNorm, counters, reference, reset_counters, rms_norm
from rmsnorm_cli.kernels.contract import DTYPES

HALF = (torch.float16, torch.bfloat16)


def takes(impl, x_dtype, gamma_dtype):
    """Return whether a pair of dtypes is within a contract, as the README words it."""
    return {
        "reference": True,
        "rowwise": x_dtype == gamma_dtype and x_dtype in (torch.float32, torch.float16),
        "fused": gamma_dtype == x_dtype or (x_dtype in HALF and gamma_dtype == torch.float32),
    }[impl]


@pytest.mark.case("B37")
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gamma_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("door", ["function", "module"])
def test_every_pair_of_dtypes_follows_one_rule_or_is_refused_by_name(door, gamma_dtype, x_dtype, impl, device):
    """Y and dx have x's dtype, dgamma gamma's; what is not taken is named with both dtypes, or its own."""
    x = torch.ones(2, 4, dtype=x_dtype, device=device, requires_grad=True)
    module = RMSNorm(4, device=device, dtype=gamma_dtype, impl=impl)
    call = module if door == "module" else lambda x: rms_norm(x, module.weight, impl=impl)
    if not takes(impl, x_dtype, gamma_dtype):
        with pytest.raises(ContractError, match="has dtype") as refused:
            call(x)
        assert str(x_dtype) in str(refused.value) or str(gamma_dtype) in str(refused.value)
        return
    y = call(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, module.weight.grad.dtype) == (x_dtype, x_dtype, gamma_dtype)


@pytest.mark.case("B37")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_next_layer_takes_what_the_norm_returns(dtype, free, device):
    """A 16-bit linear layer behind a norm with fp32 weights, forward and backward."""
    norm = RMSNorm(8, device=device, dtype=torch.float32, impl=free)
    after = torch.nn.Linear(8, 3, device=device, dtype=dtype)
    x = torch.randn(5, 8, device=device, dtype=dtype, requires_grad=True)
    after(norm(x)).sum().backward()
    assert norm.weight.grad.dtype == torch.float32
    assert x.grad.dtype == dtype


STRANGE = [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.case("B37")
@pytest.mark.parametrize("dtype", STRANGE, ids=str)
@pytest.mark.parametrize("of", ["x", "gamma"])
@pytest.mark.parametrize("door", ["function", "module"])
def test_what_is_no_floating_dtype_of_ours_is_refused_by_name(door, of, dtype, impl, device):
    x, gamma = torch.ones(2, 4, device=device), torch.ones(4, device=device)
    x, gamma = (x.to(dtype), gamma) if of == "x" else (x, gamma.to(dtype))
    module = RMSNorm(4, device=device, impl=impl)
    module.weight = torch.nn.Parameter(gamma, requires_grad=False)
    call = module if door == "module" else lambda x: rms_norm(x, gamma, impl=impl)
    with pytest.raises(ContractError, match=f"{of} has dtype {dtype}"):
        call(x)


@pytest.mark.case("B38")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_leaves_the_norm_to_its_inputs_and_runs_the_fused_kernel(dtype, device, rounded):
    """[1, 3] behind a 16-bit linear layer, weights [1.5, 0.5]: both are 0.6708; backward outside the block."""
    linear = torch.nn.Linear(2, 2, bias=False, device=device)
    linear.weight.data = torch.eye(2, device=device)
    norm = RMSNorm(2, device=device, impl="fused")
    norm.weight.data = torch.tensor([1.5, 0.5], device=device)
    x = torch.tensor([[1.0, 3.0]], device=device, requires_grad=True)
    reset_counters()
    with torch.autocast(torch.device(device).type, dtype):
        y = norm(linear(x))
    y.float().sum().backward()
    assert (counters()["fused"]["forward"], counters()["fused"]["backward"]) == (1, 1)
    rounded(y, [[0.67082033, 0.67082033]])
    assert torch.equal(y, norm(x.detach().to(dtype)))  # the same without autocast
    assert y.dtype == dtype
    assert (x.grad.dtype, norm.weight.grad.dtype, linear.weight.grad.dtype) == (torch.float32,) * 3


def gemma(x, gamma, eps):
    """Normalise and multiply by 1 + gamma, all in fp32."""
    return reference.forward(x.float(), gamma.float() + 1, eps).to(x.dtype)


GEMMAS = {
    "right": gemma,
    "added in bf16": lambda x, gamma, eps: reference.forward(x, gamma + 1, eps),
    "left out": lambda x, gamma, eps: reference.forward(x, gamma, eps),
    "added twice": lambda x, gamma, eps: gemma(x, gamma + 1, eps),
    "in the forward alone": lambda x, gamma, eps: (
        gemma(x, gamma, eps).detach() + reference.forward(x, gamma, eps) - reference.forward(x, gamma, eps).detach()
    ),
}


@pytest.mark.case("B40")
def test_the_oracle_adds_one_in_full_precision_and_gives_the_weights_dgamma(same):
    """W = 2^-8 in bf16, x = [1, 3]: 1 + w is no bf16 number, and lost it gives 0.44726562."""
    x = torch.tensor([[1.0, 3.0]]).bfloat16()
    w, dy = torch.full((2,), 0.00390625).bfloat16(), torch.ones(1, 2).bfloat16()
    want = cases.oracle(Inputs(x, w, dy), 1e-6, "gemma")
    same(want.y, [[0.44896048, 1.34688144]], atol=1e-8, rtol=0)
    plain = cases.oracle(Inputs(x, torch.ones(2).bfloat16(), dy), 1e-6)
    assert torch.equal(want.dgamma, plain.dgamma)
    assert torch.equal(gemma(x, w, 1e-6), torch.tensor([[0.44921875, 1.34375]]).bfloat16())


@pytest.mark.case("B40")
@pytest.mark.parametrize("name", GEMMAS)
def test_a_gemma_norm_that_adds_one_elsewhere_is_caught(name):
    """Judged as --rounding gemma; weights around zero as such models start, where bf16 loses them beside 1."""
    impl = Implementation(name, GEMMAS[name], rounding="gemma")
    case = cases.case((17, 257), "bfloat16" if "bf16" in name else "float32", "aligned", 1e-6, 0)
    inputs = cases.tensors(case)
    want = cases.oracle(inputs, case.eps, "gemma")
    if name == "added in bf16":  # within the declared tolerance by itself: its size is that of one rounding more
        small = torch.full((257,), 0.00390625).bfloat16()
        off = (GEMMAS[name](inputs.x, small, 1e-6).double() / gemma(inputs.x, small, 1e-6).double() - 1).mean()
        assert abs(off) > 3e-3  # a bias of the whole row, which the budget of roundings does not allow
        return
    verdicts = {v.scope: v.status for v in declared.check(impl, case, "cpu", "cpu", DECLARED)}
    assert want.y.isfinite().all()
    assert ("failed" in verdicts.values()) == (name != "right"), verdicts
