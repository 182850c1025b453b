"""Turn what is wrong with a value into one line: where, key, what is wrong, what is expected, what is nearest."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rmsnorm_cli.config.lines import KeyPath
from rmsnorm_cli.config.models import Document
from rmsnorm_cli.config.schema import expected, item_type, nearest_keys, nearest_value, place, show, spell

MOST_PROBLEMS = 100  # of one source that are told; more are counted


@dataclass(frozen=True)
class Source:
    """One place that sets keys: a whole file, or a single variable, --set or option.

    `where` opens a line about a path. `names` is the path that it names already, so that the line need not.
    `write` is how a key is spelled there.
    """

    data: dict[str, Any]
    where: Callable[[KeyPath], str]
    names: KeyPath = ()
    write: Callable[[KeyPath], str] = spell

    def line(self, path: KeyPath, item: int | None, wrong: str, wanted: str, nearest: str = "") -> str:
        """Put the parts of a problem on one line."""
        subject = [] if path in (self.names, ()) else [spell(path)]
        subject += [] if item is None else [f"item {item + 1}"]
        text = ": ".join([self.where(path), *([" ".join(subject)] if subject else []), wrong])
        return f"{text}, expected {wanted}{nearest}"


def check(source: Source) -> list[tuple[KeyPath, str]]:
    """Validate what one source says, by itself, and return a key and a line for each problem.

    Beyond MOST_PROBLEMS they are counted, in a last line whose key is empty.
    """
    try:
        Document.model_validate(source.data)
    except ValidationError as invalid:
        errors = [error for error in invalid.errors(include_url=False) if not _echo(error)]
        found = list(dict.fromkeys(_problem(source, error) for error in errors[:MOST_PROBLEMS]))
        if len(errors) > MOST_PROBLEMS:
            more = f"{len(errors) - MOST_PROBLEMS} more problems"
            found.append(((), source.line((), None, more, "a configuration of rmsnorm")))
        return found
    return []


def unknown(source: Source, path: KeyPath, *, table: bool = False) -> str:
    """Say that a key or table does not exist, and which was probably meant."""
    above, choices = path[:-1], nearest_keys(path)
    kind = "table" if table else "key"
    inside = bool(above) and place(above) is not None
    wrong = f"unknown {kind} in [{spell(above)}]" if inside else f"unknown {kind}"
    if len(choices) > 1:
        return source.line(path, None, wrong, "one of " + ", ".join(source.write(choice) for choice in choices))
    (nearest,) = choices
    wanted = f"one of the keys of [{spell(above)}]" if inside else "one of the tables and their keys"
    if nearest[:-1] != above and nearest[-1] == path[-1].replace("-", "_"):
        wrong, wanted = f"{kind} in the wrong place", f"it in [{spell(nearest[:-1])}]"
    return source.line(path, None, wrong, wanted, f"; nearest valid key: {source.write(nearest)}")


def _problem(source: Source, error: ErrorDetails) -> tuple[KeyPath, str]:
    """Describe one error of pydantic in the words of the schema."""
    path, item, annotation, metadata = _place(error["loc"])
    got, context = error["input"], error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        return path, unknown(source, path, table=isinstance(got, dict))
    if item is not None:
        got = _at(source.data, path)[item]
    wrong, wanted = f"got {show(got)}", expected(annotation, metadata)
    if error["type"] == "refused":
        wrong = f"{wrong}: {context['wrong']}"
        wanted = context["expected"] or wanted
    nearest = context.get("nearest") or nearest_value(got, annotation)
    return path, source.line(path, item, wrong, wanted, f"; nearest valid value: {nearest}" if nearest else "")


def _echo(error: ErrorDetails) -> bool:
    """Tell whether pydantic calls a list too short only because its items, which have errors of their own, fell out."""
    return error["type"] == "too_short" and len(error["input"]) > 0


def _place(loc: tuple[int | str, ...]) -> tuple[KeyPath, int | None, Any, tuple[Any, ...]]:
    """Split the location of an error: the key, the item of its list if it is about one, and what belongs there."""
    path = tuple(str(part) for part in itertools.takewhile(lambda part: isinstance(part, str), loc))
    found = place(path)
    if found is None:  # an unknown key
        return path, None, None, ()
    items = item_type(found.annotation)
    if len(loc) > len(path) and items is not None:
        return path, int(loc[len(path)]), *items
    return path, None, found.annotation, found.metadata


def _at(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data[key]
    return data
