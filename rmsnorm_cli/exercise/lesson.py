"""The default exercise: predict what dividing by the padded block does, run it, and compare with arithmetic.

A row of 257 ones is loaded into a block of 512 lanes, the padding as zeros. Everything can be computed by hand.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmsnorm_cli import faults
from rmsnorm_cli.exercise import questions, summary
from rmsnorm_cli.faults import apply
from rmsnorm_cli.faults.examples import inputs, ones
from rmsnorm_cli.faults.fault import NAIVE, rows
from rmsnorm_cli.results import CaseResult, Outcome, Scope, Table, count, overall

if TYPE_CHECKING:
    from rmsnorm_cli.config import Settings
    from rmsnorm_cli.console import Console
    from rmsnorm_cli.environment import Device
    from rmsnorm_cli.rundir.run import Run

N, SAFE = 257, 256
BLOCK = 512  # the next power of two at or above 257; of 256 it is 256 itself
AGREES = 1e-5  # relative: fp32 rounding of a handful of operations, and 1e6 times less than the mistake
FORWARD, BOTH, BACKWARD = "divide-by-block", "both-divide-by-block", "backward-divides-by-block"
RIGHT = ""  # no mistake: the kernel as it is
KERNELS = (RIGHT, FORWARD, BOTH, BACKWARD)
TESTS = ((NAIVE, False), (rows(N=SAFE), False), (rows(), True))  # and whether they notice the mistake


@dataclass(frozen=True)
class Seen:
    """What a kernel gave for a row of ones: rstd as it was saved, y and dx of one column (all columns are equal)."""

    rstd: float
    y: float
    dx: float

    def mean(self, eps: float) -> float:
        """Return the mean square that the saved rstd was made from."""
        return 1 / self.rstd**2 - eps


def run(settings: "Settings", run: "Run", console: "Console", device: "Device", no_input: bool) -> Outcome:
    """Ask, run the kernel with and without the mistake, and lay prediction, arithmetic and measurement side by side."""
    eps = settings.operator.eps
    given = questions.read_predictions(settings.exercise.predict)
    question = introduction(eps)
    for line in (question, "", *changed_lines(), ""):
        console.note(line)
    console.note(f"What comes out? (changed source and diff: {run.path(apply.FOLDER)}/{FORWARD}/)")
    if questions.can_ask(console, no_input):
        given = questions.ask(console, given)
    with console.progress("kernels and tests", len(KERNELS) * 2 + len(TESTS)) as progress:
        seen = {}
        for name, n in itertools.product(KERNELS, (N, SAFE)):
            seen[name, n] = launch(name, n, eps, run, device)
            progress.advance()
        results = compared(seen, eps, device)
        for result in noticed(run, device):
            results.append(result)
            progress.advance()
    for result in results:
        run.record(result.record())
    should, found = arithmetic(eps), measured(seen, eps)
    told = verdicts(given, should, found)
    tables = (forward_table(given, should, found, eps), backward_table(seen, eps), notice_table(results))
    notes = conclusion(told, given, eps, device)
    kept = summary.kept(faults.find(FORWARD), [question], tables, notes)
    counts = count(results)
    right = sum(entry["verdict"] == "right" for entry in told.values())
    predicted = f" and {right} of {len(given)} predictions" if given else ""
    return Outcome(
        status=overall(counts),
        execution=device.execution,
        counts=counts,
        summary={"exercise": {"fault": FORWARD, "predictions": told, "shown": kept}},
        tables=tables,
        notes=tuple(notes),
        results=tuple(results),
        said=f"{counts['passed']} of {len(results)} measurements{predicted} are what arithmetic gives",
    )


def introduction(eps: float) -> str:
    """Return what a reader needs to predict."""
    return (
        f"A row of {N} ones, gamma 1, eps {eps:g}. Triton's blocks are powers of two, so the kernel loads the row into "
        f"{BLOCK} lanes, the padding as zeros. Then it takes the mean of the squares, over the lanes instead of over "
        "the numbers:"
    )


def changed_lines() -> list[str]:
    """Return the lines of the kernel that the mistake changes, before and after."""
    lines = apply.diff(faults.find(FORWARD)).splitlines()
    return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def arithmetic(eps: float) -> dict[str, float | str]:
    """Return the answers that arithmetic gives, by the keys of the questions."""
    mean = N / BLOCK
    return {
        "sum": float(N),
        "mean": mean,
        "denominator": "small",
        "output": 1 / math.sqrt(mean + eps),
        "at256": 1 / math.sqrt(1 + eps),
        "mended": "no",
    }


def expected(name: str, n: int, eps: float) -> Seen:
    """Return what arithmetic gives for n ones, gamma 1 and dy 1: rstd, y = rstd, dx = rstd · (1 − rstd² · share)."""
    share = n / (BLOCK if n == N else n)
    rstd = 1 / math.sqrt((share if name in (FORWARD, BOTH) else 1.0) + eps)
    mean = rstd * (share if name in (BACKWARD, BOTH) else 1.0)  # of u · x̂, both constant along the row
    return Seen(rstd, rstd, rstd * (1 - rstd * mean))


def launch(name: str, n: int, eps: float, run: "Run", device: "Device") -> Seen:
    """Run forward and backward kernels on n ones, with the named mistake or with none."""
    from rmsnorm_cli.kernels import rowwise

    module: Any = rowwise
    if name != RIGHT:
        apply.write(faults.find(name), run.dir)
        module = apply.load(faults.find(name), run.dir)
    given = inputs(ones(n), device.torch_device)
    y, rstd = module.forward(given.x, given.gamma, eps)
    dx, _ = module.backward(given.dy, given.x, given.gamma, rstd)
    return Seen(float(rstd[0]), float(y[0, n // 2]), float(dx[0, n // 2]))


def compared(seen: dict[tuple[str, int], Seen], eps: float, device: "Device") -> list[CaseResult]:
    """Return a verdict for each measured number: whether it agrees with arithmetic."""
    results = []
    for (name, n), got in seen.items():
        want = expected(name, n, eps)
        parts: tuple[tuple[Scope, float, float], ...] = (("forward", got.y, want.y), ("dx", got.dx, want.dx))
        for scope, has, due in parts:
            # dx is a difference of numbers near 1, each rounded in fp32
            off = abs(has - due) / max(abs(due), 1.0)
            results.append(
                CaseResult(
                    name or "rowwise", device.execution, scope, "arithmetic", "float32", f"{n} ones",
                    "passed" if off <= AGREES else "failed", off / AGREES, f"measured {has:.9g}, arithmetic {due:.9g}",
                )
            )  # fmt: skip
    return results


def noticed(run: "Run", device: "Device") -> Iterator[CaseResult]:
    """Show the mistake to the usual test and to two inputs of `verify`: only one of the three may notice it."""
    from rmsnorm_cli.exercise.judge import judge

    impl = faults.implementation(FORWARD, run.dir)
    for question, notices in TESTS:
        judged = judge(impl, question, device.torch_device)
        worst = max((part.worst or 0.0 for part in judged.parts.values()), default=0.0)
        what = "passes" if judged.ok else f"fails: {', '.join(judged.wrong)}"
        status: Any = "passed" if judged.ok != notices else "failed"
        yield CaseResult(
            FORWARD, device.execution, "forward", "noticed", question.dtype, question.id, status, worst, what
        )


def measured(seen: dict[tuple[str, int], Seen], eps: float) -> dict[str, tuple[float, float]]:
    """Return, for each question, what the changed kernel gave, and what the kernel gives without the mistake."""
    faulty, correct = seen[FORWARD, N], seen[RIGHT, N]
    return {
        "sum": (faulty.mean(eps) * BLOCK, correct.mean(eps) * N),
        "mean": (faulty.mean(eps), correct.mean(eps)),
        "denominator": (1 / faulty.rstd, 1 / correct.rstd),
        "output": (faulty.y, correct.y),
        "at256": (seen[FORWARD, SAFE].y, seen[RIGHT, SAFE].y),
        "mended": (seen[BACKWARD, N].dx, correct.dx),
    }


def verdicts(
    given: dict[str, float | str], should: dict[str, float | str], found: dict[str, tuple[float, float]]
) -> dict[str, dict[str, Any]]:
    """Return, for each question, what was predicted, what arithmetic gives, whether they agree, what was measured."""
    told = {}
    for question in questions.QUESTIONS:
        answer = given.get(question.key)
        verdict = (
            "not predicted"
            if answer is None
            else "right"
            if questions.right(answer, should[question.key])
            else "not so"
        )
        told[question.key] = {
            "predicted": answer,
            "arithmetic": should[question.key],
            "verdict": verdict,
            "measured": found[question.key][0],
        }
    return told


def shown(value: float | str | None) -> str:
    """Return a number or a word as the tables show it: 7 digits, or all of a short binary fraction like 257/512."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.9g}" if abs(value * BLOCK - round(value * BLOCK)) < AGREES else f"{value:.7g}"


def forward_table(
    given: dict[str, float | str], should: dict[str, float | str], found: dict[str, tuple[float, float]], eps: float
) -> Table:
    """Return prediction, arithmetic and measurement of the forward, beside the kernel without the mistake."""
    lines = {
        "sum": "sum of squares",
        "mean": "mean square",
        "denominator": "sqrt(mean + eps)",
        "output": "y",
        "at256": f"y at N = {SAFE}",
    }
    by_hand, values = dict(should), {key: tuple(map(shown, pair)) for key, pair in found.items()}
    root, without = found["denominator"]
    by_hand["denominator"] = f"{math.sqrt(N / BLOCK + eps):.6f} {should['denominator']}"
    values["denominator"] = (f"{root:.6f} {'small' if root < without else 'large'}", f"{without:.7f}")
    body = tuple((what, shown(given.get(key)), shown(by_hand[key]), *values[key]) for key, what in lines.items())
    caption = (
        "correct: the kernel without the mistake. Sum and mean square are worked back from what the kernel saved, "
        "rstd = 1 / sqrt(mean + eps)"
    )
    columns = ("quantity", "predicted", "arithmetic", "measured", "correct")
    return Table(f"{N} ones, divided by the block of {BLOCK}", columns, body, caption)


def backward_table(seen: dict[tuple[str, int], Seen], eps: float) -> Table:
    """Return what becomes of y and dx as the two divisors are wrong together, or one at a time."""
    words = {RIGHT: "neither", FORWARD: "forward's", BOTH: "both", BACKWARD: "backward's"}
    body = []
    for name, what in words.items():
        want, got = expected(name, N, eps), seen[name, N]
        body.append((what, *(shown(value) for value in (want.y, got.y, want.dx, got.dx))))
    columns = ("wrong divisor", "y by hand", "y measured", "dx by hand", "dx measured")
    same = len({seen[name, SAFE] for name in words}) == 1
    caption = (
        "backward's alone: the forward has been mended. A dx near 0 is the difference of two numbers near 1, which "
        f"fp32 rounds by some 1e-07, so its digits differ. At N = {SAFE} "
    ) + (f"all four give y = {seen[BOTH, SAFE].y:.7g}, dx = {seen[BOTH, SAFE].dx:.2g}" if same else "they differ too")
    return Table(f"the backward has a divisor of its own ({N} ones, dy 1)", columns, tuple(body), caption)


def notice_table(results: list[CaseResult]) -> Table:
    """Return which of three tests notices the mistake."""
    names = {
        NAIVE.id: f"usual: {NAIVE.M} x {NAIVE.N}, unit normal, gamma 1",
        **{rows(N=n).id: f"{rows().M} x {n}, rows of every size" for n in (SAFE, rows().N)},
    }
    body = tuple((names[r.case], r.detail, f"{r.worst:.3g}") for r in results if r.gate == "noticed")
    caption = (
        "error/limit: the worst error as a fraction of the tolerance that verify declares. usual: what kernels are "
        f"mostly tested with. {NAIVE.N} and {SAFE} are powers of two, their blocks are full; {rows().N} fills half of "
        "one. Rows of every size: their root mean square runs from 0.001 to 100"
    )
    return Table("who notices (the forward's divisor is wrong)", ("test", "verdict", "error/limit"), body, caption)


def conclusion(
    told: dict[str, dict[str, Any]], given: dict[str, float | str], eps: float, device: "Device"
) -> list[str]:
    """Return how the predictions came out, and what there is to learn."""
    lines = []
    if given:
        hits = sum(entry["verdict"] == "right" for entry in told.values())
        lines.append(f"Predictions: {hits} of {len(given)} as arithmetic has it.")
    else:
        keys = ",".join(f"{question.key}=..." for question in questions.QUESTIONS)
        lines.append(f"Nothing was predicted. To say first what you expect: rmsnorm exercise --predict {keys}")
    for question in questions.QUESTIONS:
        entry = told[question.key]
        if entry["verdict"] == "not so":
            said, due = shown(entry["predicted"]), shown(entry["arithmetic"])
            lines.append(f"  {question.key}: you said {said}, it is {due}. {question.why}")
    mended, right = expected(BACKWARD, N, eps).dx, expected(RIGHT, N, eps).dx
    return [
        *lines,
        f"Why {SAFE} shows nothing: its block is {SAFE} too, so the wrong divisor is the right number.",
        "Why mending the forward is not enough: the backward takes a mean of its own, of dy · gamma · x · rstd. With "
        "both divisors wrong dx is the true gradient of the wrong y, so that comparing it with finite differences "
        f"shows nothing; with the forward mended y is right everywhere and dx is {mended:.3g} instead of {right:.3g}.",
        f"Measured on {device.name} ({device.execution}). Next: rmsnorm exercise --list names the other mistakes, "
        "--fault NAME runs one; rmsnorm report latest-exercise makes a page of this.",
    ]
