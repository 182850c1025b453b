"""Read the text of --set, of environment variables and of options as the value that its key expects."""

import tomllib
from typing import Any, Literal, get_args, get_origin

from rmsnorm_cli.config.schema import item_type, unwrap

DEEPEST = 16


def value_of(text: str, annotation: Any) -> Any:
    """Read text as a TOML literal; where the key holds text, as bare words; where it holds a list, with commas.

    Text that is none of these comes back as it is, and validation says what was expected in its place.
    """
    annotation, _ = unwrap(annotation)
    items = item_type(annotation)
    if items is not None:
        return _items(text, items[0])
    literal = _literal(text)
    if _holds_text(annotation):
        return literal if isinstance(literal, str) else text
    return text if literal is None else literal


def frozen(value: Any, depth: int = 0) -> Any:
    """Turn TOML's arrays into tuples, to a depth that no key of ours reaches; what lies deeper is refused anyway."""
    if depth > DEEPEST:
        return value
    if isinstance(value, dict):
        return {key: frozen(inner, depth + 1) for key, inner in value.items()}
    return tuple(frozen(inner, depth + 1) for inner in value) if isinstance(value, (list, tuple)) else value


def _items(text: str, item: Any) -> Any:
    if text.lstrip().startswith("["):
        literal = _literal(text)
        return text if literal is None else frozen(literal)
    whole = _literal(f"[{text}]")
    if whole is not None and not _holds_text(item):
        return frozen(whole)
    return tuple(value_of(part.strip(), item) for part in text.split(",") if part.strip())


def _holds_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return all(isinstance(choice, str) for choice in get_args(annotation))
    return annotation is str


def _literal(text: str) -> Any:
    """Return the value of a TOML literal, or None where the text is not exactly one."""
    try:
        data = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return data["value"] if len(data) == 1 else None
