"""The library's face: the function, the module, and the look-up of implementations."""

import copy
import importlib.metadata
import inspect
import subprocess
import sys

import numpy
import pytest
import torch

from rmsnorm_cli.kernels import (
    BUILT_IN,
    DEFAULT,
    ContractError,
    Implementation,
    MissingPackage,
    RMSNorm,
    UnknownImplementation,
    api,
    counters,
    implementation,
    peers,
    reference,
    reset_counters,
    rms_norm,
)

close = torch.testing.assert_close


def test_one_default_eps_everywhere():
    """1e-6 for the function and the module, whatever the dtype: recorded in the module, not decided at the call."""
    assert inspect.signature(rms_norm).parameters["eps"].default == 1e-6
    for dtype in (torch.float16, torch.float64):
        assert RMSNorm(3, dtype=dtype).eps == 1e-6
    assert RMSNorm(3, eps=1e-3).eps == 1e-3


def test_the_default_implementation_is_known():
    """What runs without a name given is a kernel of ours that the look-up finds."""
    assert DEFAULT in BUILT_IN
    assert implementation(DEFAULT).ours
    assert inspect.signature(rms_norm).parameters["impl"].default == DEFAULT


@pytest.mark.parametrize("shape", [3, (3,), [2, 3], torch.Size([4, 2, 3])])
@pytest.mark.parametrize("affine", [True, False])
def test_module_stands_in_for_torch(shape, affine, device):
    """Arguments, parameters, state_dict in both directions, values and gradients are those of torch.nn.RMSNorm."""
    theirs = torch.nn.RMSNorm(shape, eps=1e-5, elementwise_affine=affine, device=device)
    ours = RMSNorm(shape, eps=1e-5, elementwise_affine=affine, device=device, impl="reference")
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert list(ours.state_dict()) == (["weight"] if affine else [])
    x = torch.randn(5, *theirs.normalized_shape, device=device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [module(given) for module, given in zip((ours, theirs), inputs, strict=True)]
    close(results[0], results[1])
    for y in results:
        y.pow(2).sum().backward()
    close(inputs[0].grad, inputs[1].grad)
    if affine:
        close(ours.weight.grad, theirs.weight.grad)
        assert ours.weight.grad.shape == theirs.weight.shape


def test_module_resets_its_weight_to_ones_and_says_what_it_is():
    """reset_parameters and print work as in torch, and the implementation is shown."""
    module = RMSNorm((2, 3), impl="reference")
    torch.nn.init.zeros_(module.weight)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(2, 3))
    assert repr(module) == "RMSNorm((2, 3), eps=1e-06, elementwise_affine=True, impl='reference')"


def test_module_can_be_copied_and_saved(tmp_path):
    """A copy computes the same; a saved state is tensors alone."""
    module = RMSNorm(3)
    x = torch.ones(1, 3) if not torch.cuda.is_available() else torch.ones(1, 3, device="cuda")
    module.to(x.device)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    assert list(torch.load(tmp_path / "state.pt", weights_only=True)) == ["weight"]


def test_rowwise_module_takes_rows_and_refuses_copies(device):
    """Two normalised dimensions of a contiguous x are one view; where flattening would copy, the contract speaks."""
    module = RMSNorm((2, 3), device=device, impl="rowwise")
    x = torch.randn(5, 2, 3, device=device)
    close(module(x), torch.nn.functional.rms_norm(x, (2, 3), None, 1e-6))
    with pytest.raises(ContractError, match="not contiguous"):
        module(torch.randn(5, 3, 2, device=device).transpose(1, 2))
    with pytest.raises(ContractError, match="2 dimensions"):
        RMSNorm(3, device=device, impl="rowwise")(x)


def test_a_copy_that_flattening_needs_is_counted(device):
    """The reference takes any layout; the module's copy shows in the counters."""
    reset_counters()
    x = torch.randn(5, 3, 2, device=device).transpose(1, 2)
    close(RMSNorm((2, 3), device=device, impl="reference")(x), torch.nn.functional.rms_norm(x, (2, 3), None, 1e-6))
    assert counters()["reference"]["copies"] == 1


@pytest.mark.parametrize("shape", [(2, 4), (4,), (3, 2), ()])
def test_module_refuses_an_x_that_does_not_end_in_its_shape(shape):
    """A wrong last dimension, too few or swapped ones are refused with both shapes, before anything is computed."""
    with pytest.raises(ContractError, match=r"x has shape .*must end in \(2, 3\)"):
        RMSNorm((2, 3), impl="reference")(torch.ones(shape))


@pytest.mark.parametrize("eps", [0, -1.0, float("nan"), True, "1e-6"])
def test_module_refuses_a_bad_eps_when_it_is_made(eps):
    """Not at the first forward, hours later."""
    with pytest.raises(ContractError, match="eps is"):
        RMSNorm(3, eps=eps)


def test_module_and_function_refuse_an_unknown_name(device):
    """When the module is made; the function at its call."""
    with pytest.raises(UnknownImplementation, match=r"no implementation 'rowise' \(did you mean 'rowwise'\?\)"):
        RMSNorm(3, impl="rowise")
    with pytest.raises(UnknownImplementation, match=r"known are .*package\.module:callable"):
        rms_norm(torch.ones(1, 2, device=device), None, impl="nothing like it")
    for stranger in (None, torch.nn.functional.rms_norm, 3):
        with pytest.raises(UnknownImplementation, match=r"impl is a .*it must be the name of an implementation"):
            RMSNorm(3, impl=stranger)


def test_module_takes_every_integer_as_a_width_and_no_empty_shape(device):
    """A width read from an array, as torch.nn.RMSNorm takes it."""
    assert RMSNorm(numpy.int64(3), device=device)(torch.ones(1, 3, device=device)).shape == (1, 3)
    with pytest.raises(ContractError, match=r"normalized_shape is \(\)"):
        RMSNorm(())


def test_an_implementation_may_be_passed_itself(device):
    """Function and module take an Implementation as well as a name, which is how a changed kernel is trained."""
    halved = Implementation("halved", lambda x, gamma, eps: x / 2)
    x = torch.ones(1, 2, device=device)
    assert torch.equal(rms_norm(x, impl=halved), x / 2)
    module = RMSNorm(2, device=device, impl=halved)
    assert torch.equal(module(x), x / 2)
    assert "impl='halved'" in repr(module)


@pytest.mark.parametrize("name", ["reference", "rowwise", "torch"])
def test_named_implementations_agree(name, device):
    """Each computes the y, dx and dgamma of x = [3, 4]."""
    found = implementation(name)
    assert found.name == name
    x, gamma = torch.tensor([[3.0, 4.0]], device=device), torch.ones(2, device=device)
    x.requires_grad_()
    gamma.requires_grad_()
    y = found.call(x, gamma, 1e-6)
    y.backward(torch.tensor([[1.0, 2.0]], device=device))
    close(y, torch.tensor([[0.848528, 1.131371]], device=device), atol=1e-6, rtol=0)
    close(x.grad, torch.tensor([[-0.090510, 0.067882]], device=device), atol=1e-6, rtol=0)
    close(gamma.grad, torch.tensor([0.848528, 2.262742], device=device), atol=1e-6, rtol=0)


def test_what_is_known_of_each_before_it_runs():
    """Ours promise determinism; a kernel needs CUDA or the interpreter; where the named ones round is known."""
    rowwise, plain = implementation("rowwise"), implementation("reference")
    assert (rowwise.triton, rowwise.ours, rowwise.deterministic) == (True, True, True)
    assert (plain.triton, plain.ours, plain.deterministic) == (False, True, True)
    assert implementation("torch", "llama").rounding == "fp32"  # known; the argument is for foreign callables
    with pytest.raises(ValueError, match="rounding is 'bf16'"):
        implementation("torch", "bf16")


def test_compiled_reference_is_compiled_and_never_falls_back(device):
    """Each shape is a fresh graph; where Dynamo's limit would fall back to eager, an error is raised instead."""
    compiled = peers.Compiled()
    for M, N in ((2, 3), (4, 5)):
        x = torch.randn(M, N, device=device, requires_grad=True)
        gamma = torch.randn(N, device=device, requires_grad=True)
        y = compiled(x, gamma, 1e-6)
        close(y, reference.forward(x, gamma, 1e-6))
        torch.autograd.grad(y.sum(), (x, gamma))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(RuntimeError, match=r"recompile limit \(1\) was reached"),
    ):
        compiled(x.detach(), gamma, 1e-6)  # the same key, and yet another graph
    with torch._dynamo.config.patch(recompile_limit=1):
        close(compiled(x[:3].detach(), gamma, 1e-6), reference.forward(x[:3], gamma, 1e-6))  # a new key starts afresh


@pytest.mark.parametrize(
    ("name", "install"),
    [("liger", "liger-kernel==0.8.5"), ("quack", "quack-kernels==0.6.5"), ("fla", "fla-core==0.6.0")],
)
def test_a_missing_package_comes_with_its_install_line(name, install, monkeypatch):
    """Asking for another project's kernel that is not installed says how to get it; its name is known all the same."""

    def nothing(distribution: str) -> str:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    assert name in BUILT_IN
    with pytest.raises(MissingPackage, match=f"pip install {install}"):
        implementation(name)


def test_a_package_that_cannot_be_imported_says_why(monkeypatch):
    """Installed and yet broken is not the same as missing: the reason is shown beside the install line."""
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "0.8.5")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(MissingPackage, match=r"liger cannot be imported .*liger_kernel.*pip install"):
        implementation("liger")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stand in a folder that holds a package with a callable, and files with worse."""
    package = tmp_path / "my_norms"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "double.py").write_text(
        "def norm(x, gamma, eps): return x * 2\nclass Box:\n    triple = lambda x, g, e: x * 3\nK = 1"
    )
    (tmp_path / "alone.py").write_text("from my_norms.double import norm")
    (tmp_path / "broken.py").write_text("import no_such_thing")
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("my_norms", "rmsnorm_foreign_"))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "factor"),
    [("my_norms.double:norm", 2), ("my_norms.double:Box.triple", 3), ("alone.py:norm", 2), ("./alone.py:norm", 2)],
)
def test_foreign_callables_are_found_by_module_or_file(name, factor, folder):
    """The current folder comes first on the path, as it does not for a console script."""
    found = implementation(name, "gemma")
    assert (found.name, found.rounding, found.ours, found.accepts) == (name, "gemma", False, None)
    assert torch.equal(found.call(torch.ones(1, 2), None, 1e-6), torch.full((1, 2), float(factor)))
    assert sys.path[0] == str(folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my_norms.double:nope", "has no 'nope'"),
        ("my_norms.double:K", "is a int, not something to call"),
        ("my_norms.missing:norm", "No module named 'my_norms.missing'"),
        ("missing.py:norm", "there is no file missing.py"),
        ("broken.py:norm", "No module named 'no_such_thing'"),
        ("leaving.py:norm", "SystemExit"),
        (":norm", "is not of the form"),
        ("my_norms.double:", "is not of the form"),
    ],
)
def test_a_foreign_name_that_leads_nowhere_is_unknown(name, says, folder):
    """One sentence that repeats the name and says what was missing; an exit at import does not end the tool."""
    with pytest.raises(UnknownImplementation) as refusal:
        implementation(name)
    assert says in str(refusal.value)
    assert repr(name) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_kernels_import_nothing_above_them():
    """In a fresh process the package brings in no command, no console, and no other project's kernels."""
    program = "import sys, rmsnorm_cli.kernels; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("rmsnorm_cli.")}
    assert all(name.startswith("rmsnorm_cli.kernels") for name in ours), ours
    assert not {"typer", "rich", "pydantic", "matplotlib", "liger_kernel", "quack", "fla"} & set(done.stdout.split())


def test_the_public_names_are_there():
    """What the README tells people to import."""
    assert api.RMSNorm is RMSNorm
    assert issubclass(RMSNorm, torch.nn.RMSNorm)
