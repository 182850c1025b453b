"""What the tests of the gates share: settings, implementations made of a function, and who rejects what."""

from types import SimpleNamespace

import pytest

from rmsnorm_cli.config.models import Operator, RunTable, Verify
from rmsnorm_cli.gates import controls
from rmsnorm_cli.inputs import cases
from rmsnorm_cli.judging.tolerances import DECLARED


def settings_of(**verify):
    """Return settings as a command sees them, with some keys of [verify] replaced."""
    return SimpleNamespace(operator=Operator(), run=RunTable(), verify=Verify(**verify))


@pytest.fixture
def settings():
    return settings_of


@pytest.fixture
def impl():
    """Make an implementation of a function f(x, gamma, eps) -> y."""
    from rmsnorm_cli.kernels.api import Implementation

    return lambda norm, name="candidate", **more: Implementation(name, norm, **more)


@pytest.fixture
def rowwise():
    from rmsnorm_cli.kernels.api import implementation

    return implementation("rowwise")


@pytest.fixture
def ask(device):
    """Ask one question of a gate, by the declared tolerances."""

    def asked(gate, of, question, execution="cpu"):
        where = "cuda" if device.startswith("cuda") else execution
        return gate.check(of, question, where, device, DECLARED)

    return asked


@pytest.fixture
def rejecting(impl, ask):
    """Return the names of the gates that fail a norm, each asked what the controls ask, or more."""

    def names(norm, more=None, **kwargs):
        rejected = set()
        for name, (gate, questions) in controls.QUESTIONS.items():
            asked = [*questions(0), *(more or {}).get(name, [])]
            verdicts = [verdict for one in asked for verdict in ask(gate, impl(norm, **kwargs), one)]
            if any(verdict.status == "failed" for verdict in verdicts):
                rejected.add(name)
        return rejected

    return names


@pytest.fixture
def small():
    """Return a small case; every field can be replaced."""

    def made(distribution="aligned", shape=(5, 33), dtype="float32", **more):
        return cases.case(shape, dtype, distribution, more.pop("eps", 1e-6), more.pop("seed", 0), **more)

    return made
