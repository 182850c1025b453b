"""Plans launched as told: Gluon kernels on the CPU (`gluon_on_cpu.py`), launches that a card or a Triton refuses."""

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


def planned(x, gamma, dy, forward, backward, need_dx=True, need_dgamma=True):
    """Return the plans of a forward and a backward that are to be launched as told."""
    front, back = ForwardPlan(x, gamma), BackwardPlan(dy, x, gamma, walking_order(x), need_dx, need_dgamma)
    front._choose(forward, x)
    back._choose(backward)
    return front, back


def through_plans(x, gamma, dy, forward, backward, **needs):
    """Return y, dx and dgamma of a forward and a backward launched as told."""
    front, back = planned(x, gamma, dy, forward, backward, **needs)
    y, rstd, _ = front.run(x, gamma, 1e-6)
    dx, dgamma, _ = back.run(dy, x, gamma, rstd)
    return y, dx, dgamma


def where_launches_fail(problem, monkeypatch, x, gamma, dy, forward, backward):
    """Return the paths that serve where both launches raise the problem, and what they give: y, dx, dgamma."""

    def refuse(*_):
        raise problem

    front, back = planned(x, gamma, dy, forward, backward)
    monkeypatch.setattr(front.program, "launch", refuse)
    monkeypatch.setattr(back.main, "launch", refuse)
    y, rstd, forward_path = front.run(x, gamma, 1e-6)
    dx, dgamma, backward_path = back.run(dy, x, gamma, rstd)
    return (forward_path, backward_path), (y, dx, dgamma)
