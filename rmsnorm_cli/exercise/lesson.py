"""The default exercise: predict what dividing by the padded block does, run it, and compare with arithmetic.

A row of 257 ones is loaded into a block of 512 lanes, the padding as zeros. Everything can be computed by hand.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmsnorm_cli import faults
from rmsnorm_cli.exercise import paragraphs, questions
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
    for line in paragraphs.lines(introduction(eps, run)):
        console.note(line)
    if questions.can_ask(console, no_input):
        given = questions.ask(console, given)
    should = arithmetic(eps)
    seen = {
        (name, n): launch(name, n, eps, run, device) for name in (RIGHT, FORWARD, BOTH, BACKWARD) for n in (N, SAFE)
    }
    results = [*compared(seen, eps, device), *noticed(run, device)]
    for result in results:
        run.record(result.record())
    told = verdicts(given, should)
    return Outcome(
        status=overall(count(results)),
        execution=device.execution,
        counts=count(results),
        summary={"exercise": {"fault": FORWARD, "predictions": told}},
        tables=(forward_table(given, should, seen, eps), backward_table(seen, eps), notice_table(results)),
        notes=tuple(paragraphs.lines(conclusion(told, given, eps, device))),
        results=tuple(results),
    )


def introduction(eps: float, run: "Run") -> list[str]:
    """Return what a reader needs to predict."""
    return [
        f"A row of {N} ones, gamma 1, eps {eps:g}. Triton's blocks are powers of two, so the kernel loads the row into "
        f"{BLOCK} lanes, the padding as zeros. Then it takes the mean of the squares, over the lanes instead of over "
        "the numbers:",
        "",
        *(
            line
            for line in apply.diff(faults.find(FORWARD)).splitlines()
            if line[:1] in "+-" and line[:3] not in ("+++", "---")
        ),
        "",
        f"What comes out? (changed source and diff: {run.path(apply.FOLDER)}/{FORWARD}/)",
    ]


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


def noticed(run: "Run", device: "Device") -> list[CaseResult]:
    """Show the mistake to the usual test and to two inputs of `verify`: only one of the three may notice it."""
    from rmsnorm_cli.exercise.judge import judge

    impl = faults.implementation(FORWARD, run.dir)
    results = []
    for question, notices in ((NAIVE, False), (rows(N=SAFE), False), (rows(), True)):
        judged = judge(impl, question, device.torch_device)
        worst = max((part.worst or 0.0 for part in judged.parts.values()), default=0.0)
        what = "passes" if judged.ok else f"fails: {', '.join(judged.wrong)}"
        status: Any = "passed" if judged.ok != notices else "failed"
        results.append(
            CaseResult(
                FORWARD, device.execution, "forward", "noticed", question.dtype, question.id, status, worst, what
            )
        )
    return results


def verdicts(given: dict[str, float | str], should: dict[str, float | str]) -> dict[str, dict[str, Any]]:
    """Return, for each question, what was predicted, what arithmetic gives, and whether they agree."""
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
        told[question.key] = {"predicted": answer, "arithmetic": should[question.key], "verdict": verdict}
    return told


def shown(value: float | str | None) -> str:
    """Return a number or a word as the tables show it: 7 digits, or all of a short binary fraction like 257/512."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.9g}" if abs(value * BLOCK - round(value * BLOCK)) < AGREES else f"{value:.7g}"


def forward_table(
    given: dict[str, float | str], should: dict[str, float | str], seen: dict[tuple[str, int], Seen], eps: float
) -> Table:
    """Return prediction, arithmetic and measurement of the forward, beside the kernel without the mistake."""
    faulty, correct, safe = seen[FORWARD, N], seen[RIGHT, N], seen[FORWARD, SAFE]
    size = "small" if faulty.rstd > correct.rstd else "large"
    lines: dict[str, tuple[str, float | str, float | str]] = {
        "sum": ("sum of squares", faulty.mean(eps) * BLOCK, correct.mean(eps) * N),
        "mean": ("mean square", faulty.mean(eps), correct.mean(eps)),
        "denominator": ("sqrt(mean + eps)", f"{1 / faulty.rstd:.6f} {size}", f"{1 / correct.rstd:.7f}"),
        "output": ("y", faulty.y, correct.y),
        "at256": (f"y at N = {SAFE}", safe.y, seen[RIGHT, SAFE].y),
    }
    by_hand: dict[str, float | str] = {
        **should,
        "denominator": f"{math.sqrt(N / BLOCK + eps):.6f} {should['denominator']}",
    }
    body = tuple(
        (what, shown(given.get(key)), shown(by_hand[key]), shown(measured), shown(without))
        for key, (what, measured, without) in lines.items()
    )
    caption = "sum and mean square are worked back from the rstd that the kernel saved"
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
    caption = f"backward's alone: the forward has been mended. At N = {SAFE} " + (
        f"all four give y = {seen[BOTH, SAFE].y:.7g}, dx = {seen[BOTH, SAFE].dx:.2g}" if same else "they differ too"
    )
    return Table(f"the backward has a divisor of its own ({N} ones, dy 1)", columns, tuple(body), caption)


def notice_table(results: list[CaseResult]) -> Table:
    """Return which of three tests notices the mistake."""
    names = {
        NAIVE.id: f"usual: {NAIVE.M} x {NAIVE.N}, unit normal, gamma 1",
        **{rows(N=n).id: f"{rows().M} x {n}, rows of every size" for n in (SAFE, rows().N)},
    }
    body = tuple((names[r.case], r.detail, f"{r.worst:.3g}") for r in results if r.gate == "noticed")
    return Table("who notices (the forward's divisor is wrong)", ("test", "verdict", "error/limit"), body)


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
    for key, entry in told.items():
        if entry["verdict"] == "not so":
            lines.append(
                f"  {key}: you said {shown(entry['predicted'])}, it is {shown(entry['arithmetic'])}. {WHY[key]}"
            )
    mended, right = expected(BACKWARD, N, eps).dx, expected(RIGHT, N, eps).dx
    return [
        *lines,
        f"Why {SAFE} shows nothing: its block is {SAFE} too, so the wrong divisor is the right number.",
        "Why mending the forward is not enough: the backward takes a mean of its own, of u · x̂. With both divisors "
        "wrong dx is the true gradient of the wrong y, so that gradcheck passes; with the forward mended y is right "
        f"everywhere and dx is {mended:.3g} instead of {right:.1g}.",
        f"Measured on {device.name} ({device.execution}). Next: rmsnorm exercise --list, --fault NAME, --all.",
    ]


WHY = {
    "sum": "The padding lanes hold zeros and add nothing.",
    "mean": f"It is {N} divided by the {BLOCK} lanes.",
    "denominator": "The mean is too small, and so is its root.",
    "output": "x is divided by too small a number, so y is too large, by the square root of 512/257.",
    "at256": "256 is a power of two: there is no padding, and the divisor happens to be right.",
    "mended": "The backward divides a mean of its own, which nobody has mended.",
}
