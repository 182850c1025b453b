"""What all tests share: the device they run on, and the interpreter where there is no GPU."""

import os

import pytest
import torch

# Triton reads this when a kernel is decorated, so it stands before the first import of rmsnorm_cli.kernels.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, needed in (("gpu", 1), ("gpu2", 2)):
            if item.get_closest_marker(marker) is not None and needed > GPUS:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), this machine has {GPUS}"))


@pytest.fixture(scope="session")
def device() -> str:
    """Return where tensors lie: the first GPU, or the CPU (Triton's interpreter) where there is none."""
    return "cuda:0" if GPUS else "cpu"
