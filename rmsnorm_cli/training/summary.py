"""What a finished training run tells: tables for people, a summary for machines, the limits declared before it."""

import math
from collections.abc import Sequence
from typing import Any

from rmsnorm_cli.results import CaseResult, Outcome, Table, count, overall
from rmsnorm_cli.training import compare, curves, verdict
from rmsnorm_cli.training.counting import LAYER
from rmsnorm_cli.training.loop import COLUMNS
from rmsnorm_cli.training.plan import Phase
from rmsnorm_cli.training.verdict import Verdicts

EVIDENCE = (
    "What this shows: this network, at this width, batch and these learning rates, learns through the implementation "
    "as it does through the reference but for rounding. A loss that goes down proves no gradient; the gradients stand "
    "in a table of their own. The kernel at other shapes and dtypes is the matter of verify."
)
LEARNING = ("loss curve", "test error")  # gates of one optimizer each


def limits(factor: float) -> dict[str, Any]:
    """Return every limit of this command, which the run directory holds before the first comparison."""
    return {
        "gradients": {
            "relative_error_over_noise": compare.FACTOR,
            "relative_floor": compare.FLOOR,
            "one_minus_cosine": compare.COSINE,
            "norm_ratio_minus_one": compare.RATIO,
            "float64_distance_over_noise": compare.DISTANCE,
        },
        "loss_curve": {
            "twin_factor": factor,
            "floor_over_loss": curves.FLOOR,
            "horizon_over_seed_deviation": curves.HORIZON,
            "horizon_over_loss_without_seeds": curves.HORIZON_ALONE,
            "fewest_steps": curves.FEWEST,
            "seed_deviations_beyond_horizon": curves.SEED_DEVIATIONS,
        },
        "exchange_relative": verdict.EXCHANGED,
    }


def outcome(verdicts: Verdicts, fault: str) -> Outcome:
    """Judge a finished run and put it into words."""
    results = tuple(verdicts.results())
    counts = count(results)
    status = overall(counts)
    caught = caught_by(results, verdicts)
    notes = [EVIDENCE] if status == "passed" else worst_of_each_gate(results)
    if fault:
        notes.append(f"fault {fault}: " + "; ".join(f"{key}: {', '.join(g) or 'nothing'}" for key, g in caught.items()))
    return Outcome(
        status=status,
        execution=verdicts.execution,
        counts=counts,
        summary=summary(verdicts) | {"caught_by": caught, "checks": [r.record() for r in results]},
        tables=(learning_table(verdicts), first_step_table(verdicts), yardstick_table(verdicts, results)),
        notes=tuple(notes),
        results=results,
    )


def worst_of_each_gate(results: Sequence[CaseResult]) -> list[str]:
    """Return one line for each gate with something wrong: how much, the worst of it, and what that points to."""
    lines = []
    for gate in dict.fromkeys(result.gate for result in results):
        asked = [result for result in results if result.gate == gate]
        bad = [result for result in asked if result.status in ("failed", "error", "inconclusive")]
        if bad:
            worst = max(bad, key=lambda r: math.inf if r.worst is None or math.isnan(r.worst) else r.worst)
            hints = list(dict.fromkeys(result.hint for result in bad if result.hint))
            if verdict.HINTS["forward"] in hints:  # a wrong forward makes every gradient wrong
                hints = [verdict.HINTS["forward"]]
            points = f"; points to {', or '.join(hints)}" if hints else ""
            lines.append(f"{gate}: {len(bad)} of {len(asked)} {bad[0].status}; {worst.case}: {worst.detail}{points}")
    return lines


def caught_by(results: Sequence[CaseResult], verdicts: Verdicts) -> dict[str, list[str]]:
    """Return, for the first step (where no optimizer has a say) and for each optimizer, the gates that failed."""
    found: dict[str, list[str]] = {key: [] for key in ("first step", *verdicts.ground.settings.train.optimizers)}
    for result in results:
        if result.status != "failed":
            continue
        key = "first step" if result.gate == "first step" else result.case.partition("/")[0].partition(" ")[0]
        name = result.scope if result.gate == "first step" else result.gate
        if name not in found[key]:
            found[key].append(name)
    return found


def summary(verdicts: Verdicts) -> dict[str, Any]:
    """Return plain values for run.json and the JSON document."""
    protocol, states = verdicts.protocol, verdicts.states
    optimizers = verdicts.ground.settings.train.optimizers
    return {
        "implementation": verdicts.ground.implementation.name,
        "processes": verdicts.ground.ranks.world,
        "steps": verdicts.steps,
        "data": protocol.lineage.data,
        "limits": limits(verdicts.ground.settings.train.twin_factor),
        "test_mse": {o: {p.path: states[p.key]["errors"]["test"] for p in phases_of(verdicts, o)} for o in optimizers},
        "test_mse_float64": {
            o: {p.path: states[p.key]["errors"]["test_float64"] for p in phases_of(verdicts, o)} for o in optimizers
        },
        "calls": {
            p.key: [own["counted"] for own in states[p.key]["ranks"]]
            for p in protocol.phases
            if p.kind in ("reference", "implementation")
        },
        "gradients": {case: [d.record() for d in found] for case, found in verdicts.differences.items()},
        "curves": {optimizer: curve.record() for optimizer, curve in verdicts.curves.items()},
        "reloaded": verdicts.reloaded,
    }


def phases_of(verdicts: Verdicts, optimizer: str) -> list[Phase]:
    """Return all of an optimizer's phases."""
    return verdicts.of(optimizer, "reference", "implementation", "twin", "seed")


def learning_table(verdicts: Verdicts) -> Table:
    """Return one row for each path and optimizer: losses, test error, calls of the norm, reload."""
    rows = []
    column = COLUMNS.index("loss")
    for phase in verdicts.protocol.phases:
        state = verdicts.states[phase.key]
        losses = state["history"][:, column].tolist()
        calls = state["ranks"][0]["counted"].get(LAYER, {})
        reload = verdicts.reloaded.get(phase.key)
        rows.append(
            (
                phase.optimizer,
                phase.path,
                f"{losses[0]:.6f}",
                f"{losses[-1]:.6f}",
                f"{state['errors']['test']:.8f}",
                f"{calls.get('forward', 0)}/{calls.get('backward', 0)}",
                f"{reload['difference']:g}" if reload else "",
            )
        )
    columns = ("optimizer", "path", "first loss", "last loss", "test MSE", "forward/backward", "reload difference")
    return Table(f"{verdicts.steps} steps of {verdicts.ground.settings.train.batch} examples", columns, tuple(rows))


def first_step_table(verdicts: Verdicts) -> Table:
    """Return how output and gradients of the first step differ from the reference's."""
    rows = tuple(
        (
            d.quantity if d.quantity == "output" else f"gradient of {d.quantity}",
            f"{d.relative:.2e}",
            f"{d.twin:.2e}",
            f"{d.ratio - 1.0:+.1e}",
            f"{1.0 - d.cosine:.1e}",
            f"{d.exact:.2e}",
            f"{d.reference_exact:.2e}",
        )
        for d in verdicts.differences.get("step 1", ())
    )
    columns = (
        "first step",
        "relative error",
        "of a twin",
        "norm ratio - 1",
        "1 - cosine",
        "from float64",
        "reference from float64",
    )
    caption = "a twin is the reference with every output of the norm moved by one rounding"
    return Table(f"{verdicts.ground.implementation.name} against the reference", columns, rows, caption)


def yardstick_table(verdicts: Verdicts, results: Sequence[CaseResult]) -> Table:
    """Return the verdict on each optimizer's loss curve."""
    spoken = {(r.case, r.gate): r for r in results if r.gate in LEARNING}
    rows = tuple(
        (
            optimizer,
            spoken[optimizer, "loss curve"].status,
            f"{curve.largest_difference:.2e}",
            f"{curve.largest_twin:.2e}",
            f"{curve.worst:.3g} at step {curve.worst_step}",
            f"{curve.horizon} of {curve.steps}",
            spoken[optimizer, "test error"].status,
        )
        for optimizer, curve in verdicts.curves.items()
    )
    columns = ("optimizer", "loss curve", "largest |Δloss|", "twins", "of the limit", "steps judged", "test error")
    return Table("loss curves against one rounding", columns, rows)
