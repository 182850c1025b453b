"""Time launches around those of the tables on this GPU: `python tests/kernels/sweep_launches.py --help`.

For each shape, every combination of the values that are named for fields of `geometry.Forward` or `geometry.Backward`
replaces them in the launch that the table chooses:

    python tests/kernels/sweep_launches.py backward bfloat16 16384x6144 8192x8192 --vary warps=8,16 registers=None,96

A shape written 16384x4096+1 has x and dy start one number after 16 bytes; `--sums 256x32x8,64x32x4` tries tiles of the
column sum too (rows, columns, warps).

A candidate is compiled in another process, compared with float64, and captured as a CUDA graph of six calls
over three sets of buffers, too large together for the L2 cache (a percent or two of them may still lie there: `bench`
rotates more). The graphs of a shape take turns in an order drawn anew each round; what is printed are medians, beside a
plain stream of the same bytes.
"""

import argparse
import csv
import dataclasses
import itertools
import multiprocessing
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from rmsnorm_cli.kernels import backplan, reference
from rmsnorm_cli.kernels.backplan import BackwardPlan
from rmsnorm_cli.kernels.frontplan import ForwardPlan
from rmsnorm_cli.kernels.geometry import Backward, Forward
from rmsnorm_cli.kernels.rowlayout import walking_order
from rmsnorm_cli.kernels.tables import SMALL_ROWS, STAYING

CALLS, SETS, EPS = 6, 3, 1e-6
Launch = Forward | Backward
Candidate = tuple[Launch, tuple[int, int, int] | None]
"""A launch, and the tile of the column sum where it is not the table's."""
Call = Callable[[tuple[torch.Tensor, ...]], Any]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=["forward", "backward"])
    parser.add_argument("dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("shapes", nargs="+", metavar="MxN[+START]")
    parser.add_argument(
        "--vary", nargs="*", action="append", default=[], metavar="FIELD=VALUE,VALUE",
        help="every combination of the values of these fields, None for no limit; may be given several times",
    )  # fmt: skip
    parser.add_argument("--sums", default="", metavar="RxCxW,...", help="tiles of the column sum beside the table's")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--processes", type=int, default=max(1, (multiprocessing.cpu_count() or 1) - 1))
    parser.add_argument("--csv", metavar="FILE", help="write every median there too")
    return parser.parse_args()


def value_of(field: "dataclasses.Field[Any]", text: str) -> Any:
    """Return what a word of the command line means for a field of a launch."""
    if field.name == "path":
        return text
    if isinstance(field.default, bool):
        return text in ("True", "1")
    return None if text == "None" else int(text)


def variants(launch: Launch, *varied: list[str]) -> list[Launch]:
    """Return the launch, and for each set of fields all combinations of the values they are to take, each once."""
    fields = {field.name: field for field in dataclasses.fields(launch)}
    found = [launch]
    for vary in varied:
        named = dict(one.split("=", 1) for one in vary)
        values = [[value_of(fields[name], text) for text in named[name].split(",")] for name in named]
        for each in itertools.product(*values):
            found.append(dataclasses.replace(launch, **dict(zip(named, each, strict=True))))
    return list(dict.fromkeys(found))


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a text like 16384x4096+1 or 256x32x8."""
    return tuple(int(size) for size in text.replace("+", "x").split("x"))


def plan_of(way: str, x: torch.Tensor, gamma: torch.Tensor, candidate: Candidate | None) -> Any:
    """Return the plan of a call, with the launch that is asked for in the place of the table's."""
    plan = ForwardPlan(x, gamma, False) if way == "forward" else BackwardPlan(x, x, gamma, walking_order(x), True, True)
    if candidate is not None:
        launch, tile = candidate
        table = backplan.column_sum_table
        with mock.patch.object(backplan, "column_sum_table", lambda parts, N: tile or table(parts, N)):
            plan._choose(*((launch, x) if way == "forward" else (launch,)))
    return plan


def call_of(way: str, plan: Any, gamma: torch.Tensor) -> Call:
    """Return one call over a set of buffers: x, dy, rstd and room for a result."""
    if way == "forward":
        return lambda buffers: plan.run(buffers[0], gamma, EPS)
    return lambda buffers: plan.run(buffers[1], buffers[0], gamma, buffers[2])


def buffers_of(M: int, N: int, start: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Draw x and dy, which begin `start` numbers after 16 bytes, and make rstd and room for a result.

    Each row has a size of its own and dy leans on x by as much as it likes: else another row's rstd, or another's
    mean(u · x_hat), would hardly be seen.
    """
    x, dy = (torch.randn(M * N + start, device="cuda").to(dtype)[start:].view(M, N) for _ in range(2))
    dy.add_(x * torch.randn(M, 1, device="cuda").to(dtype))
    x.mul_(0.5 + torch.rand(M, 1, device="cuda").to(dtype))
    return x, dy, torch.rsqrt(x.float().square().mean(1) + EPS), torch.empty_like(x)


def stream(way: str, buffers: tuple[torch.Tensor, ...]) -> None:
    """Move the bytes of a pass, all from where 16 bytes begin."""
    x, dy = (tensor.as_strided(tensor.shape, tensor.stride(), 0) for tensor in buffers[:2])
    if way == "forward":
        buffers[3].copy_(x)
    else:
        torch.add(x, dy, out=buffers[3])


def compile_one(job: tuple[str, str, int, int, Candidate]) -> None:
    """Compile a candidate into the cache on disk; whether it works is seen later."""
    way, dtype, N, start, candidate = job
    gamma = torch.ones(N, device="cuda", dtype=getattr(torch, dtype))
    rows = max(SMALL_ROWS + 1, -(-STAYING // (N * gamma.element_size())))  # no launch changes beyond so many
    buffers = buffers_of(rows, N, start, gamma.dtype)
    try:
        call_of(way, plan_of(way, buffers[0], gamma, candidate), gamma)(buffers)
    except Exception as problem:  # a launch that the card refuses is no result
        print(shown(candidate), type(problem).__name__, file=sys.stderr)


def wrong(way: str, result: Any, buffers: tuple[torch.Tensor, ...], gamma: torch.Tensor) -> str:
    """Say what is wrong with the first rows of a result, or with dgamma, or nothing."""
    x, dy, G = buffers[0], buffers[1], gamma.double()
    if way == "forward":
        pairs = [(result[0][:64], reference.forward(x[:64].double(), G, EPS))]
    else:
        dx, dgamma = reference.backward(dy.double(), x.double(), G, EPS)
        pairs = [(result[0][:64], dx[:64]), (result[1], dgamma)]
    errors = [float((got.double() - want).norm() / want.norm()) for got, want in pairs]
    return next((f"differs from float64 by {error:.1g}" for error in errors if not error < 4e-3), "")


def medians(calls: dict[str, Call], sets: list[tuple[torch.Tensor, ...]], rounds: int) -> dict[str, float]:
    """Return the median time of a call in µs for each name."""
    graphs = {}
    for name, call in calls.items():
        call(sets[0])
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for i in range(CALLS):
                call(sets[i % SETS])
        graphs[name].replay()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order, dice = list(graphs), random.Random(1)
    for _ in range(rounds):
        dice.shuffle(order)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in order]
        for name, (start, end) in zip(order, events, strict=True):
            start.record()
            graphs[name].replay()
            end.record()
        torch.cuda.synchronize()
        for name, (start, end) in zip(order, events, strict=True):
            times[name].append(start.elapsed_time(end) * 1000 / CALLS)
    return {name: statistics.median(each) for name, each in times.items()}


def shown(candidate: Candidate) -> str:
    """Return the fields of a launch that are not as they are by default, and the tile of its column sum likewise."""
    launch, tile = candidate
    fields = [field for field in dataclasses.fields(launch) if getattr(launch, field.name) != field.default]
    words = [f"{field.name}={getattr(launch, field.name)}" for field in fields]
    return " ".join(words if tile is None else [*words, "sum=" + "x".join(map(str, tile))])


def main() -> None:
    """Sweep all shapes."""
    asked = arguments()
    dtype = getattr(torch, asked.dtype)
    if asked.sums and asked.way == "forward":
        sys.exit("a forward has no column sum: --sums is for the backward")
    tiles = [None, *(numbers(tile) for tile in asked.sums.split(",") if tile)]
    candidates: dict[tuple[int, int, int], list[Candidate]] = {}
    for shape in asked.shapes:
        M, N, start = (*numbers(shape), 0)[:3]
        few = buffers_of(SMALL_ROWS + 1, N, start, dtype)[0]
        table = plan_of(asked.way, few, torch.empty(N, device="cuda", dtype=dtype), None).config
        candidates[M, N, start] = [(launch, tile) for launch in variants(table, *asked.vary) for tile in tiles]
    jobs = [(asked.way, asked.dtype, N, start, one) for (_, N, start), each in candidates.items() for one in each]
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        pool.map(compile_one, list(dict.fromkeys(jobs)), chunksize=1)
    rows = []
    for (M, N, start), each in candidates.items():
        gamma = torch.rand(N, device="cuda").to(dtype)
        sets = [buffers_of(M, N, start, dtype) for _ in range(SETS)]
        calls: dict[str, Call] = {"stream": lambda buffers: stream(asked.way, buffers)}
        for candidate in each:
            name = ("table: " if candidate == each[0] else "") + shown(candidate)
            try:
                plan = plan_of(asked.way, sets[0][0], gamma, candidate)
                call = call_of(asked.way, plan, gamma)
                result = call(sets[0])
                refused = "" if plan.config == candidate[0] else "refused"
                problem = wrong(asked.way, result, sets[0], gamma) or refused
            except Exception as raised:
                problem = type(raised).__name__
            if problem:
                print(f"  {name}: {problem}", file=sys.stderr)
            else:
                calls[name] = call
        found = medians(calls, sets, asked.rounds)
        shape = f"{M} × {N}" + (f" + {start}" if start else "")
        print(f"{asked.way} {shape} {asked.dtype}, stream {found['stream']:.2f} µs")
        plain = found.pop("stream")
        for name, time in sorted(found.items(), key=lambda item: item[1]):
            print(f"  {100 * plain / time:6.2f} %  {time:8.2f} µs  {name}")
            rows.append((asked.way, M, N, start, asked.dtype, plain, time, name))
        del calls, sets
        torch.cuda.empty_cache()
    if asked.csv:
        with open(asked.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("pass", "M", "N", "start", "dtype", "stream_us", "us", "launch"), *rows])


if __name__ == "__main__":
    main()
