"""Mistakes that the interpreter cannot show are at least kernels: Triton compiles them for a GPU that is not here."""

import os
import subprocess
import sys
from pathlib import Path

from rmsnorm_cli.faults import CATALOGUE

SCRIPT = Path(__file__).with_name("compile_mistakes.py")
ROOT = SCRIPT.parents[2]


def test_changed_kernels_that_only_a_gpu_can_run_compile_for_hopper(tmp_path: Path):
    """A mistake that did not compile would be caught by every gate, for nothing."""
    names = [fault.name for fault in CATALOGUE if fault.cuda_only and fault.file in ("split.py", "tiles.py")]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), str(tmp_path), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = dict(line.split()[:2] for line in done.stdout.splitlines())
    assert list(compiled) == names
    assert len(names) >= 6
    assert set(compiled.values()) == {"shared_forward_kernel", "shared_backward_kernel", "rows_kernel"}
