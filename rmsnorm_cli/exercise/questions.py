"""The questions of the default exercise, and how an answer is read: from --predict, or typed on a terminal."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from typing import TYPE_CHECKING

from rmsnorm_cli.errors import ConfigError

if TYPE_CHECKING:
    from rmsnorm_cli.console import Console

CLOSE = 0.01  # an answer within 1 % of the arithmetic is right: the idea is asked for, not the seventh digit
WORDS = {
    "small": ("small", "smaller", "too small", "less", "low", "s"),
    "large": ("large", "larger", "too large", "big", "bigger", "too big", "more", "high", "l"),
    "yes": ("yes", "y", "right", "true"),
    "no": ("no", "n", "wrong", "false"),
}


@dataclass(frozen=True)
class Question:
    """One question; its answer is a number, or one of two words."""

    key: str
    text: str
    choices: tuple[str, ...] = ()

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
    Question("sum", "sum of squares of the row"),
    Question("mean", "mean square that the faulty kernel makes of it"),
    Question("denominator", "sqrt(mean + eps), by which x is divided: too large or too small?", ("small", "large")),
    Question("output", "y, in every column"),
    Question("at256", "the same kernel on 256 ones: y, in every column"),
    Question("mended", "the forward is mended, the backward's own mean is not: is dx right?", ("yes", "no")),
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
        if not equals or key not in known:
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


def ask(
    console: "Console", given: Mapping[str, float | str], line: Callable[[], str] | None = None
) -> dict[str, float | str]:
    """Ask on the terminal what is not given yet; an empty answer skips a question, the end of the input all others."""
    answers = dict(given)
    for question in QUESTIONS:
        while question.key not in answers:
            console.note(f"{question.key}: {question.text} ({question.expected}; Enter to skip)")
            text = (line or sys.stdin.readline)()
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
    return not (no_input or console.json or console.quiet) and console.terminal and sys.stdin.isatty()
