"""The catalogue is what it says: mistakes that apply to today's source, told fully, shown by inputs `verify` asks."""

import ast
import dataclasses
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rmsnorm_cli import config, faults, gates
from rmsnorm_cli.errors import ConfigError
from rmsnorm_cli.faults import CATALOGUE, Change, FaultNotApplicable, apply
from rmsnorm_cli.faults.fault import BUDGET, DECLARED, FIT, KERNELS, MEMORY, STAGES
from rmsnorm_cli.kernels import implementation
from rmsnorm_cli.kernels.tables import backward_table

MISTAKES = [fault for fault in CATALOGUE if not fault.equivalent]
EQUIVALENT = [fault for fault in CATALOGUE if fault.equivalent]


def by_name(fault):
    return fault.name


def verify_settings() -> config.Settings:
    settings = config.load("exercise")
    return dataclasses.replace(settings, command="verify", table=config.Verify())


def test_there_are_at_least_forty_mistakes_in_every_pass():
    passes = Counter(fault.stage for fault in MISTAKES)
    assert len(MISTAKES) >= 40
    assert set(passes) == set(STAGES)
    assert min(passes.values()) >= 5


def test_both_kernels_have_mistakes_of_their_own():
    """Those of `fused` spread over its files; one that shows on a GPU alone, or not there, says why."""
    of = {kernel: [fault for fault in MISTAKES if fault.kernel == kernel] for kernel in KERNELS}
    assert len(of["rowwise"]) >= 80
    assert len(of["fused"]) >= 12 + 6
    assert len({fault.file for fault in of["fused"]}) >= 8
    assert not [fault.name for fault in CATALOGUE if fault.cuda_only and fault.interpreter_only]
    assert all(fault.cuda_only for fault in of["fused"] if fault.file == "split.py")


def test_names_are_words_and_no_two_are_equal():
    names = [fault.name for fault in CATALOGUE]
    assert len(set(names)) == len(names)
    assert not [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)]


@pytest.mark.parametrize("fault", CATALOGUE, ids=by_name)
def test_a_mistake_is_told_in_sentences_with_its_gate_and_its_sightings(fault):
    assert 2 <= len(re.findall(r"\.\)?(?: |$)", fault.story)) <= 4, "two sentences, or a few"
    assert not [sighting for sighting in fault.seen if not re.fullmatch(r"[\w.-]+/[\w.-]+ #\d+", sighting)]
    if fault.equivalent:
        assert not fault.expected
        assert len(fault.equivalent) > 40, "an equivalent change is argued, not only named"
    else:
        assert fault.expected, "a mistake says which gate must catch it"


def test_every_expected_gate_exists():
    named = {gate for fault in CATALOGUE for gate in fault.expected}
    assert named <= {gate.NAME for gate in gates.GATES} | {BUDGET, FIT}


@pytest.mark.parametrize("fault", CATALOGUE, ids=by_name)
def test_a_mistake_applies_to_the_source_as_it_is_today(fault):
    """If this fails the kernel has changed: write the expression of the mistake anew."""
    before = apply.original(fault)
    after = fault.applied(before)
    assert after != before
    ast.parse(after)
    changed = [line for line in apply.diff(fault).splitlines() if re.match(r"[+-](?![+-])", line)]
    assert 1 <= len(changed) <= 20, "a mistake is a small change"


def test_a_source_that_has_moved_on_is_refused_with_the_mistake_s_name():
    fault = faults.find("divide-by-block")
    source = apply.original(fault)
    for broken in (source.replace("/ N", "/N"), source + source):
        with pytest.raises(FaultNotApplicable, match=r"divide-by-block: rowwise\.py holds .* times, expected 1"):
            fault.applied(broken)


def test_several_changes_of_one_mistake_are_all_made():
    fault = dataclasses.replace(MISTAKES[0], changes=(Change("a", "b", times=2), Change("c", "d")))
    assert fault.applied("a a c") == "b b d"
    with pytest.raises(FaultNotApplicable):
        fault.applied("a a")


@pytest.mark.usefixtures("without_gpu")
def test_inputs_that_show_a_mistake_are_among_those_that_verify_asks():
    """Otherwise the score would speak for inputs that nobody's kernel is ever asked."""
    asked = {
        kernel: gates.declared.plan(verify_settings(), implementation(kernel), "interpreter") for kernel in KERNELS
    }
    shown = [f for f in MISTAKES if {DECLARED, BUDGET} & set(f.expected) and not f.cuda_only]
    shown = [f for f in shown if f.kernel == "fused" or f.exposing.layout == "contiguous"]
    assert len(shown) > 70
    assert not [(f.name, f.exposing.id) for f in shown if f.exposing not in asked[f.kernel]]


@pytest.mark.usefixtures("without_gpu")
def test_inputs_that_show_a_mistake_to_the_memory_gate_alone_are_among_its_own():
    asked = gates.memory.plan(verify_settings(), implementation("fused"), "interpreter")
    shown = [f for f in MISTAKES if f.kernel == "fused" and MEMORY in f.expected and DECLARED not in f.expected]
    assert len(shown) >= 3
    written_short = {
        "second-tile-at-zero",
        "last-rows-not-launched",
    }  # any width in two tiles, any odd batch shows them
    assert {f.name for f in shown if f.exposing not in asked} == written_short


def test_inputs_that_show_a_mistake_on_a_gpu_are_asked_there(monkeypatch):
    """Rows enough for many programs, wide rows that go round a ring, vectors off alignment, offsets past 2^31."""
    monkeypatch.setattr(gates.declared, "_rows_by_processors", lambda: (131, 132, 133))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (gates.declared.FAR_BYTES + 1, 2**40))
    asked = gates.declared.plan(verify_settings(), implementation("fused"), "cuda")
    shown = [f.on("cuda") for f in MISTAKES if f.kernel == "fused" and (f.cuda_only or f.on_gpu)]
    assert len(shown) >= 7 + 2
    assert {f.name for f in shown if f.exposing.M > 256} == {"second-tile-not-accumulated", "rstd-of-program"}
    assert all(f.on("interpreter") is f for f in MISTAKES)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**30, 2**40))
    assert not [
        case
        for case in gates.declared.plan(verify_settings(), implementation("fused"), "cuda")
        if case.layout == "far_rows"
    ]
    assert not [(f.name, f.exposing.id) for f in shown if f.exposing not in asked]


@pytest.mark.parametrize(
    ("name", "path", "tiles"), [("second-tile-not-accumulated", "walk", 2), ("rstd-of-program", "reload", 1)]
)
def test_rows_that_show_a_mistake_on_a_gpu_are_more_than_one_step_of_its_programs(name, path, tiles):
    """Of 160 SMs, more than any card has today: a program walks a second step, by the table that is in force."""
    case = faults.find(name).on("cuda").exposing
    launch = backward_table(case.N, 4, ring=True)
    assert -(-case.M // launch.rows) > 160 * launch.per_sm
    assert (launch.path, 1 + (launch.B > 0)) == (path, tiles)


@pytest.mark.usefixtures("without_gpu")
def test_a_row_that_is_alone_is_asked_for_where_the_batch_chooses_the_path():
    fault = faults.find("path-by-batch")
    for execution in ("interpreter", "cuda"):
        asked = gates.determinism.plan(verify_settings(), implementation("fused"), execution)
        assert fault.on(execution).exposing in [question.case for question in asked]


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean divide-by-block"):
        faults.find("divide-by-blocks")


def test_source_and_diff_are_written_and_the_source_is_imported_from_there(tmp_path: Path):
    fault = faults.find("divide-by-block")
    impl = faults.implementation(fault.name, tmp_path)
    folder = tmp_path / "faults" / fault.name
    assert impl.name == fault.name
    assert sorted(path.name for path in folder.iterdir()) == ["change.diff", "rowwise.py"]
    assert "/ BLOCK" in (folder / "rowwise.py").read_text()
    assert "+    mean_square = tl.sum(x * x, axis=0) / BLOCK" in (folder / "change.diff").read_text()
    module = apply.load(fault, tmp_path)
    assert Path(module.__file__) == folder / "rowwise.py"
    assert module.__name__ != apply.load(fault, tmp_path).__name__, "a second import starts afresh"


def test_the_catalogue_can_be_listed_without_torch():
    code = (
        "from rmsnorm_cli.commands import exercise; from rmsnorm_cli import config; import sys;"
        "outcome = exercise.listing(config.load('exercise'));"
        "assert 'divide-by-block' in [row[0] for row in outcome.tables[0].rows];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
