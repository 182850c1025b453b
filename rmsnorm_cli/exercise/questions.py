"""The questions of the default exercise, and how an answer is read: from --predict, or typed on a terminal."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from typing import TYPE_CHECKING

from rmsnorm_cli.errors import ConfigError

if TYPE_CHECKING:
    from rmsnorm_cli.console import Console

LARGEST_EPS = 10.0  # beside a larger one fp32 hardly tells the two means, 257/512 and 1, apart
CLOSE = 0.01  # an answer within 1 % of the arithmetic is right: the idea is asked for, not the seventh digit
WORDS = {
    "small": ("small", "smaller", "too small", "less", "low", "s"),
    "large": ("large", "larger", "too large", "big", "bigger", "too big", "more", "high", "l"),
    "yes": ("yes", "y", "right", "true"),
    "no": ("no", "n", "wrong", "false"),
}


@dataclass(frozen=True)
class Question:
    """One question; its answer is a number, or one of two words. `why` is for those who answered otherwise."""

    key: str
    text: str
    choices: tuple[str, ...] = ()
    why: str = ""

    @property
    def expected(self) -> str:
        """Return what an answer looks like."""
        return " or ".join(self.choices) if self.choices else "a number, such as 0.5 or 1/2"

    def read(self, answer: str) -> float | str:
        """Return the answer as a number or as one of the choices; ValueError for anything else."""
        word = " ".join(answer.lower().split())
        if self.choices:
            for choice in self.choices:
                if word in WORDS[choice]:
                    return choice
            raise ValueError(answer)
        try:
            value = float(Fraction(word.replace(" ", "")))
        except (ValueError, ZeroDivisionError, OverflowError):
            raise ValueError(answer) from None
        return value


QUESTIONS = (
    Question(
        "sum",
        "what is the sum of squares that the kernel adds up over its lanes?",
        why="The padding lanes hold zeros and add nothing.",
    ),
    Question(
        "mean",
        "what mean square does the changed kernel make of it?",
        why="It is 257 divided by the 512 lanes.",
    ),
    Question(
        "denominator",
        "is sqrt(mean + eps), by which x is divided, too small or too large?",
        ("small", "large"),
        why="The mean is too small, and so is its root.",
    ),
    Question(
        "output",
        "what is y, the same in every column?",
        why="x is divided by too small a number, so y is too large: where eps is small, by the square root of 512/257.",
    ),
    Question(
        "at256",
        "and for a row of 256 ones in the same changed kernel: what is y?",
        why="256 is a power of two: there is no padding, and the divisor happens to be right.",
    ),
    Question(
        "mended",
        "now the forward divides by N again. The backward, which makes dx of a mean of its own, still divides by the "
        "512 lanes: is dx, the gradient of the 257 ones, right?",
        ("yes", "no"),
        why="The backward divides a mean of its own, which nobody has mended.",
    ),
)


def right(given: float | str, arithmetic: float | str) -> bool:
    """Tell whether an answer is what arithmetic gives: the same word, or a number within 1 %."""
    if isinstance(given, str) or isinstance(arithmetic, str):
        return given == arithmetic
    return math.isclose(given, arithmetic, rel_tol=CLOSE)


def read_predictions(entries: Iterable[str]) -> dict[str, float | str]:
    """Read KEY=VALUE entries; ConfigError with every problem."""
    known = {question.key: question for question in QUESTIONS}
    found: dict[str, float | str] = {}
    problems = []
    for entry in entries:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if key in known and not equals:
            problems.append(f"exercise.predict: {key!r} has no answer, expected {key}= and {known[key].expected}")
        elif key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"exercise.predict: {entry!r}, expected KEY=VALUE with one of {', '.join(known)}{hint}")
        elif key in found:
            problems.append(f"exercise.predict: {key} is predicted twice, expected once")
        else:
            try:
                found[key] = known[key].read(value)
            except ValueError:
                problems.append(f"exercise.predict: {key}={value!r}, expected {known[key].expected}")
    if problems:
        raise ConfigError(problems)
    return found


def ask(console: "Console", given: Mapping[str, float | str]) -> dict[str, float | str]:
    """Ask on the terminal what is not given yet; an empty answer skips a question, the end of the input all others."""
    answers = dict(given)
    if len(answers) < len(QUESTIONS):
        console.note(f"Enter skips a question, Ctrl-D the rest; a number within {CLOSE:.0%} of arithmetic's is right.")
    for place, question in enumerate(QUESTIONS, 1):
        while question.key not in answers:
            text = console.ask(f"{place}/{len(QUESTIONS)} {question.key}: {question.text} ({question.expected})")
            if not text:
                return answers
            if not text.strip():
                break
            try:
                answers[question.key] = question.read(text)
            except ValueError:
                console.note(f"  {text.strip()!r} is not {question.expected}")
    return answers


def can_ask(console: "Console", no_input: bool) -> bool:
    """Tell whether there is somebody to ask: a terminal at both ends, and output that is meant for people."""
    return (
        not (no_input or console.json or console.quiet) and console.terminal and bool(sys.stdin) and sys.stdin.isatty()
    )
