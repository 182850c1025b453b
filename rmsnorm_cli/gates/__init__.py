"""The gates, in the order in which they are asked; each has its own verdict and the worst is the whole's.

Before them all come the controls (`controls.examine`): known-good and known-bad implementations that these same gates
must tell apart, here and now.
"""

from collections.abc import Collection

from rmsnorm_cli.gates import contract, declared, determinism, exact, fit, identities, memory, rounding, wiring
from rmsnorm_cli.gates.diagnose import diagnose
from rmsnorm_cli.gates.gate import Gate
from rmsnorm_cli.gates.summary import scopes

GATES: tuple[Gate, ...] = (contract, memory, exact, declared, rounding, fit, identities, wiring, determinism)


def selected(only: Collection[str]) -> tuple[Gate, ...]:
    """Return the gates that check at least one of the scopes; a gate may return verdicts on others too."""
    return tuple(gate for gate in GATES if set(gate.SCOPES) & set(only))


__all__ = ["GATES", "Gate", "diagnose", "scopes", "selected"]
