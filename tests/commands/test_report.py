"""`rmsnorm report`: self-contained pages and figures whose every number stands in the run's own files."""

import functools
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from rmsnorm_cli import faults
from rmsnorm_cli.bench import rows, summary, tables
from rmsnorm_cli.commands import report as command
from rmsnorm_cli.console import Console
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.exercise.summary import kept
from rmsnorm_cli.page import html
from rmsnorm_cli.results import Table
from rmsnorm_cli.timing import Sample, Session

RULES = rows.Rules(0.01, 0.99, 300, 20, 0.02)
SHAPES = ((128, 257), (2048, 4096), (4096, 4096), (8192, 5120))
SPEEDS = {"fused": 0.93, "rowwise": 0.6, "reference": 0.12, "torch": 0.7, "compile": 0.95}


def session_of(seconds, rng):
    session = Session(blocks=25, canaries={"core clock": [1e-4] * 25}, warmup_rounds=10)
    for block in range(25):
        for position in range(2):
            for name, true in seconds.items():
                taken = true * float(np.exp(rng.normal(0, 3e-3)))
                session.samples.append(Sample(name, block, position, taken))
    return session


def cell_of(M, N, dtype, perimeters, rng):
    """Return a cell as `bench` summarises it, with plausible times; rowwise declines wide rows, torch fails once."""
    made = []
    moved = M * N * (4 if dtype == "float32" else 2)
    for perimeter in perimeters:
        stream = moved * (2 if perimeter == "forward" else 3) / 4.2e12 + 1.5e-6
        for measure, cache in (("calls", "loop"), ("gpu", "cold"), ("host", "loop")):
            floor = stream if measure == "gpu" else max(stream, 3e-5)
            alive = {name: floor / speed for name, speed in SPEEDS.items() if not (name == "rowwise" and N > 4096)}
            alive |= {"fused (A/A)": alive["fused"]} | ({"stream": stream} if measure == "gpu" else {})
            names = [name for name in SPEEDS if name in alive]
            timed = rows.Timed(session_of(alive, rng), names, ["torch", "reference"], 2 * moved, 2 * moved, True)
            table = rows.table(timed, RULES, rng)
            bare = {"against": {}, "flags": []}
            if "rowwise" not in alive:
                detail = f"x has {N} columns: rowwise takes at most 4096"
                table["rows"].insert(1, bare | {"impl": "rowwise", "status": "refused", "detail": detail})
            if (N, perimeter, dtype) == (257, "backward", "float16"):
                table["rows"] = [row for row in table["rows"] if row["impl"] != "torch"]
                detail = "dgamma: first wrong element [3], got 1.5, want 0.75"
                table["rows"].append(bare | {"impl": "torch", "status": "failed", "detail": detail})
            made.append({"perimeter": perimeter, "measure": measure, "cache": cache} | table)
    memory = {
        name: {
            p: {"peak_bytes": moved + 512, "saved_bytes": moved, "saved_bytes_beyond_inputs": 4 * M} for p in perimeters
        }
        for name in SPEEDS
    }
    return {
        "cell": f"{M}x{N} {dtype}", "M": M, "N": N, "dtype": dtype, "sets_in_rotation": 4, "fits_l2": False,
        "bytes": dict.fromkeys(perimeters, 2 * moved), "consumes_dy": [], "memory": memory, "tables": made,
    }  # fmt: skip


def bench_summary(shapes=SHAPES, perimeters=("forward", "backward"), dtypes=("float32", "float16")):
    rng = np.random.default_rng(0)
    cells = [cell_of(M, N, dtype, perimeters, rng) for M, N in shapes for dtype in dtypes]
    return {
        "gpu": True,
        "card": "NVIDIA H200",
        "driver": "580.65",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "clock": "CUDA events",
        "protocol": {
            "samples": 50, "calls": 20, "warmup": 20, "bootstrap": 10_000, "confidence": 0.99, "band": 0.01,
            "rotation": 3, "floor_margin": 0.05, "seconds": 5.0,
        },
        "baselines": ["torch", "reference"],
        "cells": cells,
        "overall": rows.overall(cells, ["torch", "reference"]),
        "controls": summary.controls(cells),
        "slower": [],
        "compared": None,
        "limits": list(tables.LIMITS),
    }  # fmt: skip


def verify_records():
    return [
        {
            "impl": "rowwise", "execution": "interpreter", "scope": scope, "gate": "declared tolerance", "dtype": dtype,
            "case": f"{dtype}/17x{N}/spread/contiguous", "status": "failed" if N == 257 and scope == "dx" else "passed",
            "worst": 3.5 if N == 257 and scope == "dx" else 0.01 * (1 + N % 7), "detail": "", "hint": "",
            "M": 17, "N": N,
        }
        for scope in ("forward", "dx", "dgamma")
        for dtype in ("float32", "float16")
        for N in (1, 2, 3, 31, 256, 257, 1025, 4096)
    ]  # fmt: skip


def verify_summary():
    entry = {
        "impl": "rowwise",
        "execution": "interpreter",
        "scope": "dx",
        "gate": "declared tolerance",
        "dtype": "float32",
    }
    counts = {"passed": 7, "failed": 1, "refused": 0, "skipped": 0, "inconclusive": 0, "error": 0}
    worst = {"value": 3.5, "case": "float32/17x257/spread/contiguous"}
    return {
        "scopes": [entry | counts | {"cases": 8, "worst": worst}],
        "tolerances": "declared",
        "tolerances_sha256": "ab" * 32,
        "controls": "",
        "diagnoses": {"rowwise": "dx only: rstd³ term, mean(u·x) or the saved rstd"},
    }


def train_records(steps=40):
    rng = np.random.default_rng(1)
    made = []
    for optimizer in ("adam", "sgd"):
        base = np.exp(-np.arange(steps) / 15) + 0.05
        paths = {"reference": ("reference", 0.0), "rowwise": ("implementation", 2e-8), "seed-1": ("seed", 2e-2)}
        paths |= {f"twin-{i}": ("twin", 3e-8) for i in (1, 2, 3)}
        for path, (kind, apart) in paths.items():
            losses = base + apart * np.cumsum(rng.normal(0, 1, steps))
            made += [
                {"optimizer": optimizer, "path": path, "kind": kind, "step": t, "loss": float(loss)}
                for t, loss in enumerate(losses, start=1)
            ]
    return made


def train_summary():
    curve = {
        "status": "passed", "detail": "indistinguishable from one rounding for 40 of 40 steps",
        "steps": 40, "horizon": 40, "worst": 0.4, "worst_step": 12, "passed_at": None,
        "largest_difference": 2e-7, "largest_twin": 3e-7,
    }  # fmt: skip
    gradient = {"quantity": "output", "relative": 1e-7, "ratio": 1.0, "cosine": 1.0, "twin": 2e-7, "exact": 1e-7}
    return {
        "implementation": "rowwise",
        "steps": 40,
        "limits": {"loss_curve": {"twin_factor": 3.0, "floor_over_loss": 4.8e-7}},
        "test_mse": {"adam": {"reference": 0.05123, "rowwise": 0.05124}},
        "gradients": {"step 1": [gradient]},
        "curves": {"adam": curve, "sgd": curve},
        "checks": [],
    }


def exercise_summary():
    gates = ["contract", "memory", "exact class", "declared tolerance", "identities"]
    faults = [
        {
            "name": f"mistake-{i}", "pass": "forward", "naive": "caught" if i % 3 == 0 else "passes", "expected": [],
            "caught_by": gates[3 : 4 + i % 2] if i != 5 else [], "equivalent": None, "not_run": None,
            "asked": dict.fromkeys(gates, 2),
        }
        for i in range(12)
    ]  # fmt: skip
    faults.append(faults[0] | {"name": "reordered", "equivalent": "the same sum in another order", "caught_by": []})
    return {
        "matrix": {"gates": gates, "faults": faults, "execution": "interpreter"},
        "score": {"caught": 11, "of": 12, "naive": 4, "survivors": ["mistake-5"]},
    }


SUMMARIES = {
    "bench": (bench_summary, list),
    "verify": (verify_summary, verify_records),
    "train": (train_summary, train_records),
    "exercise": (exercise_summary, list),
    "gradcheck": (
        lambda: {
            "partitions": {"train": "cd" * 32},
            "checks": [
                {"impl": "reference", "status": "passed", "detail": "gradients: relative error 2e-9", "scope": "dx"}
                | {"gate": "gradcheck", "case": "3x7"}
            ],
        },
        list,
    ),
}


def made_run(folder, name, command, status="passed", summary=None, records=()):
    directory = folder / name
    directory.mkdir(parents=True)
    facts = {
        "schema": 1, "tool": "rmsnorm", "version": "0.1.0", "command": command, "argv": ["/usr/bin/rmsnorm", command],
        "status": status, "started": "2026-11-29T21:00:00.000Z", "finished": None, "seed": 0, "execution": "cuda",
        "device": {"name": "NVIDIA H200"}, "counts": {"passed": 3, "failed": 0}, "summary": summary or {},
    }  # fmt: skip
    (directory / "run.json").write_text(json.dumps(facts))
    environment = {"versions": {"torch": "2.11.0", "triton": "3.6.0"}, "driver": "580.65", "git": {"commit": "abc123"}}
    (directory / "env.json").write_text(json.dumps(environment))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """Return a function that gives a command's run directory, the report's outcome and its page, each made once."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        found, records = (made() for made in SUMMARIES[name])
        where = made_run(folder, f"20261129T210000Z-{name}", name, summary=found, records=records)
        outcome = command.report([where.name], None, folder, Console(quiet=True))
        return where, outcome, (where / "report.html").read_text(encoding="utf-8")

    return make


class Reader(HTMLParser):
    """Collects visible text without figures and style, and every address on the page."""

    def __init__(self, page):
        super().__init__()
        self.text, self.addresses, self.tags, self._skipped = [], [], [], 0
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        """Count what is skipped and keep addresses."""
        self.tags.append(tag)
        self._skipped += tag in ("svg", "style", "figcaption")
        self.addresses += [value for key, value in attributes if key in ("href", "src", "xlink:href", "action", "data")]

    def handle_endtag(self, tag):
        """Leave what is skipped."""
        self._skipped -= tag in ("svg", "style", "figcaption")

    def handle_data(self, data):
        """Keep text outside of what is skipped."""
        if not self._skipped:
            self.text.append(data)


def numbers_in(value):
    """Return all numbers and all texts of a JSON document."""
    if isinstance(value, dict):
        parts = [numbers_in(item) for pair in value.items() for item in pair]
    elif isinstance(value, list):
        parts = [numbers_in(item) for item in value]
    elif isinstance(value, str):
        return [], [value]
    else:
        return ([float(value)], []) if isinstance(value, (int, float)) else ([], [])
    return [n for part in parts for n in part[0]], [t for part in parts for t in part[1]]


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_page_needs_nothing_from_outside_and_runs_nothing(run_of, name):
    _, _, page = run_of(name)
    reader = Reader(page)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(reader.tags)
    assert all(address.startswith("#") for address in reader.addresses)
    assert not re.search(r"@import|url\((?!#)", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


STATIC = {"2", "64", "32", "256", "10", "90"}  # L2, float64, float32, sha256, p10 and p90


def invented(where, page):
    """Return the numbers of a page's text that its run's files do not hold.

    A number is known where a text of the JSON has it, or where it is a value of the JSON as it is, in µs, ms or %, or
    turned into a speed-up, rounded to the digits shown.
    """
    documents = [json.loads((where / file).read_text()) for file in ("run.json", "env.json")]
    documents += [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    numbers, texts = numbers_in(documents)
    known = {token for text in [*texts, where.name] for token in re.findall(NUMBER, text)} | STATIC
    values = np.array([abs(v) * scale for v in numbers for scale in (1, 100, 1e3, 1e6)] + [1 / v for v in numbers if v])
    found = []
    for token in re.findall(NUMBER, " ".join(Reader(page).text).replace(",", "")):
        mantissa, _, exponent = token.partition("e")
        step = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        if token not in known and np.abs(values - float(token)).min() > 0.5000001 * step:
            found.append(token)
    return found


NUMBER = r"\d+(?:\.\d+)?(?:e[-+]\d+)?"


def test_the_page_of_one_mistake_has_its_change_its_tables_and_what_was_said(tmp_path):
    """Made from what the command keeps, once through JSON as a run does."""
    tables = (Table("who notices", ("input", "y"), (("usual", "right (0.25)"),), "a <caption>"),)
    shown = kept(faults.find("not-divided"), ["a story of x < y"], tables, ["fit: it divides by `1`"])
    made_run(tmp_path, "one", "exercise", summary={"exercise": {"fault": "not-divided", "shown": shown}})
    command.report(["one"], None, tmp_path, Console(quiet=True))
    page = (tmp_path / "one" / "report.html").read_text(encoding="utf-8")
    for part in ("a story of x &lt; y", "+    mean_square = tl.sum(x * x, axis=0)\n", "<h3>who notices</h3>",
                 "right (0.25)", "a &lt;caption&gt;", "fit: it divides by <code>1</code>"):  # fmt: skip
        assert part in page


def test_a_run_of_one_mistake_by_an_earlier_version_has_a_page_that_says_so(tmp_path):
    made_run(tmp_path, "one", "exercise", summary={"exercise": {"fault": "not-divided"}})
    command.report(["one"], None, tmp_path, Console(quiet=True))
    page = (tmp_path / "one" / "report.html").read_text(encoding="utf-8")
    assert "The mistake: not-divided" in page
    assert "kept nothing to show; run it again" in page


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_number_on_the_page_stands_in_the_runs_files(run_of, name):
    where, _, page = run_of(name)
    assert invented(where, page) == []


def test_a_number_that_the_run_does_not_hold_is_noticed(run_of):
    """The check above can fail: a page that says 123.456 somewhere is caught."""
    where, _, page = run_of("bench")
    assert invented(where, page.replace("</h1>", "</h1><p>123.456 times faster</p>")) == ["123.456"]


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        (
            "bench",
            {"latency-forward-calls-loop", "latency-backward-gpu-cold", "bandwidth-forward", "bandwidth-backward"},
        ),
        ("verify", {"error-rowwise"}),
        ("train", {"loss-adam", "loss-sgd"}),
        ("exercise", {"mistakes"}),
    ],
)
def test_each_command_has_its_figures_as_svg_png_and_on_the_page(run_of, name, drawn):
    where, outcome, page = run_of(name)
    there = {path.stem for path in (where / "figures").glob("*.svg")}
    assert drawn <= there
    assert there == {path.stem for path in (where / "figures").glob("*.png")}
    assert len(outcome.summary["figures"]) == 2 * len(there)
    assert page.count("<svg ") == len(there)
    for path in (where / "figures").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_every_bench_figure_says_card_dtype_and_perimeter(run_of):
    _, _, page = run_of("bench")
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert len(captions) == 6
    for caption in captions:
        assert "NVIDIA H200" in caption
        assert "float32, float16" in caption
        assert caption.startswith(("forward,", "backward,"))


@pytest.mark.parametrize(("name", "dtypes"), [("verify", "float32, float16"), ("train", "float32")])
def test_figures_of_verify_and_train_say_dtype_and_card_too(run_of, name, dtypes):
    where, _, page = run_of(name)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert captions
    assert all("NVIDIA H200" in caption and dtypes in caption for caption in captions)
    for path in (where / "figures").glob("*.svg"):
        assert "NVIDIA H200" in path.read_text(), "the picture alone says it as well"


def test_reasons_that_differ_in_a_number_alone_are_told_once_with_all_their_places(tmp_path):
    summary = bench_summary(shapes=((8192, 5120), (8192, 8192), (16, 64)), perimeters=("forward",))
    where = made_run(tmp_path, "20261129T210000Z-bench", "bench", summary=summary)
    command.report([where.name], None, tmp_path, Console(quiet=True))
    text = "".join(Reader((where / "report.html").read_text()).text)
    assert text.count("columns: rowwise takes at most 4096, and the like") == 1
    assert "forward: 8192x5120 float32, 8192x5120 float16, 8192x8192 float32, 8192x8192 float16" in text


def test_the_ceiling_and_every_share_stand_where_their_numbers_are(run_of):
    """In the SVG the stream lies at 100 and the shapes are ordered by N, downwards."""
    where, _, _ = run_of("bench")
    words = re.findall(r">([^<>]+)</text>", (where / "figures" / "bandwidth-forward.svg").read_text())
    places = [word for word in words if "×" in word]
    assert places[:4] == ["128 × 257", "2048 × 4096", "4096 × 4096", "8192 × 5120"]
    assert "the plain stream" in words
    assert "% of the stream's speed" in [word.replace("&#39;", "'") for word in words]


def test_refused_and_failed_rows_are_shown_with_their_reasons(run_of):
    _, _, page = run_of("bench")
    text = "".join(Reader(page).text)
    assert "refused: x has 5120 columns: rowwise takes at most 4096" in text
    assert "failed: dgamma: first wrong element [3], got 1.5, want 0.75" in text
    assert "What these numbers do not show" in text
    assert all(limit.replace("`", "") in text for limit in tables.LIMITS)


def test_a_failed_width_is_marked_in_the_figure_and_listed(run_of):
    _, _, page = run_of("verify")
    assert "What did not pass" in page
    assert "dx only: rstd³ term" in page


def test_what_a_run_says_is_text_and_never_markup(tmp_path):
    summary = verify_summary() | {"diagnoses": {"<script>alert(1)</script>": "<b>&"}}
    where = made_run(tmp_path, "20261129T210000Z-verify", "verify", summary=summary)
    command.report([where.name], None, tmp_path, Console(quiet=True))
    page = (where / "report.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&#x27;s failures: &lt;b&gt;&amp;" in page


def test_inline_figures_take_the_pages_ink_and_have_ids_of_their_own(run_of):
    _, _, page = run_of("bench")
    assert "#010203" not in page
    assert "currentColor" in page
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_several_runs_make_one_page_in_the_folder_that_is_named(tmp_path):
    names = []
    for kind in ("verify", "train"):
        summary, records = (made() for made in SUMMARIES[kind])
        names.append(made_run(tmp_path, f"20261129T210000Z-{kind}", kind, summary=summary, records=records).name)
    with pytest.raises(ConfigError, match="--output"):
        command.report(names, None, tmp_path, Console(quiet=True))
    outcome = command.report(names, tmp_path / "page", tmp_path, Console(quiet=True))
    page = (tmp_path / "page" / "report.html").read_text()
    assert [f"#{name}" for name in names] == Reader(page).addresses[:2]
    assert len(list((tmp_path / "page" / "figures").glob("*.png"))) == 3
    assert outcome.summary["runs"] == names
    assert not (tmp_path / names[0] / "report.html").exists()


def test_a_page_without_figures_finds_its_new_folder(tmp_path):
    summary, _ = (made() for made in SUMMARIES["gradcheck"])
    name = made_run(tmp_path, "20261129T210000Z-gradcheck", "gradcheck", summary=summary).name
    command.report([name], tmp_path / "new" / "page", tmp_path, Console(quiet=True))
    assert "relative error 2e-9" in (tmp_path / "new" / "page" / "report.html").read_text()


def test_a_run_without_results_has_a_page_that_says_how_it_ended(tmp_path):
    made_run(tmp_path, "20261129T210000Z-bench", "bench", status="error")
    command.report(["20261129T210000Z-bench"], None, tmp_path, Console(quiet=True))
    page = (tmp_path / "20261129T210000Z-bench" / "report.html").read_text()
    assert "The run ended as error and holds no results." in page


def test_what_has_no_page_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="is no run directory"):
        command.report(["nowhere"], None, tmp_path, Console(quiet=True))
    made_run(tmp_path, "20261129T210000Z-verify", "verify", status="running")
    with pytest.raises(ConfigError, match="not finished"):
        command.report(["20261129T210000Z-verify"], None, tmp_path, Console(quiet=True))


def test_the_page_of_one_run_is_the_same_when_it_is_made_again(run_of):
    where, _, page = run_of("verify")
    command.report([where.name], None, where.parent, Console(quiet=True))
    assert (where / "report.html").read_text() == page


def test_names_of_cases_break_behind_a_slash_and_markup_stays_whole():
    made = html.table(Table("t", ("seen",), (("failed: float32/7x258 </td>",),)))
    assert "float32/<wbr>7x258 &lt;/<wbr>td&gt;</td>" in made
    assert "</<wbr>" not in made
