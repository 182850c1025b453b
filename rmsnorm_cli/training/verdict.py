"""From the states of finished phases to verdicts: did the norm run, does it agree, does learning, does a checkpoint."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rmsnorm_cli import checkpoint
from rmsnorm_cli.network import Network
from rmsnorm_cli.results import CaseResult, Execution, Scope, Status
from rmsnorm_cli.training import compare, curves
from rmsnorm_cli.training.counting import LAYER
from rmsnorm_cli.training.loop import COLUMNS, Ground
from rmsnorm_cli.training.plan import REFERENCE, Phase
from rmsnorm_cli.training.protocol import Protocol

SCOPES: dict[str, Scope] = {  # what stands before the norm learns through dx, what stands behind it through y
    "output": "forward",
    "first.weight": "dx",
    "first.bias": "dx",
    "norm.weight": "dgamma",
    "last.weight": "forward",
    "last.bias": "forward",
}
HINTS = {
    "forward": "the forward: its denominator, its mask or its row address",
    "dx": "the input gradient: the rstd³ term, mean(u·x) or the saved rstd",
    "dgamma": "the weight gradient: its partial sums, the sum over rows, sum against mean",
}
NARROW = 5  # below this width dx is a difference of near-equal numbers, and right norms differ by what is left of it
EXCHANGED = 1e-5  # relative, of the predictions of one set of weights through both norms; right ones reach 3e-7


class Verdicts:
    """The gates of one finished run."""

    def __init__(self, protocol: Protocol, execution: Execution) -> None:
        self.protocol, self.ground, self.execution = protocol, protocol.ground, execution
        self.states, self.steps = protocol.states, protocol.ground.settings.train.steps
        self.curves: dict[str, curves.Curve] = {}
        self.differences: dict[str, list[compare.Difference]] = {}
        self.reloaded: dict[str, dict[str, float]] = {}

    def results(self) -> Iterator[CaseResult]:
        """Judge every optimizer by every gate."""
        torch.manual_seed(self.ground.settings.run.seed)  # a norm that draws is judged alike after a resume
        yield from self.first_steps()
        for optimizer in self.ground.settings.train.optimizers:
            yield from self.calls(optimizer)
            yield from self.learning(optimizer)
        yield from self.checkpoints()

    def result(
        self,
        scope: Scope,
        gate: str,
        case: str,
        status: Status,
        detail: str,
        worst: float | None = None,
        hint: str = "",
    ) -> CaseResult:
        """Make one verdict about the implementation."""
        name = self.ground.implementation.name
        worst = None if worst is None or (status == "skipped" and math.isnan(worst)) else worst
        return CaseResult(name, self.execution, scope, gate, "float32", case, status, worst, detail, hint)

    def of(self, optimizer: str, *kinds: str) -> list[Phase]:
        """Return an optimizer's phases of these kinds."""
        return [p for p in self.protocol.phases if p.optimizer == optimizer and p.kind in kinds]

    def calls(self, optimizer: str) -> Iterator[CaseResult]:
        """Demand exactly `steps` forwards and backwards on every rank, and of no other norm.

        Ours count their own launches; of anyone else's norm the calls of the layer are all that is known.
        """
        settings, implementation = self.ground.settings.train, self.ground.implementation
        for phase in self.of(optimizer, "implementation", "reference"):
            of_its_own = phase.kind == "reference" or (implementation.ours and not settings.fault)
            expected = REFERENCE if phase.kind == "reference" else implementation.name
            wrong = []
            for rank, own in enumerate(self.states[phase.key]["ranks"]):
                if rank >= settings.batch:
                    continue  # a rank without rows may run the norm on nothing, or not at all
                counted = own["counted"]
                calls = counted.get(expected, {} if of_its_own else counted[LAYER])
                seen = tuple(calls.get(event, 0) for event in ("forward", "backward"))
                others = sorted(set(counted) - {expected, LAYER})
                if seen != (self.steps, self.steps) or others:
                    also = f", and {', '.join(others)} ran as well" if others else ""
                    wrong.append(f"rank {rank}: {expected} forward {seen[0]}, backward {seen[1]}{also}")
            detail = "; ".join(wrong) or f"{self.steps} forward and {self.steps} backward on every rank, nothing else"
            yield self.result("contract", "calls", phase.key, "failed" if wrong else "passed", detail)

    def first_steps(self) -> Iterator[CaseResult]:
        """Compare outputs and gradients from equal weights: in the first step, then along the reference's way."""
        for number, optimizer in enumerate(self.ground.settings.train.optimizers):
            landmarks = self.states[self.of(optimizer, "reference")[0].key]["landmarks"]
            for step, landmark in landmarks.items():
                if step == 0 and number:
                    continue  # every optimizer starts from the same values and batch
                found = compare.differences(self.ground, landmark["model"], landmark["rows"])
                case = "step 1" if step == 0 else f"{optimizer} step {step + 1}"
                self.differences[case] = found
                for difference in found:
                    yield self.agreement("first step" if step == 0 else "teacher-forced", case, difference)

    def agreement(self, gate: str, case: str, difference: compare.Difference) -> CaseResult:
        """Judge one output or gradient by the worst of its measures."""
        scope = SCOPES[difference.quantity]
        measures = difference.measures
        measure = max(measures, key=lambda name: float("inf") if measures[name] != measures[name] else measures[name])
        worst = measures[measure]
        status: Status = "passed" if worst <= 1.0 else "failed"  # NaN fails
        detail = f"relative error {difference.relative:.2e} (twins {difference.twin:.2e})"
        if status == "failed":
            detail = f"{measure} is {worst:.3g} times its limit; {detail}, norm ratio {difference.ratio:.6g}"
        hint = HINTS[scope] if status == "failed" else ""
        if self.ground.settings.train.width < NARROW:
            status, hint = "skipped", ""
            detail = f"width below {NARROW}: dx is a difference of near-equal numbers; not judged, {detail}"
        return self.result(scope, gate, f"{case}, {difference.quantity}", status, detail, worst=worst, hint=hint)

    def learning(self, optimizer: str) -> Iterator[CaseResult]:
        """Hold loss curve and final test error against the twins'."""
        factor = self.ground.settings.train.twin_factor
        losses = self.losses(optimizer)
        curve = self.curves[optimizer] = curves.judged(losses, factor)
        yield self.result("properties", "loss curve", optimizer, curve.status, curve.detail, worst=curve.worst)
        status, share, detail = curves.test_error(losses, curve, factor)
        yield self.result("properties", "test error", optimizer, status, detail, worst=share)

    def losses(self, optimizer: str) -> curves.Losses:
        """Collect an optimizer's histories."""

        def of(*kinds: str) -> list[torch.Tensor]:
            column = COLUMNS.index("loss")
            return [self.states[p.key]["history"][:, column] for p in self.of(optimizer, *kinds)]

        def tests(*kinds: str) -> list[float]:
            return [self.states[p.key]["errors"]["test"] for p in self.of(optimizer, *kinds)]

        return curves.Losses(
            reference=of("reference")[0],
            implementation=of("implementation")[0],
            twins=torch.stack(of("twin")),
            test={"reference": tests("reference")[0], "implementation": tests("implementation")[0]},
            twin_tests=tests("twin"),
            seed_tests=tests("seed"),
        )

    def checkpoints(self) -> Iterator[CaseResult]:
        """Read the last checkpoint back: equal bits, equal predictions, and weights that either path takes strictly."""
        if not self.ground.ranks.leads:
            return
        found = checkpoint.newest(self.protocol.run.checkpoints, self.protocol.lineage.refusal)
        assert found is not None, "the last step was saved"
        state = found.state
        for optimizer in self.ground.settings.train.optimizers:
            for phase in self.of(optimizer, "reference", "implementation"):
                held, saved = self.states[phase.key]["model"], state["phases"][phase.key]["model"]
                own, other = self.norms(phase)
                before, after, exchanged = (
                    self.predictions(*pair) for pair in ((held, own), (saved, own), (saved, other))
                )
                change = float((after - before).abs().max())
                apart = float((exchanged - before).norm() / before.norm())
                self.reloaded[phase.key] = {"difference": change, "exchanged": apart}
                same = held.keys() == saved.keys() and all(torch.equal(held[name], saved[name]) for name in held)
                reload = f"reloaded: weights {'equal' if same else 'differ'}, predictions differ by {change:.3g}"
                good = same and change == 0.0
                yield self.result("properties", "reload", phase.key, "passed" if good else "failed", reload)
                name = other.name if phase.kind == "reference" else REFERENCE
                detail = f"loads strictly in {name}; predictions differ by {apart:.2e} of their norm"
                status: Status = "passed" if apart <= EXCHANGED else "failed"
                share = apart / EXCHANGED
                yield self.result("properties", "exchange", phase.key, status, detail, worst=share)

    def norms(self, phase: Phase) -> tuple[Any, Any]:
        """Return the phase's own norm and the other path's."""
        pair = (self.ground.reference, self.ground.implementation)
        return pair if phase.kind == "reference" else pair[::-1]

    def predictions(self, values: Mapping[str, torch.Tensor], norm: Any) -> torch.Tensor:
        """Return what these weights, loaded strictly, predict for the test partition."""
        ground: Ground = self.ground
        with torch.no_grad():
            predicted = Network(values, norm, ground.eps, device=ground.device)(ground.data["test"].inputs)
        return predicted.double()  # type: ignore[no-any-return]
