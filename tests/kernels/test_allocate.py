"""Allocation past PyTorch's argument parsing: the same tensors, and seen by whoever watches allocations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm_cli.kernels.allocate import allocator


class Watch(TorchDispatchMode):
    """Count the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shape", "stride"), [((3, 5), (5, 1)), ((2, 3, 4), (4, 8, 1)), ((0, 7), (7, 1)), ((6,), (1,))]
)
def test_shape_strides_dtype_and_device_are_as_asked(shape, stride, dtype, device):
    """Whatever way the memory comes, the tensor is the one that torch.empty_strided gives."""
    tensor = allocator(torch.device(device))()(shape, stride, dtype)
    assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (shape, stride, dtype)
    assert tensor.device.type == torch.device(device).type
    assert not tensor.requires_grad


def test_a_dispatch_mode_sees_the_allocation(device):
    """The memory gate fences what it sees allocated: no output may come past it."""
    allocation = allocator(torch.device(device))
    with Watch() as watch:
        allocation()((4,), (1,), torch.float32)
    assert watch.seen == [torch.ops.aten.empty_strided.default]
