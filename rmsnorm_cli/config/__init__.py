"""Configuration: defaults < TOML file < environment < --set < options, validated whole, resolved once, then frozen.

In reading order: `models` is the schema, `fields` the kinds of value in it, `load` the layers, `lines` and `literals`
the reading of files and of words, `schema` and `problems` what is said about a wrong key or value.
"""

from rmsnorm_cli.config.fields import sizes
from rmsnorm_cli.config.load import FLAGS, Settings, load, runs_folder, to_toml
from rmsnorm_cli.config.models import (
    COMMANDS,
    DEFAULT_IMPL,
    KERNELS,
    Bench,
    Data,
    Document,
    Exercise,
    Gradcheck,
    Operator,
    RunTable,
    Tolerances,
    Train,
    Verify,
)
from rmsnorm_cli.config.schema import Key, describe

__all__ = [
    "COMMANDS",
    "DEFAULT_IMPL",
    "FLAGS",
    "KERNELS",
    "Bench",
    "Data",
    "Document",
    "Exercise",
    "Gradcheck",
    "Key",
    "Operator",
    "RunTable",
    "Settings",
    "Tolerances",
    "Train",
    "Verify",
    "describe",
    "load",
    "runs_folder",
    "sizes",
    "to_toml",
]
