"""A run against an earlier one: what has a ratio, and what has none; `commands/test_bench.py` runs `--compare`."""

import numpy as np

from rmsnorm_cli.bench import earlier, rows


def test_compare_gives_no_ratio_of_cold_times_over_another_number_of_buffers(tmp_path):
    """From few sets of buffers a part of what is read may still lie in the cache; other times are compared as ever."""

    def cells(sets):
        return [{"cell": "4x4 float32", "sets_in_rotation": sets, "tables": []}]

    blocks = {
        ("4x4 float32", "forward", *kind, name): np.linspace(1.0, 1.01, 20)
        for kind in (("gpu", "cold"), ("calls", "loop"))
        for name in ("fused", rows.STREAM)
    }
    before = earlier.Earlier(tmp_path, {"cells": cells(2)}, blocks, {})
    rules = rows.Rules(0.01, 0.99, 200, 5, 0.05)
    for sets, words in ((2, {"equal"}), (10, {None})):
        made = earlier.compared(before, cells(sets), blocks, rules, np.random.default_rng(0))
        assert {row["word"] for row in made if row["cache"] == "cold"} == words
        assert {row["word"] for row in made if row["cache"] == "loop"} == {"equal"}
    assert {row["text"] for row in made if row["cache"] == "cold"} == {"sets of buffers in rotation: 2 then, 10 now"}
