"""Ask the models about keys: which exist, what each expects in words, which is nearest to a wrong one."""

import json
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rmsnorm_cli.config.fields import Says
from rmsnorm_cli.config.models import DEFAULT_IMPL, USES_DATA, Document

KeyPath = tuple[str, ...]

OTHER_WORDS = {  # what other tools call a key of ours, to which a name is too far for difflib
    "batch_size": "batch",
    "columns": "cols",
    "dtype": "dtypes",
    "epsilon": "eps",
    "eta": "lr",
    "features": "inputs",
    "hidden": "width",
    "iterations": "steps",
    "learning_rate": "lr",
    "output_dir": "dir",
    "tolerance": "tolerances",
}


class Place(NamedTuple):
    """A key of the schema: what its value must be and the constraints on it."""

    annotation: Any
    metadata: tuple[Any, ...]
    info: FieldInfo | None


def unwrap(annotation: Any, metadata: tuple[Any, ...] = ()) -> tuple[Any, tuple[Any, ...]]:
    """Strip Annotated and `| None` from a type and gather its constraints."""
    gathered: list[Any] = []
    for item in metadata:
        gathered.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return unwrap(inner, (*gathered, *more))
    if get_origin(annotation) in (Union, UnionType):
        (inner,) = (option for option in get_args(annotation) if option is not NoneType)
        return unwrap(inner, tuple(gathered))
    return annotation, tuple(gathered)


def is_table(annotation: Any) -> bool:
    """Tell whether a type is one of the models."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def place(path: KeyPath) -> Place | None:
    """Find a key or table by its path; None where there is none."""
    found = Place(Document, (), None)
    for key in path:
        if not is_table(found.annotation) or key not in found.annotation.model_fields:
            return None
        info = found.annotation.model_fields[key]
        found = Place(*unwrap(info.annotation, tuple(info.metadata)), info)
    return found


def keys(table: type[BaseModel] = Document, above: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Walk the keys below a table, in the order of the models."""
    for key, info in table.model_fields.items():
        annotation, _ = unwrap(info.annotation)
        if is_table(annotation):
            yield from keys(annotation, (*above, key))
        else:
            yield (*above, key), info


def item_type(annotation: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the type and constraints of a list's items; None where the type is no list."""
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return unwrap(arguments[0])
    return None


def expected(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Say in words what a value must be, its range with it."""
    annotation, constraints = unwrap(annotation, metadata)
    said = [constraint.text for constraint in constraints if isinstance(constraint, Says)]
    if said:
        return said[-1] + _range(constraints)
    if is_table(annotation):
        return "a table"
    items = item_type(annotation)
    if items is not None:
        filled = "a list" if not any(isinstance(c, MinLen) for c in constraints) else "a list that is not empty"
        return f"{filled}, each item {expected(*items)}"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(get_args(annotation))
    return {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}[annotation] + _range(
        constraints
    )


def _range(constraints: tuple[Any, ...]) -> str:
    low = high = ""
    for constraint in constraints:
        match constraint:
            case Ge(ge=limit):
                low = f" from {limit}"
            case Gt(gt=limit):
                low = f" above {limit}"
            case Le(le=limit):
                high = f" to {limit}"
            case Lt(lt=limit):
                high = f" below {limit}"
    if low.startswith(" above") or not low:
        high = high.replace(" to ", " at most ")
    return low + (" and" if low.startswith(" above") and high else "") + high


def show(value: Any) -> str:
    """Write a value as TOML would, on one line and not too long."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, str):
        return _cut(json.dumps(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return _cut("[" + ", ".join(show(item) for item in value[:20]) + "]")
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    return str(value)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def spell(path: Sequence[str]) -> str:
    """Write a path as TOML's dotted key, cut where it is longer than a line should be."""
    parts = [_cut(key) if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _cut(json.dumps(key)) for key in path[:8]]
    return ".".join([*parts, "..."] if len(path) > 8 else parts)


def nearest_value(value: Any, annotation: Any) -> str | None:
    """Return the choice that a wrong one was probably meant to be."""
    if get_origin(annotation) is not Literal or not isinstance(value, str):
        return None
    found = get_close_matches(value.lower(), get_args(annotation), n=1, cutoff=0.5)
    return found[0] if found else None


def nearest_keys(path: KeyPath) -> list[KeyPath]:
    """Return the valid keys that an unknown one was probably meant to be: one; as a last resort all of its table."""
    above, name = path[:-1], path[-1].replace("-", "_").lower()[:100]
    table = place(above)
    siblings = [(*above, key) for key in table.annotation.model_fields] if table and is_table(table.annotation) else []
    everywhere = [key for key, _ in keys()]
    for choices, cutoff in ((siblings, 1.0), (siblings, 0.85), (everywhere, 1.0), (siblings, 0.6), (everywhere, 0.75)):
        names = {choice[-1]: choice for choice in reversed(choices)}
        names |= {word: names[ours] for word, ours in OTHER_WORDS.items() if ours in names}
        close = get_close_matches(name, names, n=1, cutoff=cutoff)
        if close:
            return [names[close[0]]]
    return siblings or [(key,) for key in Document.model_fields]


class Key(NamedTuple):
    """One key as help and documentation show it; the default is written as TOML, "not set" where there is none."""

    key: str
    type: str
    default: str
    description: str


def describe(command: str) -> list[Key]:
    """List the keys that a command reads: the common tables, then its own."""
    tables = {"operator", "run", command} | ({"data"} if command in USES_DATA else set())
    found = []
    for path, info in keys():
        if path[0] in tables:
            default = DEFAULT_IMPL[command] if path == ("run", "impl") else info.default
            shown = "not set" if default is None else literal(default)
            kind = expected(info.annotation, tuple(info.metadata))
            found.append(Key(spell(path), kind, shown, info.description or ""))
    return found


def literal(value: Any) -> str:
    """Write a value as TOML, in full."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, (str, bool)) else str(value)
