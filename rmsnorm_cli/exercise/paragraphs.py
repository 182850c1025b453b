"""Text for people in lines of 79 characters, broken between words: no number and no name of a case is ever cut."""

import textwrap
from collections.abc import Iterable

WIDTH = 79


def lines(texts: Iterable[str]) -> list[str]:
    """Return the texts as lines; what does not fit on the first of its lines goes on two characters further in."""
    return [line for text in texts for line in _wrapped(text) or [""]]


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
