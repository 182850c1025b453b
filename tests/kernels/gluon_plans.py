"""Plans whose Gluon kernels run on the CPU (`gluon_on_cpu.py`), in the place of a card."""

import torch

from rmsnorm_cli.kernels import backplan, frontplan
from rmsnorm_cli.kernels.backplan import BackwardPlan
from rmsnorm_cli.kernels.frontplan import ForwardPlan
from rmsnorm_cli.kernels.program import Program
from rmsnorm_cli.kernels.rowlayout import walking_order

SMS = 3


def in_place_of_a_card(monkeypatch, run):
    """Let a launch of a Gluon kernel be one of `run`, of a card with few SMs, and torch add up the partial sums."""

    def launch(self, grid, tensors, scalars):
        if getattr(self.kernel, "is_gluon", bool)():
            assert self.options.get("launch_cooperative_grid", False) == self.constants.get("SHARED", False)
            run(self.kernel, grid, tensors, scalars, self.constants)
        else:
            partial, dgamma = tensors
            parts, columns, pitch = scalars
            rows = partial.view(parts, pitch)
            assert not rows[:, columns:].any(), "rows are not padded with zeros"
            dgamma.copy_(rows[:, :columns].sum(0))

    monkeypatch.setattr(Program, "launch", launch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(frontplan, "shared_memory", lambda _: 0)  # the plan's own choice is replaced all the same
    for module in (frontplan, backplan):
        monkeypatch.setattr(module, "multiprocessors", lambda _: SMS)
        monkeypatch.setattr(module, "INTERPRETED", False)


def through_plans(x, gamma, dy, forward, backward, **needs):
    """Return y, dx and dgamma of a forward and a backward launched as told."""
    front = ForwardPlan(x, gamma)
    front._choose(forward, x)
    y, rstd, _ = front.run(x, gamma, 1e-6)
    back = BackwardPlan(dy, x, gamma, walking_order(x), needs.get("need_dx", True), needs.get("need_dgamma", True))
    back._choose(backward)
    dx, dgamma, _ = back.run(dy, x, gamma, rstd)
    return y, dx, dgamma
