"""`rmsnorm bench`: what it verifies before a number stands, whom it refuses, what it compares; on simulated clocks."""

import contextlib
import dataclasses
import json
import signal

import numpy as np
import pytest
import torch

from rmsnorm_cli import config, environment
from rmsnorm_cli.cli import main
from rmsnorm_cli.commands import bench
from rmsnorm_cli.console import Console
from rmsnorm_cli.errors import ConfigError, EnvironmentProblem, Interrupted
from rmsnorm_cli.rundir.run import open_run
from rmsnorm_cli.timing import WallClock

SMALL = {"bench.shapes": [[6, 33]], "bench.dtypes": ["float32"], "bench.perimeters": ["forward"]}
QUICK = {"bench.samples": 40, "bench.calls": 2, "bench.warmup": 2, "bench.bootstrap": 300, "bench.wall": True}
CPU = environment.Device("interpreter", "interpreter", "cpu", "CPU, Triton interpreter")


class Costs:
    """A simulated clock: a forward or backward costs what `seconds` says, with a tenth of a percent of noise."""

    def __init__(self, seconds):
        self.seconds, self.now, self.rng = seconds, 0.0, np.random.default_rng(0)

    def priced(self, impl):
        """Return the implementation with its price on both passes."""

        def pay(gradient=None):
            self.now += self.seconds.get(impl.name, 1e-5) * float(np.exp(self.rng.normal(0, 1e-3)))

        def call(x, gamma, eps):
            pay()
            y = impl.call(x, gamma, eps)
            if isinstance(y, torch.Tensor) and y.requires_grad:
                y.register_hook(pay)
            return y

        return dataclasses.replace(impl, call=call)


@pytest.fixture
def benched(tmp_path, monkeypatch):
    """Return a function that runs the command on this CPU with simulated costs, and the folder it runs in."""
    import rmsnorm_cli.kernels

    monkeypatch.chdir(tmp_path)
    find = rmsnorm_cli.kernels.implementation

    def call(impl, costs=None, isolated=False, **options):
        simulated = Costs(costs or {})
        clock = WallClock(now=lambda: simulated.now)
        monkeypatch.setattr(bench, "_clock", lambda device: (clock, contextlib.nullcontext))
        monkeypatch.setattr(rmsnorm_cli.kernels, "implementation", lambda *named: simulated.priced(find(*named)))
        if not isolated:  # a fresh process takes seconds; who needs none is let in at once
            monkeypatch.setattr(bench, "_preflight", lambda *given: {})
        given = SMALL | QUICK | {"run.impl": impl} | {f"bench.{key}": value for key, value in options.items()}
        settings = config.load("bench", file=None, environ={}, sets=[], options=given)
        with open_run(settings, ["rmsnorm", "bench"], CPU, environment.snapshot(CPU)) as run:
            outcome = bench.run(settings, run, Console(quiet=True), CPU)
            run.finish(outcome)
        return outcome, run.dir

    return call


def row(outcome, impl, table=0):
    rows = outcome.summary["cells"][0]["tables"][table]["rows"]
    return next(row for row in rows if row["impl"] == impl)


def test_a_verified_implementation_gets_a_time_an_interval_and_a_verdict(benched):
    outcome, _ = benched(["torch", "reference"], {"torch": 1e-5, "reference": 3e-5})
    found = row(outcome, "reference")
    assert found["median"] == pytest.approx(3e-5, rel=1e-2)
    assert found["against"]["torch"]["word"] == "slower"
    assert found["against"]["torch"]["estimate"] == pytest.approx(3, rel=1e-2)
    assert found["against"]["torch"]["text"].startswith("slower 3.00")
    assert outcome.status == "passed"
    assert outcome.counts["passed"] == 2
    json.dumps(outcome.summary, allow_nan=False)


def test_every_table_names_card_versions_shape_dtype_perimeter_and_clock(benched):
    outcome, _ = benched(["torch", "reference"])
    (table,) = [table for table in outcome.tables if table.title.startswith("forward")]
    assert table.title == "forward, 6x33 float32, on CPU"
    assert "wall clock, CPU (p10–p90)" in table.columns
    assert f"torch {torch.__version__.partition('+')[0]}" in table.caption
    assert "wall clock, CPU" in table.caption
    assert any("no evidence about any GPU" in note for note in outcome.notes)


def test_all_four_perimeters_are_measured_by_themselves(benched):
    perimeters = ["forward", "forward_train", "backward", "forward_backward"]
    outcome, _ = benched(["torch", "reference"], perimeters=perimeters)
    tables = outcome.summary["cells"][0]["tables"]
    assert [table["perimeter"] for table in tables] == perimeters
    assert {row["status"] for table in tables for row in table["rows"]} == {"passed"} or outcome.counts["failed"] == 0
    kept = outcome.summary["cells"][0]["memory"]["reference"]["forward_train"]
    assert kept["saved_bytes"] >= 6 * 33 * 4, "x at least is kept for the backward"
    assert kept["peak_bytes"] is None, "a CPU's peak is not measured"


def test_the_raw_samples_in_the_metrics_give_the_medians_of_the_summary(benched):
    outcome, where = benched(["torch", "reference"], {"torch": 1e-5})
    records = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    samples = {r["impl"]: r["seconds"] for r in records if r["kind"] == "samples"}
    assert set(samples) == {"torch", "torch (A/A)", "reference"}
    assert np.median(samples["reference"]) == row(outcome, "reference")["median"]
    assert {r["impl"] for r in records if r["kind"] == "verification"} == {"torch", "reference"}


def test_without_a_gpu_and_without_wall_nothing_is_timed(benched):
    with pytest.raises(EnvironmentProblem, match="--wall") as problem:
        benched(["rowwise", "torch"], wall=False)
    assert problem.value.exit_code == 4


def test_a_triton_kernel_beside_wall_clocks_is_a_refused_row(benched):
    outcome, _ = benched(["rowwise", "torch"])
    refused = row(outcome, "rowwise")
    assert refused["status"] == "refused"
    assert "interpreter says nothing" in refused["detail"]
    assert "median" not in refused
    assert outcome.counts["refused"] == 1
    assert outcome.exit_code == 0


def test_a_wrong_implementation_is_a_row_that_says_what_is_wrong_and_no_number(benched, foreign):
    name = foreign("def norm(x, gamma, eps):\n    return right(x, gamma, eps) * 1.01\n")
    outcome, _ = benched([name, "torch"])
    failed = row(outcome, name)
    assert failed["status"] == "failed"
    assert failed["detail"].startswith("y: first wrong element")
    assert "median" not in failed
    assert row(outcome, "torch")["status"] == "passed"
    assert outcome.exit_code == 1


def test_a_wrong_gradient_spoils_the_perimeters_that_owe_it_alone(benched, foreign):
    name = foreign(
        """
        class Norm(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, gamma, eps):
                ctx.save_for_backward(x, gamma)
                ctx.eps = eps
                return right(x, gamma, eps)
            @staticmethod
            def backward(ctx, dy):
                x, gamma = ctx.saved_tensors
                with torch.enable_grad():
                    x, gamma = x.detach().requires_grad_(), gamma.detach().requires_grad_()
                    dx, dgamma = torch.autograd.grad(right(x, gamma, ctx.eps), (x, gamma), dy)
                return dx, dgamma / 6, None
        norm = Norm.apply
        """
    )
    outcome, _ = benched([name, "torch"], perimeters=["forward_train", "backward", "forward_backward"])
    assert row(outcome, name, 0)["status"] == "passed"
    for table in (1, 2):
        assert row(outcome, name, table)["status"] == "failed"
        assert row(outcome, name, table)["detail"].startswith("dgamma: first wrong element")


def test_work_that_stops_after_the_verification_is_caught_in_a_timed_sample(benched, foreign):
    """From its 30th call on it returns what it wrote before, which is right: only poison tells that it did nothing."""
    name = foreign(
        """
        calls, y = 0, None
        def norm(x, gamma, eps):
            global calls, y
            if torch.is_grad_enabled():
                return right(x, gamma, eps)
            calls += 1
            if y is None or calls < 30:
                answer = right(x, gamma, eps)
                y = answer if y is None else y.copy_(answer)
            return y
        """
    )
    outcome, _ = benched([name, "torch"])
    failed = row(outcome, name)
    assert failed["status"] == "failed"
    assert failed["detail"].startswith("wrong output in a timed sample: y: ")


def test_answers_remembered_by_address_are_wrong_on_the_timed_values(benched, foreign):
    name = foreign(
        """
        answers = {}
        def norm(x, gamma, eps):
            if x.data_ptr() not in answers:
                answers[x.data_ptr()] = right(x, gamma, eps).detach().clone()
            return answers[x.data_ptr()]
        """
    )
    outcome, _ = benched([name, "torch"])
    assert row(outcome, name)["status"] in ("failed", "refused")
    assert "median" not in row(outcome, name)


def test_an_implementation_that_writes_to_x_fails(benched, foreign):
    name = foreign(
        """
        def norm(x, gamma, eps):
            y = right(x, gamma, eps)
            x.data[0, 0] += 1  # as a kernel writes, unseen by autograd
            return y
        """
    )
    outcome, _ = benched([name, "torch"])
    assert row(outcome, name)["status"] == "failed"
    assert row(outcome, name)["detail"] == "it wrote to x"
    assert row(outcome, "torch")["status"] == "passed", "it got x back as it was"


def test_a_backward_that_consumes_dy_gets_its_own_and_is_timed_with_the_rest(benched, foreign):
    name = foreign(
        """
        class Norm(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, gamma, eps):
                ctx.save_for_backward(x, gamma)
                ctx.eps = eps
                return right(x, gamma, eps)
            @staticmethod
            def backward(ctx, dy):
                x, gamma = ctx.saved_tensors
                with torch.enable_grad():
                    x, gamma = x.detach().requires_grad_(), gamma.detach().requires_grad_()
                    dx, dgamma = torch.autograd.grad(right(x, gamma, ctx.eps), (x, gamma), dy)
                return dy.copy_(dx), dgamma, None
        norm = Norm.apply
        """
    )
    outcome, _ = benched([name, "torch"], perimeters=["backward", "forward_backward"])
    assert outcome.summary["cells"][0]["consumes_dy"] == [name]
    for table in (0, 1):
        assert row(outcome, name, table)["status"] == "passed"
        assert row(outcome, "torch", table)["status"] == "passed", "its dy is still whole"


def test_a_refusal_of_the_input_is_refused_and_the_others_are_timed(benched, foreign):
    name = foreign("def norm(x, gamma, eps):\n    raise ValueError('rows of 33 are not for me')\n")
    outcome, _ = benched([name, "torch"], isolated=True)
    assert row(outcome, name)["status"] == "refused"
    assert "rows of 33 are not for me" in row(outcome, name)["detail"]
    assert outcome.exit_code == 0


def test_a_crash_is_a_row_and_not_the_end(benched, foreign):
    name = foreign("import os\ndef norm(x, gamma, eps):\n    os._exit(7)\n")
    outcome, _ = benched([name, "torch"], isolated=True)
    assert row(outcome, name)["status"] == "error"
    assert "exited with code 7" in row(outcome, name)["detail"]
    assert row(outcome, "torch")["status"] == "passed"
    assert outcome.exit_code == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_first_calls_ends_the_run_and_is_no_row(benched, foreign, number):
    """As a compiler may, the implementation catches every Exception and would go on."""
    name = foreign(
        f"""
        import signal
        def norm(x, gamma, eps):
            try:
                signal.raise_signal({int(number)})
            except Exception:
                pass
            return right(x, gamma, eps)
        """
    )
    with pytest.raises(KeyboardInterrupt):
        benched([name, "torch"])


def test_an_interrupt_keeps_the_cells_that_were_finished(benched, tmp_path, monkeypatch):
    """Of three cells the second is interrupted: run.json and report have the first."""
    measured, calls = bench._measured, iter([False, True])

    def interrupted(*given):
        if next(calls):
            raise Interrupted(signal.SIGINT)
        return measured(*given)

    monkeypatch.setattr(bench, "_measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        benched(["torch", "reference"], shapes=[[3, 4], [4, 5], [5, 6]])
    (directory,) = tmp_path.glob("runs/2*-bench")
    facts = json.loads((directory / "run.json").read_text())
    assert facts["status"] == "interrupted"
    assert [cell["cell"] for cell in facts["summary"]["cells"]] == ["3x4 float32"]
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(directory)])
    assert "3x4" in (directory / "report.html").read_text()


def test_a_hang_is_a_row_and_not_the_end(foreign, tmp_path, monkeypatch):
    from rmsnorm_cli.bench.preflight import preflight
    from rmsnorm_cli.bench.workload import Cell

    monkeypatch.chdir(tmp_path)
    name = foreign("import time\ndef norm(x, gamma, eps):\n    time.sleep(600)\n")
    found = preflight(name, [Cell(2, 3, "float32")], "cpu", 1e-6, "fp32", 0, seconds=1.0)
    assert found["2x3 float32"]["status"] == "error"
    assert "within 1 s" in found["2x3 float32"]["detail"]


@pytest.mark.parametrize(
    "full",
    [
        torch.OutOfMemoryError("CUDA out of memory: tried to allocate 2 TiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 TiB. Error code 12"),
        MemoryError("tried to allocate 2 TiB"),
    ],
    ids=lambda full: type(full).__name__,
)
def test_a_cell_that_does_not_fit_the_memory_is_an_error_row_and_the_next_one_is_timed(benched, monkeypatch, full):
    from rmsnorm_cli.bench import measure

    whole = measure.measure_cell

    def short(cell, *rest):
        if cell.N == 33:
            raise full
        return whole(cell, *rest)

    monkeypatch.setattr(measure, "measure_cell", short)
    outcome, _ = benched(["torch", "reference"], shapes=[[6, 33], [6, 32]])
    assert row(outcome, "torch")["status"] == "error"
    assert row(outcome, "torch")["detail"].startswith("out of memory: ")
    assert "tried to allocate 2 TiB" in row(outcome, "torch")["detail"]
    assert outcome.summary["cells"][1]["tables"][0]["rows"][0]["status"] == "passed"
    assert outcome.exit_code == 1


def test_after_a_cell_that_lost_the_gpu_every_row_says_so_and_nothing_is_lost(benched, monkeypatch):
    from rmsnorm_cli.bench import measure
    from rmsnorm_cli.bench.admission import DeviceLost

    whole = measure.measure_cell
    asked = []

    def losing(cell, *rest):
        asked.append(cell.N)
        if cell.N == 32:
            raise DeviceLost("the GPU's context was lost when liger ran (CUDA error: an illegal memory access)")
        return whole(cell, *rest)

    monkeypatch.setattr(measure, "measure_cell", losing)
    outcome, _ = benched(["torch", "reference"], shapes=["6x33", "6x32", "6x31"])
    assert asked == [33, 32], "the third is not tried"
    assert row(outcome, "torch")["status"] == "passed"
    for cell in outcome.summary["cells"][1:]:
        for found in cell["tables"][0]["rows"]:
            assert found["status"] == "error"
            assert "lost when liger ran (CUDA error" in found["detail"]
    assert outcome.exit_code == 1


def test_what_is_no_matter_of_memory_is_not_told_as_one(benched, monkeypatch):
    from rmsnorm_cli.bench import measure

    def broken(*given):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(measure, "measure_cell", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        benched(["torch"])


def test_all_packages_that_are_missing_are_told_at_once(benched, monkeypatch):
    from rmsnorm_cli.kernels import peers

    def absent(name):
        raise peers.MissingPackage(f"{name} needs {name}-kernel, which is not installed: pip install {name}-kernel")

    import rmsnorm_cli.kernels.api

    monkeypatch.setattr(rmsnorm_cli.kernels.api, "package_norm", absent)
    with pytest.raises(EnvironmentProblem, match=r"liger needs .*: pip install liger-kernel; fla needs") as problem:
        benched(["torch", "liger", "fla"])
    assert problem.value.exit_code == 4


def test_the_configuration_of_the_speed_table_holds_its_cells():
    """23 cells, each shape in one dtype, GPU time of forward and backward; the plan names an upper bound of time."""
    from pathlib import Path

    file = Path(__file__).parents[2] / "configs" / "speed.toml"
    settings = config.load("bench", file=file, environ={}, sets=[], options={})
    lines = bench.plan(settings)
    assert lines[0] == "would time fused, torch, compile, liger, fla, quack on device auto"
    assert lines[1].startswith("23 cells (1048576x128 bfloat16, ")
    for cell in ("512x262144 bfloat16", "128x257 float32", "65536x257 float16", "4096x8191 float16"):
        assert cell in lines[1]
    assert "16384x4096 bfloat16" in lines[1]
    assert "16384x4096 float32" in lines[1]
    assert "16384x4096+1 bfloat16, 16384x4096+1 float32" in lines[1]
    assert settings.bench.measures == ("gpu",)
    assert settings.bench.perimeters == ("forward", "backward")
    assert "46 measurements of 2 s and 1 s of warm-up at most, 2.3 minutes in all" in lines[3]


def test_fail_if_slower_than_fails_the_run_and_says_where(benched, foreign):
    name = foreign("norm = right\n")
    slow = {name: 2e-5, "torch": 1e-5}
    outcome, _ = benched([name, "torch"], slow, fail_if_slower_than="torch")
    assert outcome.exit_code == 1
    (text,) = outcome.summary["slower"]
    assert text.startswith(f"{name} is slower than torch at 6x33 float32, forward, wall loop: slower ")
    fast = {name: 1e-5, "torch": 2e-5}
    assert benched([name, "torch"], fast, fail_if_slower_than="torch")[0].exit_code == 0
    assert benched([name, "torch"], slow)[0].exit_code == 0, "slower is no failure unless asked"


def test_compare_tells_how_this_run_stands_against_an_earlier_one(benched, foreign):
    _, before = benched(["torch", "reference"], {"reference": 4e-5})
    new = foreign("norm = right\n")
    outcome, _ = benched(["torch", "reference", new], {"reference": 1e-5}, compare=str(before))
    found = {row["impl"]: row for row in outcome.summary["compared"]["rows"]}
    assert found["reference"]["word"] == "faster"
    assert found["reference"]["estimate"] == pytest.approx(0.25, rel=0.01)
    assert found["torch"]["text"] == "equal within 1 %"
    assert found[new]["text"] == "not timed in the earlier run"
    (table,) = [table for table in outcome.tables if table.title.startswith("now against")]
    assert before.name in table.title
    assert "not interleaved" in table.caption


def test_compare_is_no_finer_than_the_controls_of_both_runs(benched):
    """Now is 2 % faster than then; told where both controls are narrow, not where one resolved 3 % only."""
    _, before = benched(["torch", "reference"], {"reference": 1.02e-5})
    outcome, _ = benched(["torch", "reference"], {"reference": 1e-5}, compare=str(before))
    assert {row["impl"]: row["word"] for row in outcome.summary["compared"]["rows"]}["reference"] == "faster"

    facts = json.loads((before / "run.json").read_text())
    control = facts["summary"]["cells"][0]["tables"][0]["control"]
    for change, told in (
        ({"held": False, "resolution": 0.03}, "; A/A resolves 3 %)"),
        (
            {"held": False, "biased": True, "text": "A/A control biased: 1.03"},
            "inconclusive (A/A control biased: 1.03)",
        ),
    ):
        control.update(change)
        (before / "run.json").write_text(json.dumps(facts))
        outcome, _ = benched(["torch", "reference"], {"reference": 1e-5}, compare=str(before))
        for found in outcome.summary["compared"]["rows"]:
            assert found["word"] == "inconclusive"
            assert told in found["text"]


def test_audit_finds_a_bench_run_as_it_was_left(benched):
    from rmsnorm_cli.commands.audit import audit

    _, where = benched(["torch", "reference"])
    outcome = audit(run=str(where), runs_dir=where.parent, console=Console(quiet=True))
    assert outcome.status == "passed", [r.detail for r in outcome.results if r.status != "passed"]


def test_compare_refuses_another_card_unless_told_and_then_says_so(benched):
    _, before = benched(["torch", "reference"])
    facts = json.loads((before / "run.json").read_text())
    facts["summary"]["card"], facts["summary"]["driver"] = "NVIDIA H100", "570.1"
    (before / "run.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=r"card: NVIDIA H100 then, CPU now.*--across"):
        benched(["torch"], compare=str(before))
    outcome, _ = benched(["torch"], compare=str(before), across=True)
    assert "card: NVIDIA H100 then, CPU now" in outcome.summary["compared"]["unlike"]
    assert any("NVIDIA H100" in table.caption for table in outcome.tables)


@pytest.mark.parametrize("change", [{"shapes": [[6, 34]]}, {"perimeters": ["backward"]}, {"dtypes": ["float16"]}])
def test_compare_with_a_run_that_has_nothing_in_common_is_refused_before_any_work(benched, change, monkeypatch):
    _, before = benched(["torch"])
    monkeypatch.setattr(bench, "_measured", lambda *given: pytest.fail("something was timed"))
    with pytest.raises(ConfigError, match="has no time in common with this run; it timed torch at 6x33 float32"):
        benched(["torch"], compare=str(before), **change)


def test_compare_with_what_is_no_bench_is_refused(benched, tmp_path):
    with pytest.raises(ConfigError, match="is no run directory"):
        benched(["torch"], compare=str(tmp_path / "nowhere"))
    _, before = benched(["torch"])
    facts = json.loads((before / "run.json").read_text())
    (before / "run.json").write_text(json.dumps(facts | {"command": "verify"}))
    with pytest.raises(ConfigError, match="is a run of verify"):
        benched(["torch"], compare=str(before))


def test_the_dry_run_says_what_would_be_timed_and_for_how_long_at_most():
    """3 cells x 2 perimeters x (whole, GPU, host), each 2 s and 1 s of warm-up: 54 s."""
    given = {"bench.shapes": ["6x33", "8x64:bfloat16", "9x9"], "bench.dtypes": ["float32"]}
    given |= {"bench.perimeters": ["forward", "backward"], "bench.seconds": 2, "run.impl": ["torch", "compile"]}
    text = "\n".join(bench.plan(config.load("bench", file=None, environ={}, sets=[], options=given)))
    assert "3 cells (6x33 float32, 8x64 bfloat16, 9x9 float32), each as forward, backward" in text
    assert "50 samples or more of 20 calls after 20 warm-up calls" in text
    assert "18 measurements of 2 s and 1 s of warm-up at most, 0.9 minutes in all" in text
    assert "the first calls of 6 pairs of implementation and cell, which compile, 120 s each at most" in text


def test_a_shape_with_a_dtype_is_timed_in_that_one_alone_and_no_cell_twice(benched):
    outcome, _ = benched(["torch"], shapes=["4x5:float16", "4x6", "4x5", "4x6:float32"], dtypes=["float32"])
    cells = [cell["cell"] for cell in outcome.summary["cells"]]
    assert cells == ["4x5 float16", "4x6 float32", "4x5 float32"]


def test_gpu_time_alone_cannot_be_asked_of_a_machine_without_a_gpu(benched):
    with pytest.raises(ConfigError, match=r"bench\.measures: got gpu, host; without a GPU whole calls alone"):
        benched(["torch"], measures=["gpu", "host"])
