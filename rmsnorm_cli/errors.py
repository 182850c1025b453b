"""The few exceptions a user can meet, each with the exit code that `main()` returns for it."""

import os


class RmsnormError(Exception):
    """A failure that ends a command with one sentence for the user and the class's exit code."""

    exit_code = 3


class ConfigError(RmsnormError):
    """Wrong usage or configuration; `problems` holds every finding, one line each."""

    exit_code = 2

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class EnvironmentProblem(RmsnormError):
    """Say that this machine cannot do what was asked: no GPU, no compiler, a missing package, a full disk."""

    exit_code = 4


class VerifierUntrusted(RmsnormError):
    """A control was misjudged, so the verifier must not speak a verdict here."""

    exit_code = 3


# What a user can cause in the kernels and on the command line, by class name: the kernels stand below this module, and
# Typer carries its own copy of click.
FOREIGN_EXIT_CODES = {
    "ContractError": 2,
    "UnknownImplementation": 2,
    "ClickException": 2,
    "MissingPackage": 4,
    "OutOfMemoryError": 4,
    "MemoryError": 4,
    "KeyboardInterrupt": 130,
    "Abort": 130,
}


def exit_code_of(problem: BaseException) -> int | None:
    """Return the exit code of an exception that says something to the user, None for one that is a fault of ours."""
    if isinstance(problem, Interrupted):
        return first_signal(problem).exit_code
    if isinstance(problem, RmsnormError):
        return problem.exit_code
    for kind in type(problem).__mro__:
        if kind.__name__ in FOREIGN_EXIT_CODES:
            return FOREIGN_EXIT_CODES[kind.__name__]
    no_memory = isinstance(problem, RuntimeError) and "allocate memory" in str(problem)  # PyTorch's, on the CPU
    return EnvironmentProblem.exit_code if no_memory or of_the_machine(problem) else None


def of_the_machine(problem: BaseException) -> bool:
    """Say whether nothing can be compiled or kept here: that ends a command, and says nothing of what it ran."""
    if isinstance(problem, OSError):
        return problem.errno is not None
    if isinstance(problem, ImportError):  # Triton loads what the C compiler made, and it was gone
        return "shared object file" in str(problem)
    if _half_deleted(problem):
        return True
    # The compiler that Triton calls failed, or it found none.
    return type(problem).__name__ == "CalledProcessError" or "Failed to find C compiler" in str(problem)


def flat(said: object) -> str:
    """Return what somebody else's code said as one line, without a terminal's colours and control characters."""
    from rich.control import strip_control_codes  # here: the configuration, which imports this, does without
    from rich.text import Text

    line = " ".join(str(said).split())  # first, since to a terminal a carriage return begins the line anew
    return strip_control_codes(Text.from_ansi(line).plain).strip()


def sentence(problem: BaseException) -> str:
    """Return what an exception says, as one sentence for a user."""
    if isinstance(problem, OSError) and problem.errno is not None:
        return _about_files(problem)
    if _half_deleted(problem):
        return f"a compiled kernel lost its binary while it was read{_cache_remedy()}"
    if of_the_machine(problem):
        return f"kernels cannot be compiled here: {flat(problem)}; see: rmsnorm doctor"
    if hasattr(problem, "format_message"):  # click's
        about = getattr(getattr(problem, "ctx", None), "command_path", "rmsnorm")
        return f"{problem.format_message().rstrip('.')}; see: {about} --help"
    if exit_code_of(problem) == EnvironmentProblem.exit_code and not isinstance(problem, RmsnormError):
        return flat(problem) or "this machine has not enough memory"
    return str(problem) or ("interrupted" if exit_code_of(problem) == 130 else type(problem).__name__)


def _about_files(problem: OSError) -> str:
    """Say which file; what the tool writes itself is explained where it is written, so most are a compiler's."""
    said = f"{problem.filename}: {problem.strerror}" if problem.filename else str(problem.strerror)
    elsewhere = problem.filename and not str(problem.filename).startswith(os.environ.get("TRITON_CACHE_DIR", ""))
    return said if elsewhere else said + _cache_remedy()


def _half_deleted(problem: BaseException) -> bool:
    """Say whether Triton found a kernel's description in its cache and not the binary beside it."""
    return isinstance(problem, KeyError) and "Unknown key: 'cubin'" in str(problem)


def _cache_remedy() -> str:
    """Return where compiled kernels are kept and what to do there, or nothing where no folder was chosen."""
    cache = os.environ.get("TRITON_CACHE_DIR", "")
    remedy = "free space there, or set TRITON_CACHE_DIR to a folder that can be written"
    return f"; compiled kernels are kept in {cache}: {remedy}" if cache else ""


class Interrupted(KeyboardInterrupt):
    """The process was asked to stop: exit 130 for SIGINT, 143 for SIGTERM.

    A KeyboardInterrupt and no Exception: a compiler that a signal meets may catch every Exception and go on.
    """

    def __init__(self, signal_number: int, message: str = "interrupted") -> None:
        self.exit_code = 128 + signal_number
        super().__init__(message)


def first_signal(problem: BaseException) -> "Interrupted":
    """Return the first of the signals that met while one another's were being answered: it is the one that counts."""
    first, seen = problem, problem
    while seen.__context__ is not None:
        seen = seen.__context__
        first = seen if isinstance(seen, Interrupted) else first
    assert isinstance(first, Interrupted)
    return first
