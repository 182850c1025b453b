"""What several commands' tests share."""

import sys
import textwrap

import pytest


@pytest.fixture
def foreign(tmp_path):
    """Return a function that writes a foreign implementation and returns its name for --impl."""

    def write(body, name="norm"):
        path = tmp_path / f"{name}.py"
        head = """
        import torch
        def right(x, gamma, eps):
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma, eps)
        """
        path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        sys.modules.pop(f"rmsnorm_foreign_{name}", None)
        return f"{name}.py:norm"

    return write
