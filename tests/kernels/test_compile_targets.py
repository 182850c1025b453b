"""The fused kernels compiled for GPUs that are not here: registers, spills, vectors and pipelined loads as declared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from rmsnorm_cli.kernels.frontplan import VIEWING
from rmsnorm_cli.kernels.tables import forward_table, stays

SCRIPT = Path(__file__).with_name("compile_targets.py")
ROOT = SCRIPT.parents[2]

VIEWS = triton.__version__.startswith(VIEWING)
REPRESENTATIVE = [
    *("bfloat16:1024x128", "bfloat16:16384x128", "bfloat16:1024x5120", "bfloat16:64x20480", "bfloat16:64x131072"),
    *("float32:128x256", "float32:128x257", "float32:64x40962", "float16:1024x4099"),
]
TABLE = [
    *(
        f"bfloat16:1024x{N}"
        for N in (64, 96, 128, 192, 272, 544, 576, 1024, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384)
    ),
    *(f"bfloat16:64x{N}" for N in (20480, 24576, 28672, 32768, 40960, 65536, 131072, 262144, 1048576)),
    *(f"bfloat16:1024x{N}" for N in (65, 257, 769, 1025, 2050, 2562, 3073, 5122, 4099, 6145, 8191)),
    *(f"bfloat16:1024x{N}" for N in (12289, 16383) if VIEWS),
    *(f"float32:1024x{N}" for N in (67, 257, 1025, 2049, 4099, 8191)),
    *(f"bfloat16:1024x{N}" for N in (1152, 1536, 3584, 7168, 9992, 10240)),
    *(f"float32:1024x{N}" for N in (128, 1024, 1536, 2048, 3072, 4096, 5120, 8192, 12288, 16384, 20484, 24576)),
    *(f"float32:1024x{N}" for N in (32768, 65536)),
    *(f"float16:1024x{N}" for N in (33, 37, 49, 67, 73, 258, 4096)),
    "float64:300x257",
    "float64:1024x2048",
    "float64:64x9000",
]
ALIGNED = ("128", "1024", "2048", "4096", "5120", "6144", "8192", "20480", "32768")
PIPELINED = (
    "walk_kernel", "shared_forward_kernel", "shared_backward_kernel", "ring_forward_kernel", "ring_backward_kernel",
)  # fmt: skip
SUMMING = ("walk_kernel", "reload_kernel", "ring_backward_kernel", "unaligned_backward_kernel")
UNALIGNED = ("unaligned_forward_kernel", "unaligned_backward_kernel") if VIEWS else ()
SPILLS = {
    "bfloat16:64x40960": 28,  # one masked tile of 65536 columns: launches that spill less were slower
    "bfloat16:64x1048576": 18,  # on Blackwell: 512 programs share a row, and each thread reads eight of their words
    "float32:1024x8192": 32,  # on Blackwell: the limit on registers is what was fastest on Hopper, which spills 2 to 4
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


def compiled(target: str, calls: list[str], cache: Path) -> list[dict]:
    """Compile in a process without the interpreter and return one record per launch."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, str(SCRIPT), target, *calls]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge(records: list[dict], target: str) -> None:
    """Assert what the launch tables declare of every kernel that NVIDIA's tools can be asked about."""
    for record in records:
        name = f"{target} {record['call']} {record['kernel']}"
        columns = record["call"].split("x")[-1]
        narrow = "float64" not in record["call"]
        assert record["shared"] <= SHARED_LIMIT[target], name
        assert record["registers"] * record["warps"] * 32 <= 65536, f"{name}: one program must fit on an SM"
        assert record["spills"] <= SPILLS.get(record["call"], 16), f"{name}: {record['spills']} spilled accesses"
        if columns in ALIGNED and narrow:
            assert record["vectors"] > 0, f"{name}: no 16-byte access although every row is aligned"
        if record["kernel"] in SUMMING:
            assert record["kept"] > 0, f"{name}: its partial sums may leave the cache before they are added"
        if record["kernel"] == "rows_kernel":
            dtype, shape = record["call"].split(":")
            M, N, size = (*map(int, shape.split("x")), getattr(torch, dtype).itemsize)
            config, vector = forward_table(N, size), 16 // size
            told = config.path == "reload" or stays(M, N, size)
            assert (record["staying"] > 0) == told, f"{name}: {record['staying']} loads of what is to stay"
            if told and config.path == "rows" and config.rows == 1 and N == config.A + config.B and N % vector == 0:
                loads = sum(-(-tile // (32 * config.warps * vector)) for tile in (config.A, config.B))
                assert record["staying"] == loads, f"{name}: {record['staying']} loads stay, of {loads}"
        if record["kernel"] in UNALIGNED or (record["kernel"] in PIPELINED and columns in ALIGNED and narrow):
            assert record["async16"] > 0, f"{name}: its loads are not pipelined"


def test_representative_launches_on_hopper(tmp_path):
    """Tiles, walks, rings, shared rows and few rows compile for sm_90 without spills, vectorised and pipelined."""
    records = compiled("sm_90", REPRESENTATIVE, tmp_path)
    kernels = {record["kernel"] for record in records}
    small = {"small_kernel", "unaligned_small_kernel"} if VIEWS else {"small_kernel"}
    assert kernels == {"rows_kernel", "column_sum_kernel", *small, *PIPELINED, *UNALIGNED}
    judge(records, "sm_90")


@pytest.mark.skipif(not os.environ.get("RMSNORM_COMPILE_ALL"), reason="minutes long: set RMSNORM_COMPILE_ALL=1")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_whole_table_compiles_for_nvidia(target, tmp_path):
    """Every launch of the tables compiles for Ampere, Hopper and Blackwell, within registers and shared memory."""
    judge(compiled(target, TABLE, tmp_path), target)


@pytest.mark.skipif(not os.environ.get("RMSNORM_COMPILE_ALL"), reason="minutes long: set RMSNORM_COMPILE_ALL=1")
def test_what_amd_would_launch_compiles(tmp_path):
    """Every kernel that does not wait for another program compiles for gfx942."""
    calls = [call for call in TABLE if int(call.split("x")[-1]) <= 16384]
    assert all(record["bytes"] > 0 for record in compiled("gfx942", calls, tmp_path))
