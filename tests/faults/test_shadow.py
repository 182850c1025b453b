"""A changed file of the kernels reaches the launcher, what does not lead to it stays as it is, nothing is left over."""

import sys
from pathlib import Path

import pytest
import torch

from rmsnorm_cli import faults, kernels
from rmsnorm_cli.faults import CATALOGUE, apply, shadow
from rmsnorm_cli.faults.fault import KERNELS
from rmsnorm_cli.kernels import backplan, frontplan


def test_what_lies_between_a_file_and_the_launcher_is_found_in_the_order_of_its_imports():
    assert shadow.between("rowwise", "rowwise") == ["rowwise"]
    order = shadow.between("tiles", "fused")
    assert {"tiles", "forward", "backward", "split", "frontplan", "backplan", "fused"} <= set(order)
    assert not {"autograd", "contract", "rowwise", "ops", "api"} & set(order)
    assert order.index("tiles") < order.index("forward") < order.index("frontplan") < order.index("fused")


def test_a_file_that_a_launcher_does_not_import_is_refused():
    with pytest.raises(ValueError, match=r"fused\.py does not import rowwise\.py"):
        shadow.between("rowwise", "fused")


@pytest.mark.parametrize("fault", [f for f in CATALOGUE if f.kernel == "fused"], ids=lambda f: f.name)
def test_every_changed_file_of_fused_leads_to_its_launcher(fault):
    assert {fault.file.removesuffix(".py"), "fused"} <= set(shadow.between(fault.file.removesuffix(".py"), "fused"))


def test_a_shadow_runs_the_changed_file_and_shares_the_rest(tmp_path: Path):
    """The changed tiles are those of the changed launcher's kernels; refusals and counters are everybody's."""
    fault = faults.find("rstd-missing-in-front")
    apply.write(fault, tmp_path)
    module = apply.load(fault, tmp_path)
    of_dx = module.BackwardPlan.__init__.__globals__["backward"].input_gradient
    assert Path(of_dx.fn.__code__.co_filename) == apply.place(fault, tmp_path)
    assert module.ContractError is kernels.ContractError
    assert module.count is kernels.autograd.count
    assert module._forward_plans is not kernels.fused._forward_plans, "no plan of the right kernel is taken over"


@pytest.mark.parametrize("changed", ["tiles", "backward", "frontplan", "backplan"])
def test_a_mistake_runs_on_the_kernels_that_it_is_in_wherever_rows_lie(changed: str, tmp_path: Path):
    """The plans of a shadow take no path in Gluon; those of the package still ask."""
    path = tmp_path / f"{changed}.py"
    path.write_text((shadow.folder() / path.name).read_text(encoding="utf-8"), encoding="utf-8")
    module = shadow.load(path, "fused")
    plans = sys.modules[module.BackwardPlan.__module__]
    for question in shadow.CLOSED:
        assert getattr(plans, question)("whatever", 16, most=4) is False
        assert getattr(backplan, question) is getattr(frontplan, question)
    assert plans.BackwardPlan is not backplan.BackwardPlan


def test_nothing_of_a_shadow_is_left_in_the_package(tmp_path: Path):
    before = {name: module for name, module in sys.modules.items() if name.startswith(shadow.PACKAGE)}
    names = dict(vars(kernels))
    fault = faults.find("strides-swapped")
    faults.implementation(fault.name, tmp_path)
    assert {name: module for name, module in sys.modules.items() if name.startswith(shadow.PACKAGE)} == before
    assert vars(kernels) == names


def test_a_file_that_fails_to_import_leaves_nothing_behind_either(tmp_path: Path):
    before = sys.modules["rmsnorm_cli.kernels.tiles"], sys.modules["rmsnorm_cli.kernels.forward"]
    broken = tmp_path / "tiles.py"
    broken.write_text("row_pointers = None\n")  # forward.py imports more than that
    with pytest.raises(ImportError):
        shadow.load(broken, "fused")
    assert (sys.modules["rmsnorm_cli.kernels.tiles"], sys.modules["rmsnorm_cli.kernels.forward"]) == before
    assert kernels.tiles is before[0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_changed_kernel_counts_its_calls_under_the_name_it_is_given(kernel, tmp_path: Path):
    """A gate that counts calls would else catch every mistake for nothing."""
    fault = next(f for f in CATALOGUE if f.kernel == kernel and not f.cuda_only)
    impl = apply.implementation(fault, tmp_path, "named")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(2, 4, device=device, requires_grad=True)
    kernels.reset_counters()
    impl.call(x, torch.ones(4, device=device), 1e-6).sum().backward()
    counted = kernels.counters()["named"]
    assert (counted["forward"], counted["backward"]) == (1, 1)
