"""The few exceptions a user can meet, each with the exit code that `main()` returns for it."""


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


class Interrupted(RmsnormError):
    """The process was asked to stop: exit 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, signal_number: int, message: str = "interrupted") -> None:
        self.exit_code = 128 + signal_number
        super().__init__(message)
