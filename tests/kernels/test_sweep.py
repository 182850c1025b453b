"""The script that times launches around those of the tables."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sweep_launches import numbers, shown, variants, wrong

from rmsnorm_cli.kernels import reference
from rmsnorm_cli.kernels.geometry import Backward, Forward

SCRIPT = Path(__file__).with_name("sweep_launches.py")


def test_variants_are_the_table_and_every_combination_once():
    """The table's own launch comes first, and is not there twice."""
    launch = Backward("walk", 4096, 2048, warps=16, stages=4)
    found = variants(launch, ["warps=8,16", "registers=None,96"])
    assert found[0] == launch
    assert [(each.warps, each.registers) for each in found] == [(16, None), (8, None), (8, 96), (16, 96)]
    assert variants(launch, []) == [launch]
    assert shown((found[-1], None)) == "path=walk A=4096 B=2048 warps=16 stages=4 registers=96"
    assert shown((launch, (256, 32, 8))) == "path=walk A=4096 B=2048 warps=16 stages=4 sum=256x32x8"


def test_shapes_and_tiles_are_read():
    assert numbers("16384x4096+1") == (16384, 4096, 1)
    assert numbers("256x32x8") == (256, 32, 8)


def test_a_field_that_a_launch_has_not_is_refused():
    assert variants(Backward("walk", 4096), ["gone=False,True"])[1].gone is True
    with pytest.raises(KeyError, match="colour"):
        variants(Forward("rows", 128), ["colour=1,2"])


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_wrong_result_is_told(way):
    """What is right up to rounding passes; one wrong row of 64, a NaN, or a wrong column of dgamma does not."""
    torch.manual_seed(1)
    x, dy = torch.randn(2, 64, 300, dtype=torch.float64)
    gamma = torch.randn(300, dtype=torch.float64)
    y, (dx, dgamma) = reference.forward(x, gamma, 1e-6), reference.backward(dy, x, gamma, 1e-6)
    right = (y, None, "path") if way == "forward" else (dx, dgamma, "path")
    assert wrong(way, (right[0].bfloat16(), *right[1:]), (x, dy), gamma) == ""
    for place in range(1 if way == "forward" else 2):
        for value in (100.0, float("nan")):
            bad = [None if part is None else part.clone() for part in right[:2]]
            bad[place][7] *= value
            assert "differs" in wrong(way, (*bad, "path"), (x, dy), gamma)


@pytest.mark.gpu
def test_a_sweep_runs(tmp_path):
    """A few launches of a small shape, beginning off 16 bytes too, are compiled, found right and timed."""
    command = [sys.executable, str(SCRIPT), "backward", "bfloat16", "2048x4096", "2048x4096+1"]
    command += ["--vary", "registers=None,96", "--sums", "64x32x4"]
    done = subprocess.run(
        [*command, "--rounds", "3", "--processes", "2", "--csv", str(tmp_path / "launches.csv")],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "table: path=walk" in done.stdout
    assert len((tmp_path / "launches.csv").read_text(encoding="utf-8").splitlines()) == 1 + 4 + 6
