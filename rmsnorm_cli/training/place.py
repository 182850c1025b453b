"""Which of how many processes this one is, by the environment that torchrun makes; told without torch."""

import os

from rmsnorm_cli.errors import ConfigError

LAST_PORT = 65535
LAUNCH = "start with torchrun, or unset WORLD_SIZE and RANK for a process alone"


def place() -> tuple[int, int]:
    """Return this process's rank and how many there are; ConfigError for a torchrun environment that is not whole."""
    world = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "0")
    if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
        raise ConfigError(f"RANK={rank} of WORLD_SIZE={world} is no place among processes; {LAUNCH}")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if int(world) > 1 and missing:
        raise ConfigError(f"WORLD_SIZE is {world} without {' and '.join(missing)}; {LAUNCH}")
    port = os.environ.get("MASTER_PORT", "0")
    if int(world) > 1 and not (port.isdecimal() and int(port) <= LAST_PORT):
        raise ConfigError(f"MASTER_PORT is {port!r}, expected a number up to {LAST_PORT}; {LAUNCH}")
    return int(rank), int(world)
