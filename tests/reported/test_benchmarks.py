"""Reports about benchmarks: clocks that stop early, inputs that stay in the cache. On a GPU; elsewhere by stand-ins."""

import pytest
import torch

from rmsnorm_cli import config, environment
from rmsnorm_cli.commands import bench
from rmsnorm_cli.console import Console
from rmsnorm_cli.rundir.run import open_run

PEAK = 4.8e12  # bytes a second, of an H200's memory; any card slower than that keeps the floors below too


def timed(tmp_path, shape, impl, perimeters, **more):
    """Run bench on one shape, with further keys of its table, and return its cell."""
    device = environment.choose_device("cuda", tmp_path)
    options = {
        "run.impl": impl,
        "run.dir": str(tmp_path),
        "bench.shapes": [shape],
        "bench.dtypes": ["bfloat16"],
        "bench.perimeters": perimeters,
        **{f"bench.{key}": value for key, value in more.items()},
    }
    settings = config.load("bench", options=options)
    with open_run(settings, ["rmsnorm", "bench"], device, environment.snapshot(device)) as run:
        outcome = bench.run(settings, run, Console(quiet=True), device)
        run.finish(outcome)
    (cell,) = outcome.summary["cells"]
    return cell


@pytest.mark.case("B70")
@pytest.mark.gpu
def test_no_time_of_a_large_shape_is_under_the_floor_of_the_memory(tmp_path):
    """1.07 GB forward and 1.6 GB backward take 224 and 336 microseconds at 4.8 TB/s; a clock without sync says less."""
    cell = timed(tmp_path, [32768, 8192], ["fused", "torch"], ["forward", "backward"])
    floors = {"forward": 2 * 32768 * 8192 * 2 / PEAK, "backward": 3 * 32768 * 8192 * 2 / PEAK}
    judged = 0
    for table in cell["tables"]:
        if table["measure"] == "host":
            continue  # the host's own time is not the GPU's
        for row in table["rows"]:
            if row["status"] == "passed":
                judged += 1
                assert row["median"] >= floors[table["perimeter"]], (table["measure"], row["impl"])
    assert judged >= 4


@pytest.mark.case("B71")
@pytest.mark.gpu
def test_a_small_shape_is_timed_cold_by_default_and_told_apart_from_warm(tmp_path):
    """4.2 MB lie in any L2: cold is not under 0.87 microseconds, warm is not slower than cold, both are named."""
    assert config.load("bench").table.caches == ("cold",)
    cell = timed(tmp_path, [1024, 1024], ["fused", "torch"], ["forward"], caches=["cold", "warm"])
    medians = {
        (table["cache"], row["impl"]): row["median"]
        for table in cell["tables"]
        if table["measure"] == "gpu"
        for row in table["rows"]
        if row["status"] == "passed"
    }
    assert {cache for cache, _ in medians} == {"cold", "warm"}
    for impl in ("fused", "torch"):
        assert medians["cold", impl] >= 4.2e6 / PEAK
        assert medians["warm", impl] <= 1.05 * medians["cold", impl]
    assert torch.cuda.get_device_properties(0).L2_cache_size > 4.2e6
