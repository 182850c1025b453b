"""Resume: a run that was stopped anywhere and continued equals the uninterrupted one bit for bit."""

import copy
import json
import shutil
import signal
import time

import pytest
import torch

from rmsnorm_cli import checkpoint, network
from rmsnorm_cli.checkpoint import CheckpointError
from rmsnorm_cli.errors import EnvironmentProblem, Interrupted
from rmsnorm_cli.rundir import interrupts
from rmsnorm_cli.training import loop

STOPS = [  # phase and the step that did not happen: before the first save, between saves, at a border, in each kind
    ("adam/reference", 1),
    ("adam/reference", 7),
    ("adam/right", 5),
    ("adam/twin-1", 8),
    ("adam/seed-1", 2),
    ("sgd/right", 12),
    ("sgd/twin-1", 11),
]


@pytest.fixture
def as_whole(whole, left, differing):
    """Return what says where a run directory differs from the uninterrupted one's."""
    return lambda directory: differing(left(directory), left(whole[0]))


@pytest.mark.case("B73")
@pytest.mark.parametrize(("key", "step"), STOPS, ids=lambda value: str(value))
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(trainer, as_whole, whole, key, step):
    """Weights, optimizers, orders, generators, histories, counters, records and verdicts: every bit."""
    directory = trainer.killed(key, step)
    outcome = trainer.resume(directory)
    assert as_whole(directory) is None
    assert outcome.summary == whole[1].summary
    assert outcome.status == "passed"


def test_a_run_that_is_killed_again_and_again_still_equals_an_uninterrupted_one(trainer, as_whole):
    directory = trainer.killed(*STOPS[0])
    for key, step in STOPS[1:]:
        trainer.killed_again(directory, key, step)
    trainer.resume(directory)
    assert as_whole(directory) is None


def test_a_higher_checkpoint_of_another_run_is_neither_continued_nor_judged(trainer, whole):
    """A stale file outranks every save by its number; the verdict is about what this run saved."""
    directory = trainer.killed("adam/right", 7)
    content = checkpoint.newest(directory / "checkpoints").state
    checkpoint.save(directory / "checkpoints", 9000, content | {"data": {"train": "another"}}, keep=9)
    (directory / "checkpoints" / "step-00009001.pt").mkdir()
    outcome = trainer.resume(directory)
    assert outcome.summary == whole[1].summary
    assert outcome.status == "passed"


@pytest.mark.parametrize("phases", [None, {"adam/right": [1]}, {"adam/right": {}}], ids=str)
def test_a_sound_file_with_a_strange_inside_is_refused_by_name(trainer, phases):
    directory = trainer.killed("adam/right", 7)
    content = checkpoint.newest(directory / "checkpoints").state | {"phases": phases}
    for path in checkpoint.listing(directory / "checkpoints"):
        path.unlink()
    checkpoint.save(directory / "checkpoints", 5, content, keep=9)
    with pytest.raises(CheckpointError, match="is refused: its content is not what this tool saves"):
        trainer.resume(directory)


def test_more_steps_continue_every_phase(trainer, left, differing):
    """12 steps, then 12 more in the same directory, equal 24 in one go, across the borders of epochs of 40 examples."""
    directory, _ = trainer.start()
    trainer.resume(directory, steps=24)
    long, _ = trainer.start(train__steps=24)
    extended, straight = left(directory), left(long)
    assert differing(extended["phases"], straight["phases"]) is None
    assert extended["step"] == straight["step"] == 24 * 8


def test_a_finished_run_is_judged_again_and_not_taught(trainer, whole, monkeypatch):
    def teach(training):
        raise AssertionError("a finished phase was taught")

    directory = shutil.copytree(whole[0], trainer.folder / whole[0].name)
    monkeypatch.setattr(loop.Training, "advance", teach)
    assert trainer.resume(directory).summary == whole[1].summary


# --- what is left out shows -------------------------------------------------------------------------------------------

PARTS = [
    ("adam/reference", "model"),
    ("adam/reference", "optimizer"),
    ("sgd/reference", "optimizer"),
    ("adam/reference", "step"),
    ("adam/reference", "order/generator"),
    ("adam/reference", "order/permutation"),
    ("adam/reference", "order/position"),
    ("adam/reference", "history"),
    ("adam/reference", "landmarks"),
    ("adam/twin-1", "twin"),
    ("adam/drawing", "ranks/0/torch"),
    ("adam/drawing", "ranks/0/counted"),
]
FEW = {"train__seed_noise_runs": 0, "train__twins": 1}


@pytest.fixture(scope="module")
def drawn():
    """Hold what uninterrupted runs through the norm that draws leave, by optimizer."""
    return {}


@pytest.mark.case("B73")
@pytest.mark.parametrize(("key", "part"), [("adam/drawing", None), *PARTS], ids=str)
def test_leaving_out_any_part_of_the_state_shows(trainer, left, differing, norms, drawn, key, part):
    """A part as a fresh phase has it, in place of the saved one, makes another run; nothing replaced makes the same."""
    norm, optimizer = norms["drawing"], key.partition("/")[0]
    few = FEW | {"train__optimizers": [optimizer]}
    if optimizer not in drawn:
        drawn[optimizer] = left(trainer.start(norm, **few)[0])
    fresh = {}
    with trainer.at(key, 1, lambda training: fresh.update(copy.deepcopy(training.state()))):
        directory = trainer.killed(key, 11, norm, **few)  # after the save at step 8, in the second epoch
    found = checkpoint.newest(directory / "checkpoints")
    if part:
        put(found.state["phases"][key], fresh, part)
        checkpoint.save(directory / "checkpoints", found.step, found.state, keep=3)
    try:
        trainer.resume(directory, norm)
    except CheckpointError as refusal:  # some parts contradict each other, which is noticed at once
        place = str(refusal)
    else:
        place = differing(left(directory), drawn[optimizer])
    assert (place is not None) == (part is not None), place


def put(state, fresh, part):
    """Replace one part of a state, named by its path, by the fresh one."""
    *above, last = (int(name) if name.isdecimal() else name for name in part.split("/"))
    for name in above:
        state, fresh = state[name], fresh[name]
    state[last] = fresh[last]


# --- the log of metrics -----------------------------------------------------------------------------------------------


def steps_of(directory, key):
    optimizer, path = key.split("/")
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [r["step"] for r in records if (r["optimizer"], r["path"]) == (optimizer, path)]


@pytest.mark.case("B80")
def test_records_after_the_checkpoint_are_replaced_and_none_before_is_lost(trainer):
    """Each step is logged, saved at 4 and 8, killed at 11, resumed to 12: each step once and in order."""
    directory = trainer.killed("adam/reference", 11)
    assert steps_of(directory, "adam/reference") == list(range(1, 11))
    trainer.resume(directory)
    assert steps_of(directory, "adam/reference") == list(range(1, 13))
    assert steps_of(directory, "sgd/seed-1") == list(range(1, 13))


@pytest.mark.case("B80")
def test_a_last_record_that_a_kill_cut_in_half_is_made_whole(trainer, whole):
    directory = trainer.killed("adam/right", 7)
    with open(directory / "metrics.jsonl", "ab") as file:
        file.write(b'{"optimizer": "adam", "path": "ri')
    trainer.resume(directory)
    assert (directory / "metrics.jsonl").read_text() == (whole[0] / "metrics.jsonl").read_text()


@pytest.mark.case("B80")
def test_records_that_never_reached_the_disk_are_written_again_from_the_checkpoint(trainer, whole):
    directory = trainer.killed("adam/right", 7)
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:2]))
    trainer.resume(directory)
    assert (directory / "metrics.jsonl").read_text() == (whole[0] / "metrics.jsonl").read_text()


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def attentive():
    """Listen to both signals, which a shell may have made us ignore (a background job), and give them back."""
    before = [signal.signal(number, act) for number, act in ATTENTIVE]
    yield
    for (number, _), act in zip(ATTENTIVE, before, strict=True):
        signal.signal(number, act)


ATTENTIVE = ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))


@pytest.mark.case("B77")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_a_signal_lets_the_step_end_saves_and_says_which(trainer, left, as_whole, number, code):
    """Step 3 is whole and saved although checkpoints come every 4 steps; the run continues to the same bits."""
    with trainer.signalled("adam/right", 3, number), pytest.raises(Interrupted) as stopped:
        trainer.start()
    assert stopped.value.exit_code == code
    assert f"{number.name}: stopped and saved after step 3 of adam/right" in str(stopped.value)
    assert f"--resume {trainer.newest}" in str(stopped.value)
    facts = json.loads((trainer.newest / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("interrupted", code)
    assert left(trainer.newest)["phases"]["adam/right"]["step"] == 3
    trainer.resume(trainer.newest)
    assert as_whole(trainer.newest) is None


@pytest.mark.case("B77")
def test_a_second_signal_stops_at_once_and_the_newest_checkpoint_stands(trainer, left):
    def twice(training):
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.1 * interrupts.MOMENT)  # sooner it is one request with the first
        signal.raise_signal(signal.SIGTERM)

    with trainer.at("adam/reference", 7, twice), pytest.raises(Interrupted, match="second signal") as stopped:
        trainer.start()
    assert stopped.value.exit_code == 143
    assert left(trainer.newest)["phases"]["adam/reference"]["step"] == 4


def test_the_second_signal_within_moments_is_torchruns_echo_of_the_first(trainer, left, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")

    def twice(training):
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.1 * interrupts.MOMENT)
        signal.raise_signal(signal.SIGINT)

    with trainer.at("adam/reference", 7, twice), pytest.raises(Interrupted, match="after step 7 of adam/reference"):
        trainer.start()
    assert left(trainer.newest)["phases"]["adam/reference"]["step"] == 7


@pytest.mark.case("B77")
def test_a_signal_while_a_phase_is_judged_is_heeded_after_it(trainer, left, monkeypatch):
    def judge(training):
        signal.raise_signal(signal.SIGTERM)
        return 0.0

    monkeypatch.setattr(loop.Training, "test_error", judge)
    with pytest.raises(Interrupted, match="after the last step of adam/reference"):
        trainer.start()
    assert "errors" in left(trainer.newest)["phases"]["adam/reference"]


def test_handlers_are_given_back(trainer):
    trainer.killed("adam/reference", 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- what cannot be continued -----------------------------------------------------------------------------------------


def test_a_run_killed_before_its_first_save_starts_over(trainer, as_whole, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", lambda *arguments, **options: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            trainer.start()
    trainer.resume(trainer.newest)
    assert as_whole(trainer.newest) is None


def test_a_torn_newest_checkpoint_is_named_and_the_one_before_continues(trainer, as_whole, capsys):
    directory = trainer.killed("adam/right", 11)
    torn = checkpoint.listing(directory / "checkpoints")[-1]
    torn.write_bytes(torn.read_bytes()[:5000])
    trainer.resume(directory)
    assert f"{torn} is refused: it is cut short" in capsys.readouterr().err
    assert torn.name in (directory / "log.txt").read_text()
    assert as_whole(directory) is None


def test_a_run_whose_checkpoints_are_all_torn_is_refused(trainer):
    directory = trainer.killed("adam/right", 11)
    for path in checkpoint.listing(directory / "checkpoints"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cut short"):
        trainer.resume(directory)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("lr", {"adam": 0.5, "sgd": 0.5}, "train.lr was"),
        ("width", 9, "train.width was 33 and is 9"),
        ("batch", 4, "train.batch was 8 and is 4"),
    ],
)
def test_nothing_but_the_steps_may_differ(trainer, key, value, said):
    from rmsnorm_cli.config.models import Lr

    directory = trainer.killed("adam/right", 11)
    with pytest.raises(CheckpointError, match=said):
        trainer.resume(directory, **{key: Lr(**value) if key == "lr" else value})


def test_other_examples_are_noticed_by_their_hashes(trainer, monkeypatch):
    """The same settings, and a teacher that a newer version of the tool might have."""
    directory = trainer.killed("adam/right", 11)
    monkeypatch.setattr(network, "TEACHER_SEED", 21)
    with pytest.raises(CheckpointError, match="made from other examples"):
        trainer.resume(directory)


def test_another_implementation_cannot_take_over(trainer, norms):
    directory = trainer.killed("adam/right", 11)
    with pytest.raises(CheckpointError, match="implementation was 'right' and is 'dgamma-twice'"):
        trainer.resume(directory, norms["dgamma-twice"])


@pytest.mark.case("B79")
def test_a_stale_checkpoint_of_another_run_is_passed_over(trainer, as_whole):
    """Copied in with a higher number, it is named and neither continued nor counted."""
    other, _ = trainer.start(run__seed=6)
    directory = trainer.killed("adam/right", 11)
    stale = checkpoint.listing(other / "checkpoints")[-1]
    (directory / "checkpoints" / stale.name).write_bytes(stale.read_bytes())
    trainer.resume(directory)
    assert "belongs to another run (seed was 6 and is 5)" in (directory / "log.txt").read_text()
    assert as_whole(directory) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda phase: phase.pop("optimizer"),
        lambda phase: phase["model"].pop("norm.weight"),
        lambda phase: phase.update(order={}),
        lambda phase: phase.update(ranks=[]),
        lambda phase: phase["model"].update({"first.weight": torch.ones(2, 2)}),
    ],
    ids=["no optimizer", "no gamma", "no order", "no rank", "other shape"],
)
def test_a_sound_file_with_a_state_that_does_not_fit_is_refused(trainer, spoil):
    directory = trainer.killed("adam/right", 11)
    found = checkpoint.newest(directory / "checkpoints")
    spoil(found.state["phases"]["adam/right"])
    checkpoint.save(directory / "checkpoints", found.step, found.state, keep=3)
    with pytest.raises(CheckpointError, match="adam/right does not fit"):
        trainer.resume(directory)


@pytest.mark.case("B74")
def test_a_save_that_fails_ends_the_run_plainly_and_the_earlier_one_continues(trainer, as_whole, monkeypatch):
    write = checkpoint.atomic.write

    def refuse(path, content):
        if path.suffix != ".pt":
            return write(path, content)
        raise EnvironmentProblem(f"no space is left to write {path}")

    with monkeypatch.context() as patched:
        fills = trainer.at("adam/right", 7, lambda training: patched.setattr(checkpoint.atomic, "write", refuse))
        with fills, pytest.raises(EnvironmentProblem, match="step 20 was not saved: no space is left"):
            trainer.start()
    trainer.resume(trainer.newest)
    assert as_whole(trainer.newest) is None
