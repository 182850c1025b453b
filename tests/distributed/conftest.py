"""Lets these tests import what torchrun runs beside them, and the network and the judge of tests/swap."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "swap")]
