"""Resolve a configuration: defaults < TOML < environment < --set < options; all problems at once, each one line.

Every source is validated by itself, so that a wrong value is told even where a stronger source overrides it. Then
the sources are merged, weakest first, and the result is validated as a whole.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import tomli_w

from rmsnorm_cli.config.lines import KeyPath, printable, read_toml
from rmsnorm_cli.config.literals import frozen, value_of
from rmsnorm_cli.config.models import (
    COMMANDS,
    DEFAULT_IMPL,
    USES_DATA,
    Bench,
    Data,
    Document,
    Exercise,
    Gradcheck,
    Operator,
    RunTable,
    Table,
    Train,
    Verify,
    conflicts,
)
from rmsnorm_cli.config.problems import Source, check, unknown
from rmsnorm_cli.config.schema import item_type, place, spell
from rmsnorm_cli.errors import ConfigError

PREFIX = "RMSNORM_"
NO_KEYS = ("RMSNORM_TRACEBACK",)  # variables that are no keys: this one shows where an internal error happened
FLAGS = {  # options whose name is not that of their key
    "run.dir": "--runs-dir",
    "verify.dtypes": "--dtype",
    "verify.distributions": "--distribution",
    "verify.layouts": "--layout",
    "train.optimizers": "--optimizer",
    "bench.shapes": "--shape",
    "bench.dtypes": "--dtype",
    "bench.perimeters": "--perimeter",
    "bench.measures": "--measure",
}

Own = TypeVar("Own", bound=Table)


@dataclass(frozen=True)
class Settings:
    """Everything that a command is told, resolved: the common tables and the command's own, which is `table`.

    The command's own table is also the attribute of its name: `settings.verify`. Another command's is not there.
    """

    command: str
    operator: Operator
    run: RunTable
    data: Data
    table: Verify | Gradcheck | Train | Bench | Exercise

    @property
    def seed(self) -> int:
        """Return the run's seed, an integer even where "random" was asked for."""
        return self.run.seed

    @property
    def folder(self) -> Path:
        """Return run.dir as a path, its leading ~ as the home folder: in a file or behind = no shell has seen it."""
        return Path(os.path.expanduser(self.run.dir))

    @property
    def verify(self) -> Verify:
        """Return [verify]."""
        return self._own(Verify)

    @property
    def gradcheck(self) -> Gradcheck:
        """Return [gradcheck]."""
        return self._own(Gradcheck)

    @property
    def train(self) -> Train:
        """Return [train]."""
        return self._own(Train)

    @property
    def bench(self) -> Bench:
        """Return [bench]."""
        return self._own(Bench)

    @property
    def exercise(self) -> Exercise:
        """Return [exercise]."""
        return self._own(Exercise)

    def _own(self, kind: type[Own]) -> Own:
        if not isinstance(self.table, kind):
            raise AttributeError(f"settings of {self.command} hold no [{kind.__name__.lower()}]")
        return self.table


def load(
    command: str,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    sets: Iterable[str] = (),
    options: Mapping[str, object] | None = None,
) -> Settings:
    """Resolve the settings of a command.

    `environ` is read for names that begin with RMSNORM_. `sets` are texts key=value. `options` maps dotted keys to
    values, None where an option was not given; text is read like that of --set. Raises ConfigError with all problems.
    """
    if command not in COMMANDS:
        raise LookupError(f"no command {command!r}")
    problems: list[str] = []
    sources = [Source({"run": {"impl": DEFAULT_IMPL[command]}}, lambda path: "defaults")]
    if file is not None:
        sources.append(_from_file(file, problems))
    sources += _from_environment(environ or {}, problems)
    sources += _from_sets(sets, problems)
    sources += _from_options(options or {}, problems)
    if problems:
        raise ConfigError(problems)
    merged: dict[str, Any] = {}
    for source in sources:
        _merge(source.data, merged)
    document = Document.model_validate(merged)
    problems = [_blame(sources, *conflict) for conflict in conflicts(document, command)]
    if problems:
        raise ConfigError(problems)
    data = document.data if command in USES_DATA else Data()
    return Settings(command, document.operator, document.run, data, getattr(document, command))


def runs_folder(option: str | None, environ: Mapping[str, str]) -> Path:
    """Return the folder of the run directories for a command that has no settings, such as `clean`."""
    return load("verify", environ=environ, options={"run.dir": option}).folder


def to_toml(settings: Settings) -> str:
    """Write settings as TOML that loads to the same settings; a key that is not set is told in a comment."""
    tables: dict[str, Table] = {"operator": settings.operator, "run": settings.run}
    if settings.command in USES_DATA:
        tables["data"] = settings.data
    tables[settings.command] = settings.table
    parts = []
    for name, table in tables.items():
        parts.append(_arrays_on_one_line(tomli_w.dumps({name: table.model_dump(exclude_none=True)})))
        for key, info in type(table).model_fields.items():
            if getattr(table, key) is None:
                parts[-1] += f"# {key} is not set: {info.description}\n"
    return "\n".join(parts)


def _arrays_on_one_line(text: str) -> str:
    """Join the arrays that the writer spreads over lines; no value of ours holds a line break."""
    lines: list[str] = []
    depth = 0
    for line in text.split("\n"):
        token = line.strip().removesuffix(",")
        if depth == 0:
            lines.append(line)
        else:
            lines[-1] += token if token == "]" or lines[-1].endswith("[") else f", {token}"
        depth += token.endswith("[") - (depth > 0 and token == "]")
    return "\n".join(lines)


def _from_file(file: Path, problems: list[str]) -> Source:
    """Read a config file; its problems are noted in the order of its lines."""
    read, name = read_toml(file), printable(str(file))

    def where(path: KeyPath) -> str:
        return f"{name}:{read.lines[path]}" if path in read.lines else name

    source = Source(frozen(read.data), where)
    found = [
        (fault.line, f"{name}:{fault.line}: {fault.text}" if fault.line else f"{name}: {fault.text}")
        for fault in read.faults
    ]
    found += [(read.lines.get(path, sys.maxsize), line) for path, line in check(source)]
    problems += [line for _, line in sorted(found, key=lambda item: item[0])]
    return source


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> list[Source]:
    """Read RMSNORM_TABLE__KEY variables, in the order of their names."""
    sources = []
    for name in sorted(name for name in environ if name.startswith(PREFIX) and name not in NO_KEYS):
        path = tuple(name.removeprefix(PREFIX).split("__"))
        known = tuple(key.lower() for key in path) if name.isupper() else path
        sources += _assignment(spell([name]), known, environ[name], problems, write=_variable)
    return sources


def _variable(path: KeyPath) -> str:
    return PREFIX + "__".join(path).upper()


def _from_sets(sets: Iterable[str], problems: list[str]) -> list[Source]:
    """Read key=value texts, the later over the earlier."""
    sources = []
    for text in sets:
        key, equals, value = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        label = f"--set {spell(path)}"
        if equals:
            sources += _assignment(label, path, value.strip(), problems)
        else:
            problems.append(f"{label}: no value, expected --set key=value, such as --set run.seed=3")
    return sources


def _assignment(
    label: str, path: KeyPath, text: str, problems: list[str], write: Callable[[KeyPath], str] = spell
) -> list[Source]:
    """Make a source of one key and its text; a key that does not exist becomes a problem and no source."""
    found = place(path)
    value = value_of(text, found.annotation) if found else text
    source = _single(label, path, value, write)
    if found is None:
        problems.append(unknown(source, path))
        return []
    problems += [line for _, line in check(source)]
    return [source]


def _from_options(options: Mapping[str, object], problems: list[str]) -> list[Source]:
    """Take the options that were given."""
    sources = []
    for key, value in options.items():
        if value is None or value in ([], ()):
            continue
        path = tuple(key.split("."))
        found = place(path)
        if found is None:
            raise LookupError(f"an option stands for {key!r}, which is no key")
        label = FLAGS.get(key, "--" + path[-1].replace("_", "-"))
        source = _single(label, path, _option_value(value, found.annotation))
        problems += [line for _, line in check(source)]
        sources.append(source)
    return sources


def _option_value(value: object, annotation: Any) -> Any:
    items = item_type(annotation)
    if isinstance(value, (list, tuple)) and items is not None:
        return tuple(_option_value(item, items[0]) for item in value)
    return frozen(value_of(str(value), annotation) if isinstance(value, (str, Path)) else value)


def _single(label: str, path: KeyPath, value: Any, write: Callable[[KeyPath], str] = spell) -> Source:
    """Make the source of one key, which `label` names."""
    return Source(_nested(path, value), lambda _: label, path, write)


def _nested(path: KeyPath, value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return cast(dict[str, Any], value)


def _merge(stronger: Mapping[str, Any], into: dict[str, Any]) -> None:
    for key, value in stronger.items():
        if isinstance(value, dict):
            _merge(value, into.setdefault(key, {}))
        else:
            into[key] = value


def _blame(sources: list[Source], keys: tuple[str, ...], wrong: str, wanted: str) -> str:
    """Say of a contradiction where the first of its keys that anybody set was set."""
    for path in (tuple(key.split(".")) for key in keys):
        for source in reversed(sources):
            if _sets_key(source.data, path):
                return source.line(path, None, wrong, wanted)
    return sources[0].line(tuple(keys[0].split(".")), None, wrong, wanted)


def _sets_key(data: Any, path: KeyPath) -> bool:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True
