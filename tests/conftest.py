"""What all tests share: the device they run on, the interpreter where there is no GPU, and the table of reported cases.

`pytest -m case --immunity=docs/immunity.md` runs what covers a public report (tests/reported/cases.toml) and writes the
column of this machine; the column of the other one is taken over from docs/immunity.md.

Hypothesis draws the same few cases each time; FUZZ=nightly in the environment makes it 2000 fresh ones a test.
"""

import ast
import os
import re
import signal
import tomllib
from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import hypothesis
import pytest
import torch

from rmsnorm_cli import environment

# Triton reads this when a kernel is decorated, so it stands before the first import of rmsnorm_cli.kernels.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Processes that tests start find this package wherever they start, and what else this process finds.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.getenv("PYTHONPATH")])])

NO_INTERPRETER = environment.interpreter_problem(*map(environment.version_of, ("triton", "numpy")))
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "immunity.md"
COLUMNS = ("on the CPU", "on the H200")
OWN = int(GPUS > 0)
SLOW = (hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture)

hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=SLOW
)
hypothesis.settings.register_profile(
    "nightly", deadline=None, max_examples=2000, print_blob=True, database=None, suppress_health_check=SLOW
)
hypothesis.settings.load_profile(os.environ.get("FUZZ", "suite"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--immunity", metavar="FILE", help="write the table of reported cases with this run's results")


def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell's background: every process of a test would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--immunity") and not hasattr(config, "workerinput"):  # xdist's workers report to one process
        config.pluginmanager.register(Immunity(Path(config.getoption("--immunity"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, needed in (("gpu", 1), ("gpu2", 2)):
            if item.get_closest_marker(marker) is not None and needed > GPUS:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), this machine has {GPUS}"))
        if item.get_closest_marker("alone") is not None and int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
            item.add_marker(pytest.mark.skip(reason="compares times on a GPU that is its own: run it without -n"))
        if item.get_closest_marker("interpreter") is not None and NO_INTERPRETER is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs Triton's interpreter: {NO_INTERPRETER}"))


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Let what a test draws from torch's global generator not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def interpreter_runs() -> bool:
    """Return whether the versions on this machine can run Triton's interpreter, by the tool's own check."""
    return NO_INTERPRETER is None


@pytest.fixture(scope="session")
def device() -> str:
    """Return where tensors lie: the first GPU, or the CPU (Triton's interpreter) where there is none."""
    return "cuda:0" if GPUS else "cpu"


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans be made as where kernels are interpreted, on a machine with a GPU too; what is planned cannot run."""
    monkeypatch.setattr("rmsnorm_cli.kernels.contract.INTERPRETED", True)


# --- the table of reported cases --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def covering() -> dict[str, list[str]]:
    """Return case -> the tests that cover it."""
    return covered()


@pytest.fixture(scope="session")
def committed_table() -> dict[str, list[str]]:
    """Return the rows of docs/immunity.md, case -> cells."""
    return rows(TABLE.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def fresh_table() -> dict[str, list[str]]:
    """Return the rows as the marks and cases.toml make them today, without results."""
    return rows(rendered({}, ("", "")))


def covered() -> dict[str, list[str]]:
    """Read the marks `pytest.mark.case("B01", ...)` of all test functions, whatever part of them this run collects."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.case":
                        for identifier in mark.args:
                            found[ast.literal_eval(identifier)].append(
                                f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}"
                            )
    return dict(found)


class Immunity:
    """Collects what each test came to and writes the table when the session ends."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.seen: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's call, or the stage that kept it from one."""
        if report.when == "call" or report.outcome != "passed":
            word = "needs more GPUs" if report.skipped and "CUDA device" in str(report.longrepr) else report.outcome
            self.seen[report.nodeid.partition("[")[0]][word] += 1

    def pytest_sessionfinish(self) -> None:
        """Write the table."""
        results, heads = earlier()
        for identifier, tests in covered().items():
            total = sum((self.seen[test] for test in tests), Counter())
            cells = list(results.get(identifier, ("", "")))
            cells[OWN] = (
                ", ".join(f"{number} {word}" for word, number in sorted(total.items(), key=order)) or cells[OWN]
            )
            results[identifier] = (cells[0], cells[1])
        name = f"{GPUS} × {torch.cuda.get_device_name(0)}" if GPUS else "Triton's interpreter and PyTorch on the CPU"
        own = f"{name}, torch {torch.__version__}, Triton {version('triton')}, {datetime.now(UTC):%Y-%m-%d}"
        heads = (heads[0], own) if OWN else (own, heads[1])
        self.target.write_text(rendered(results, heads), encoding="utf-8")


def order(item: tuple[str, int]) -> tuple[int, str]:
    """Put failures first: they are what a reader looks for."""
    return ("failed", "passed").index(item[0]) if item[0] in ("failed", "passed") else 2, item[0]


def earlier() -> tuple[dict[str, tuple[str, str]], tuple[str, str]]:
    """Return the results that the committed table holds, case -> (CPU, GPU), and what it says of the two machines."""
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    machines = [re.search(rf"^\* {column}: (.*)$", text, re.MULTILINE) for column in COLUMNS]
    told = [machine[1] if machine else "not run yet" for machine in machines]
    return {identifier: (cells[-2], cells[-1]) for identifier, cells in rows(text).items()}, (told[0], told[1])


def rendered(results: dict[str, tuple[str, str]], heads: tuple[str, str]) -> str:
    """Return docs/immunity.md."""
    cases = tomllib.loads((TESTS / "reported" / "cases.toml").read_text(encoding="utf-8"))
    tests = covered()
    lines = [
        "# Immune to what has bitten others",
        "",
        "Public reports about fused norms and the tools around them, what is right, and the tests that would have",
        "shown the fault here; each report stands for a kind. Written by `pytest -m case --immunity=docs/immunity.md`,",
        "each column on its own machine; numbers count tests, parameters included. References: paths below github.com.",
        "What was wrong here, and how its kind was mended: [mended.md](mended.md).",
        "",
        *(f"* {column}: {head}" for column, head in zip(COLUMNS, heads, strict=True)),
    ]
    for kind, group in groupby(cases.items(), key=lambda item: item[1]["kind"]):
        lines += ["", f"## {kind.capitalize()}", ""]
        lines += [f"| case | what goes wrong | what is right | covered by | {COLUMNS[0]} | {COLUMNS[1]} |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for identifier, case in group:
            by = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in tests.get(identifier, []))
            cells = results.get(identifier, ("", ""))
            told = f"{case['case']} ({case['source']})"
            lines.append(f"| {identifier} | {told} | {case['right']} | {by} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of a table, case -> what goes wrong, what is right, covered by, and the two results."""
    found = re.findall(r"^\| (B\d+) \| (.*) \|$", text, re.MULTILINE)
    return {identifier: [cell.strip() for cell in cells.split("|")] for identifier, cells in found}
