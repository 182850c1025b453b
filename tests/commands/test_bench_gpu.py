"""`rmsnorm bench` on a GPU: what stands beside what, agreement with another benchmark, and who is caught cheating."""

import pytest
import torch

from rmsnorm_cli import config, environment
from rmsnorm_cli.commands import bench
from rmsnorm_cli.console import Console
from rmsnorm_cli.rundir.run import open_run

pytestmark = pytest.mark.gpu


def row(outcome, name, table=0):
    """Return an implementation's row in one of the first cell's tables."""
    return next(row for row in outcome.summary["cells"][0]["tables"][table]["rows"] if row["impl"] == name)


def on_gpu(tmp_path, impl, shapes, **options):
    """Run the command on the first GPU and return its outcome."""
    device = environment.Device("cuda", "cuda", "cuda:0", torch.cuda.get_device_name(0))
    given = {"run.dir": str(tmp_path / "runs"), "run.impl": impl, "bench.shapes": shapes}
    given |= {"bench.dtypes": ["float32"], "bench.caches": ["cold", "warm"], "bench.samples": 40, "bench.seconds": 1}
    settings = config.load(
        "bench", file=None, environ={}, sets=[], options=given | {f"bench.{k}": v for k, v in options.items()}
    )
    with open_run(settings, ["rmsnorm", "bench"], device, environment.snapshot(device)) as run:
        outcome = bench.run(settings, run, Console(quiet=True), device)
        run.finish(outcome)
    return outcome


@pytest.mark.case("B71")
def test_on_a_gpu_whole_calls_gpu_time_and_host_time_stand_side_by_side(tmp_path):
    few = {"perimeters": ["forward", "backward"], "samples": 10, "seconds": 0.2, "bootstrap": 300}
    outcome = on_gpu(tmp_path, ["fused", "rowwise", "torch", "reference", "compile"], [[2048, 1025]], **few)
    (cell,) = outcome.summary["cells"]
    tables = cell["tables"]
    assert [table["measure"] for table in tables if table["perimeter"] == "backward"] == ["calls", "gpu", "gpu", "host"]
    assert {entry["status"] for table in tables for entry in table["rows"]} == {"passed"}
    for table in tables:
        if table["measure"] == "gpu" and table["cache"] == "cold":
            assert all(0 < entry["share_of_stream"]["estimate"] < 1.05 for entry in table["rows"])
            assert table["stream"]["bytes_per_second"] < 2e13, "no memory of any card is so fast"


def test_on_a_gpu_memory_is_what_the_formula_needs_and_no_more(tmp_path):
    """Y of 2048 × 1025 fp32 takes 8,396,800 bytes, rstd 8,192; each is rounded up to 512 by the allocator."""
    given = {"perimeters": ["forward", "forward_train"], "measures": ["gpu"]}
    outcome = on_gpu(tmp_path, ["fused", "torch", "reference"], [[2048, 1025]], **given)
    memory = outcome.summary["cells"][0]["memory"]
    y, rstd = 2048 * 1025 * 4, 2048 * 4
    for name in ("fused", "torch"):
        assert y <= memory[name]["forward"]["peak_bytes"] <= y + rstd + 2 * 512
        assert y + rstd <= memory[name]["forward_train"]["peak_bytes"] <= y + rstd + 3 * 512
        assert memory[name]["forward_train"]["saved_bytes_beyond_inputs"] == rstd
    assert memory["reference"]["forward_train"]["peak_bytes"] >= 2 * y, "autograd keeps a matrix more at least"


@pytest.mark.alone
@pytest.mark.parametrize("perimeter", ["forward", "backward"])
def test_on_a_gpu_times_agree_with_tritons_own_benchmark_within_three_percent(tmp_path, perimeter):
    """`do_bench` empties the cache before every call and times it by events; ours are graphs of rotating buffers."""
    from triton.testing import do_bench

    given = {"perimeters": [perimeter], "dtypes": ["bfloat16"], "measures": ["gpu"], "caches": ["cold"]}
    outcome = on_gpu(tmp_path, ["torch"], [[32768, 4096]], **given)
    x, dy = torch.randn(2, 32768, 4096, device="cuda:0", dtype=torch.bfloat16)
    gamma = torch.randn(4096, device="cuda:0", dtype=torch.bfloat16, requires_grad=True)
    x.requires_grad_()
    y = torch.nn.functional.rms_norm(x, (4096,), gamma, 1e-6)

    def forward():
        with torch.no_grad():
            torch.nn.functional.rms_norm(x, (4096,), gamma, 1e-6)

    def backward():
        torch.autograd.grad(y, (x, gamma), dy, retain_graph=True)

    theirs = do_bench(forward if perimeter == "forward" else backward, return_mode="median") / 1e3
    assert row(outcome, "torch")["median"] == pytest.approx(theirs, rel=0.03)


@pytest.mark.alone
def test_on_a_gpu_a_planted_slowdown_is_told_with_its_size(tmp_path, foreign):
    """The same kernel with a wait of a twentieth of its time behind it."""
    name = foreign(
        """
        def norm(x, gamma, eps):
            y = torch.nn.functional.rms_norm(x, x.shape[-1:], gamma, eps)
            torch.cuda._sleep(20_000)
            return y
        """
    )
    given = {"perimeters": ["forward"], "measures": ["gpu"], "caches": ["cold"]}
    outcome = on_gpu(tmp_path, [str(tmp_path / name), "torch"], [[16384, 4096]], **given)
    control = outcome.summary["cells"][0]["tables"][0]["control"]
    if not control["held"]:
        pytest.skip(f"needs a GPU that nothing else uses: {control['text']}")
    against = row(outcome, str(tmp_path / name))["against"]["torch"]
    added = row(outcome, str(tmp_path / name))["median"] / row(outcome, "torch")["median"]
    assert against["word"] == "slower", against
    assert against["estimate"] == pytest.approx(added, rel=0.01)
    assert 1.02 < against["estimate"] < 1.5


@pytest.mark.case("B70")
@pytest.mark.parametrize("wait", [0, 400_000])
def test_on_a_gpu_work_on_another_stream_is_caught(tmp_path, foreign, wait):
    name = foreign(
        f"""
        other = torch.cuda.Stream()
        def norm(x, gamma, eps):
            with torch.cuda.stream(other):
                torch.cuda._sleep({wait} + 1)
                return right(x, gamma, eps)
        """
    )
    outcome = on_gpu(tmp_path, [str(tmp_path / name), "torch"], [[8192, 4096]], perimeters=["forward"])
    failed = row(outcome, str(tmp_path / name))
    assert failed["status"] == "failed"
    assert "on another stream" in failed["detail"] or "first wrong element" in failed["detail"]
    for table in outcome.summary["cells"][0]["tables"]:
        assert all("median" not in entry for entry in table["rows"] if entry["impl"] == str(tmp_path / name))
        assert any("median" in entry for entry in table["rows"]), "torch has its time all the same"


def test_on_a_gpu_work_that_is_left_out_of_the_graph_is_caught(tmp_path, foreign):
    """It notices that it is being captured and then does nothing: the poisoned outputs stay."""
    name = foreign(
        """
        def norm(x, gamma, eps):
            if torch.cuda.is_current_stream_capturing():
                return torch.empty_like(x)
            return right(x, gamma, eps)
        """
    )
    outcome = on_gpu(tmp_path, [str(tmp_path / name), "torch"], [[512, 1000]], perimeters=["forward"])
    by_measure = {table["measure"]: table for table in outcome.summary["cells"][0]["tables"]}
    (skipping,) = [entry for entry in by_measure["gpu"]["rows"] if entry["impl"] == str(tmp_path / name)]
    assert skipping["status"] == "failed"
    assert skipping["detail"].startswith("wrong output in a timed sample")
