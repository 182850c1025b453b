"""Mistakes that only `fused` can make in its tiles: a row in two tiles, rows in tiles, a row in chunks, rows walked."""

from rmsnorm_cli.faults.fault import DECLARED, MEMORY, Change, Fault, rows
from rmsnorm_cli.faults.predict import contributions, first_tile, only, saved_rstd, walk_tile, with_rstd
from rmsnorm_cli.inputs.cases import Case

WALKED = rows(M=1025, N=9)  # nine tiles of 128 rows, the last of one row
TWO_TILES = rows()  # 258 columns are a tile of 256 and one of 2
REREAD = Case((5, 16384), distribution="tiny")
MANY_STEPS = Case((1057, 1536))  # 529 tiles of rows, two or more for each program
REREAD_OFTEN = Case((265, 16384))  # one program on an SM, and fewer SMs than rows
MANY_CHUNKS = Case((3, 65537))  # one column more than whole chunks hold

FAULTS = (
    Fault(
        name="second-tile-replaces-sum",
        stage="forward",
        file="forward.py",
        story="The squares of a row's second tile are put in place of the first tile's sum, not added to it. Widths "
        "that one tile covers hide it.",
        changes=(Change("square_sum += row_sum(xb * xb, ROWS)", "square_sum = row_sum(xb * xb, ROWS)"),),
        exposing=TWO_TILES,
        hiding=rows(N=256),
        expected=(DECLARED,),
        predicted=with_rstd(lambda t: (t.x[:, first_tile(t) :].square().sum(-1, keepdim=True) / t.N + t.eps).rsqrt()),
    ),
    Fault(
        name="second-tile-at-zero",
        stage="forward",
        file="forward.py",
        story="The second tile of a row starts at column 0 instead of where the first one ends. Its columns are summed "
        "twice and written twice, and those it should have owned are never written.",
        changes=(Change("b = A + tl.arange(0, B if B > 0 else 1)", "b = tl.arange(0, B if B > 0 else 1)"),),
        exposing=TWO_TILES,
        hiding=rows(N=256),
        expected=(MEMORY,),
    ),
    Fault(
        name="second-tile-not-accumulated",
        stage="dgamma",
        file="backward.py",
        story="A program that walks many tiles of rows adds up dgamma in its first column tile, and keeps only the "
        "last of them in its second. Batches that fit in one step of the walk hide it.",
        changes=(Change("sum_b = tl.fma(db, xb, sum_b)", "sum_b = db * xb"),),
        exposing=WALKED,
        on_gpu=MANY_STEPS,
        hiding=rows(),
        expected=(DECLARED,),
    ),
    Fault(
        name="second-tile-without-its-dot",
        stage="dx",
        file="backward.py",
        story="mean(u · x̂) is taken before the second tile of the row has been added, in the launch for few rows. "
        "Widths of one tile hide it.",
        changes=(
            Change(
                "            dot += row_sum(weighted(db, gb, ROWS, GAMMA) * xb, ROWS)\n        mean = dot / N",
                "            late = row_sum(weighted(db, gb, ROWS, GAMMA) * xb, ROWS)\n        mean = dot / N",
            ),
        ),
        exposing=rows("aligned"),
        on_gpu=rows("aligned", M=5, N=5120),  # there several rows of two tiles are walked, however few
        hiding=rows("aligned", N=256),
        expected=(DECLARED,),
        predicted=only(
            "dx",
            lambda t: t.r * (t.u - t.xhat * (t.u * t.xhat)[:, : first_tile(t)].sum(-1, keepdim=True) / t.N),
        ),
    ),
    Fault(
        name="last-chunk-not-written",
        stage="memory",
        file="forward.py",
        story="A row too wide for registers is summed in whole chunks and a rest, and written in whole chunks alone. "
        "Widths that are multiples of a chunk, as nearly all wide ones are, have no rest.",
        changes=(
            Change(
                "    tl.store(rstd_ptr + row, rstd)\n    for start in tl.range(0, N, CHUNK,",
                "    tl.store(rstd_ptr + row, rstd)\n    for start in tl.range(0, N // CHUNK * CHUNK, CHUNK,",
            ),
        ),
        exposing=MANY_CHUNKS,
        hiding=Case((5, 131072)),
        expected=(MEMORY,),
        seen=("tile-ai/tilelang-ascend #890",),
        interpreter_only="a GPU takes this path for wide rows of float64 alone, which verify is not asked by default",
    ),
    Fault(
        name="last-rows-not-launched",
        stage="memory",
        file="frontplan.py",
        story="The forward is launched for whole tiles of rows alone. The rows of a last tile that is not full are "
        "never written; batches are rarely odd.",
        changes=(
            Change(
                "self.grid = (triton.cdiv(self.M, config.rows), 1)",
                "self.grid = (max(self.M // config.rows, 1), 1)",
            ),
        ),
        exposing=rows(),
        hiding=rows(M=64),
        expected=(MEMORY,),
        seen=("thu-ml/TurboDiffusion #103",),
    ),
    Fault(
        name="last-rows-not-walked",
        stage="dgamma",
        file="backward.py",
        story="The number of tiles of rows that programs walk is rounded down. The rows behind the last full tile get "
        "no dx and add nothing to dgamma; few rows take another path and hide it.",
        changes=(Change("tiles = (M + ROWS - 1) // ROWS", "tiles = M // ROWS"),),
        exposing=WALKED,
        hiding=rows(),
        expected=(DECLARED,),
        seen=("BobMcDear/attorch #18",),
    ),
    Fault(
        name="last-row-walked-again",
        stage="dgamma",
        file="backward.py",
        story="Rows past the end are clamped to the last one, which is right for loads and wrong for the sums of a "
        "walk: the last row counts once for every row that its tile lacks. Few rows take another path.",
        changes=(
            Change(
                "rows = row_numbers(pid + step * programs, ROWS)\n        live = rows < M",
                "rows = tl.minimum(row_numbers(pid + step * programs, ROWS), M - 1)\n        live = rows < M",
            ),
        ),
        exposing=WALKED,
        hiding=rows(),
        expected=(DECLARED,),
        predicted=only("dgamma", lambda t: contributions(t).sum(0) + (-len(t.x) % walk_tile(t)) * contributions(t)[-1]),
    ),
    Fault(
        name="few-rows-first-tile-only",
        stage="dgamma",
        file="backward.py",
        story="The programs that own columns of dgamma look at the first tile of 128 rows and at no other. More rows "
        "than that are rare where this launch is taken, and more than 256 take another.",
        changes=(Change("for first in range(0, M, TILE_ROWS):", "for first in range(0, TILE_ROWS, TILE_ROWS):"),),
        exposing=rows("aligned", M=129, N=9),
        on_gpu=rows("offset", M=129, N=3),
        hiding=rows(),
        expected=(DECLARED,),
        predicted=only("dgamma", lambda t: contributions(t)[:128].sum(0)),
    ),
    Fault(
        name="rstd-of-row-before",
        stage="dx",
        file="reread.py",
        story="Rows that are read twice take the saved rstd of the row before, as a prefetch that is one step off "
        "does. Rows of equal size, and widths that are read once, hide it.",
        changes=(Change("rstd = tl.load(rstd_ptr + row)", "rstd = tl.load(rstd_ptr + tl.maximum(row - 1, 0))"),),
        exposing=REREAD,
        hiding=rows(),
        expected=(DECLARED,),
        predicted=saved_rstd(lambda t: t.r[[0, *range(len(t.x) - 1)]]),
    ),
    Fault(
        name="rstd-of-program",
        stage="dx",
        file="reread.py",
        story="Rows that are read twice take rstd by the number of their program, not of their row. As long as there "
        "are no more rows than programs the two numbers are the same.",
        changes=(Change("rstd = tl.load(rstd_ptr + row)", "rstd = tl.load(rstd_ptr + pid)"),),
        exposing=REREAD,
        on_gpu=REREAD_OFTEN,
        hiding=rows(),
        expected=(DECLARED,),
    ),
)
