"""A kernel with its constants and options, compiled at its first launch and then launched without Triton's binding.

Triton's own launch binds, inspects and hashes every argument each time: 23 µs of host time on the machine of
docs/results, against 9 µs for handing the compiled kernel its arguments. That is safe here because nothing of a call
but dtypes and the 16-byte alignment of gamma decides which code runs (`do_not_specialize`), and the caller keys its
programs by both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from rmsnorm_cli.kernels.contract import INTERPRETED
from rmsnorm_cli.kernels.launch import launching

DIRECT = "3.6."
"""The Triton whose C launcher takes its arguments in the order in which `_prepare` gives them."""

SM_REGISTERS = 65536
"""Registers of one SM of every NVIDIA card since 2012."""

REGISTER_UNIT = 8
"""Registers of a thread are handed out in multiples of this."""

MOST_WAVES = 16
"""An AMD program's limit: 1024 lanes, 64 to a wave."""


class Program:
    """One kernel to launch on one device.

    `constants` are its constexprs, in the order of its signature, which they end. `cooperative`: all programs are
    resident at once, or the launch raises. `dependent`: it may be scheduled while the kernel before it in the stream
    still runs; the kernel itself waits where it must. `registers`: the most a thread may use, on NVIDIA's cards.
    `per_sm`: so many programs must have room on one SM.
    """

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        warps: int,
        *,
        cooperative: bool = False,
        dependent: bool = False,
        registers: int | None = None,
        per_sm: int = 1,
    ) -> None:
        self.kernel = kernel
        self.constants = constants
        self.values = tuple(constants.values())
        if torch.version.hip is not None:
            warps = min(warps, MOST_WAVES)
        self.options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
        if cooperative:
            self.options["launch_cooperative_grid"] = True
        if dependent:
            self.options["launch_pdl"] = True
        if registers is not None and torch.version.hip is None:
            self.options["maxnreg"] = registers
        self.most_registers = SM_REGISTERS // (32 * warps * per_sm) // REGISTER_UNIT * REGISTER_UNIT
        self._call: Callable[..., None] | None = None
        self._middle: tuple[Any, ...] = ()

    def compile(self, tensors: Sequence[Tensor], scalars: Sequence[float]) -> Any:
        """Compile for the current device and the dtypes of these arguments; a second time costs a look-up.

        What takes more registers than there is room for is compiled again with as many as there are: asked for at once,
        the limit changes what the compiler makes of a kernel that would have kept to it (131072: 83 to 86 %, not 87).
        """
        compiled = self.kernel.warmup(*tensors, *scalars, grid=(1,), **self.constants, **self.options)
        if "maxnreg" not in self.options and torch.version.hip is None:
            _ = compiled.run  # loads it, and only then are its registers known
            if compiled.n_regs > self.most_registers:
                self.options["maxnreg"] = self.most_registers
                return self.compile(tensors, scalars)
        return compiled

    def launch(self, grid: tuple[int, int], tensors: Sequence[Tensor], scalars: Sequence[float]) -> None:
        """Launch on the current device and stream; tensors come first in the kernel's signature, then the scalars."""
        if INTERPRETED:
            self.kernel[grid](*tensors, *scalars, **self.constants)
            return
        call = self._call or self._prepare(self.compile(tensors, scalars))
        stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
        # Addresses as numbers: for a tensor the launcher would ask the driver where each one lies.
        call(*grid, 1, stream, *self._middle, *map(Tensor.data_ptr, tensors), *scalars, *self.values)

    def _prepare(self, compiled: Any) -> Callable[..., None]:
        """Keep what a launch needs beside its grid, stream and arguments; no hooks, no scratch of Triton's own."""
        launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        scratch = [getattr(launcher, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]
        if triton.__version__.startswith(DIRECT) and torch.version.hip is None and scratch == [0, 0]:
            # The C function behind the launcher, without the Python that asks for scratch: 3 µs less.
            call, together = launcher.launch, (launcher.launch_cooperative_grid, launcher.launch_pdl)
            self._middle = (function, *together, None, None, metadata, None, None, None)
        else:
            call, self._middle = launcher, (function, metadata, None, None, None)
        self._call = call  # last: another thread launches as soon as it is there
        return self._call


@functools.cache
def _cards() -> int:
    return torch.cuda.device_count()


def on_device(x: Tensor) -> Any:
    """Return a context in which launches go to the device of x, or None where they go there already."""
    if not INTERPRETED and (_cards() == 1 or torch._C._cuda_getDevice() == x.get_device()):
        return None
    return launching(x)
