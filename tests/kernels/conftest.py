"""What the kernels' tests share lies beside them: this folder is no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
