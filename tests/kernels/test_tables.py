"""The launch tables: tiles that cover every width, within what a program can hold, and what was fastest at borders."""

from typing import Any

import pytest

from rmsnorm_cli.kernels.geometry import cover
from rmsnorm_cli.kernels.tables import backward_table, column_sum_table, forward_table, stays


@pytest.mark.parametrize(
    ("N", "tiles"), [(5120, (4096, 1024)), (257, (256, 1)), (769, (1024, 0)), (4096, (4096, 0)), (1, (1, 0))]
)
def test_two_tiles_where_one_would_idle(N, tiles):
    """A width just above a power of two is covered by two tiles, one just below it by one."""
    assert cover(N) == tiles


def borders(*limits):
    """Return widths at which launches change, and their neighbours of whole vectors and by one column."""
    return [limit + step for limit in limits for step in (-8, -4, -1, 0, 1, 4, 8)]


@pytest.mark.parametrize(
    ("itemsize", "launches"),
    [
        (2, {1032: 2, 1536: 2, 1544: 4, 3584: 4, 3592: 8, 5120: 8, 5128: 4, 6144: 4, 6152: 8, 10240: 8, 10248: None}),
        (4, {1028: 2, 1536: 2, 1540: 4, 3072: 4, 3076: 16, 10240: 16, 10244: 32, 12288: 32, 12292: None}),
        (4, {16384: None, 16388: 16, 24576: 16, 24580: None}),
    ],
)
def test_whole_vectors_are_read_once_by_as_many_warps_as_was_fastest(itemsize, launches):
    """Up to the width from which reading twice is faster (None)."""
    for N, warps in launches.items():
        config = forward_table(N, itemsize)
        assert (config.path, config.warps if warps else None) == ("rows" if warps else "reload", warps), N


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_tables_cover_every_width(itemsize):
    """Each table names tiles that cover the row (or chunk it), within what a program can hold, for all widths tried."""
    wide = borders(1536, 3072, 3584, 4096, 5120, 6144, 8192, 10240, 12288, 16384, 20480, 24576, 40960, 65536)
    for N in [*range(1, 1200), *wide, 2**17 + 1, 2**20 + 1, 2**24]:
        launches: list[Any] = [backward_table(N, itemsize, ring) for ring in (True, False)]
        launches += [forward_table(N, itemsize, ring, v) for ring in (True, False) for v in (None, itemsize, 8, 16)]
        for config in launches:
            if config.path in ("rows", "reload", "walk"):
                assert config.A + config.B >= N
                assert config.rows * (config.A + config.B) <= 65536
            assert config.warps <= 32
            assert config.warps.bit_count() == config.rows.bit_count() == 1


def test_a_column_sums_tiles_are_powers_of_two():
    for parts in (1, 2, 3, 31, 32, 33, 132, 256, 257, 264, 396, 528, 792):
        for N in (1, 257, 1024, 4095, 4096, 8192, 8193, 20480, 2**20):
            assert all(size.bit_count() == 1 for size in column_sum_table(parts, N))


@pytest.mark.parametrize(
    ("M", "N", "itemsize", "told"),
    [
        (1024, 1024, 2, False),
        (2047, 1024, 2, False),
        (2048, 1024, 2, True),
        (1024, 1024, 4, True),
        (2**20, 257, 2, False),
        (2**20, 257, 4, True),
        (2**20, 1, 8, True),
    ],
)
def test_x_is_told_to_stay_from_4_mib_on_but_for_an_odd_number_of_16_bit_numbers(M, N, itemsize, told):
    assert stays(M, N, itemsize) == told
