"""The pieces of training: the order of examples, the twin, the counting, the verdicts on curves and gradients."""

import io
import math

import pytest
import torch

from rmsnorm_cli import kernels
from rmsnorm_cli.kernels import reference
from rmsnorm_cli.network import generator
from rmsnorm_cli.training import curves
from rmsnorm_cli.training.compare import Difference
from rmsnorm_cli.training.counting import LAYER, Counted, adding
from rmsnorm_cli.training.loop import Order, is_landmark
from rmsnorm_cli.training.plan import phases
from rmsnorm_cli.training.ranks import Ranks
from rmsnorm_cli.training.twin import Twin

# --- order ------------------------------------------------------------------------------------------------------------


def test_every_example_comes_once_an_epoch_whatever_the_batch():
    order = Order(10, generator(0, "order"))
    taken = torch.cat([order.take(7) for _ in range(10)]).tolist()
    epochs = [taken[start : start + 10] for start in range(0, 70, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1], "each epoch has a permutation of its own"


def test_a_batch_larger_than_the_examples_takes_them_again():
    taken = Order(3, generator(0, "order")).take(7).tolist()
    assert sorted(taken[:3]) == sorted(taken[3:6]) == [0, 1, 2]


def test_a_restored_order_goes_on_in_the_middle_of_an_epoch():
    order = Order(10, generator(0, "order"))
    order.take(13)
    saved = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in order.state().items()}
    expected = [order.take(4).tolist() for _ in range(6)]
    other = Order(10, generator(1, "order"))
    other.restore(saved)
    assert [other.take(4).tolist() for _ in range(6)] == expected


def test_landmarks_thin_out():
    assert [step for step in range(1001) if is_landmark(step)] == [0, 10, 20, 50, 100, 200, 500, 1000]


# --- twin -------------------------------------------------------------------------------------------------------------


def twin(seed=0, rows=64):
    made = Twin(reference.forward, generator(seed, "twin"))
    made.rows, made.share = rows, slice(None)
    return made


def test_a_twin_moves_every_element_by_exactly_one_rounding_in_both_directions():
    x, gamma = torch.randn(64, 33, generator=generator(0, "x")), torch.ones(33)
    y, moved = reference.forward(x, gamma, 1e-6), twin()(x, gamma, 1e-6)
    up, down = (torch.nextafter(y, torch.tensor(s * torch.inf)) for s in (1.0, -1.0))
    assert bool(((moved == up) | (moved == down)).all())
    assert 0.45 < float((moved == up).double().mean()) < 0.55


def test_a_twin_lets_the_gradient_pass_unchanged():
    x = torch.randn(64, 33, generator=generator(0, "x"))
    dy = torch.randn(64, 33, generator=generator(0, "dy"))
    found = []
    for call in (reference.forward, twin()):
        leaf, gamma = x.clone().requires_grad_(), torch.ones(33, requires_grad=True)
        call(leaf, gamma, 1e-6).backward(dy)
        found.append((leaf.grad, gamma.grad))
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_two_processes_perturb_a_batch_as_one_does():
    x, gamma = torch.randn(7, 33, generator=generator(0, "x")), torch.ones(33)
    whole = twin(rows=7)(x, gamma, 1e-6)
    parts = []
    for rank in range(2):
        part = twin(rows=7)
        part.share = Ranks(rank, 2).share(7)
        parts.append(part(x[part.share], gamma, 1e-6))
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("rows", "world"), [(32, 2), (7, 3), (1, 2), (2, 8)])
def test_shares_cover_a_batch_once_and_rank_0_has_rows(rows, world):
    shares = [list(range(rows))[Ranks(rank, world).share(rows)] for rank in range(world)]
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert shares[0]


# --- counting ---------------------------------------------------------------------------------------------------------


def test_only_what_runs_in_the_block_is_counted():
    norm = Counted(kernels.implementation("reference").call)
    total = {}

    def once(**options):
        x = torch.randn(3, 5, requires_grad=True)
        y = norm(x, torch.ones(5), 1e-6)
        if options.get("backward", True):
            y.sum().backward()

    once()
    for _ in range(3):
        with adding(total, norm):
            once()
    with adding(total, norm):
        once(backward=False)
    with torch.no_grad():
        once(backward=False)
    assert total == {"reference": {"forward": 4, "backward": 3}, LAYER: {"forward": 4, "backward": 3}}


class Loaded(torch.autograd.Function):
    """Doubles x, with an output that came out of a file, as that of a norm in another process does."""

    @staticmethod
    def forward(ctx, x):
        """Return 2x, saved and loaded."""
        file = io.BytesIO()
        torch.save(2.0 * x.detach(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    @staticmethod
    def backward(ctx, dy):
        """Return 2dy."""
        return 2.0 * dy


def test_the_backward_of_a_norm_in_another_process_is_counted():
    """The hooks of a tensor that torch.load has made are never called."""
    norm = Counted(lambda x, gamma, eps: Loaded.apply(x))
    x = torch.ones(2, 3, requires_grad=True)
    norm(x, torch.ones(3), 1e-6).sum().backward()
    assert dict(norm.calls) == {"forward": 1, "backward": 1}
    assert x.grad.tolist() == [[2.0] * 3] * 2


# --- loss curves ------------------------------------------------------------------------------------------------------


def losses(ours, twins=1e-8, steps=50, seeds=(0.5, 0.6), final=0.55):
    """Return curves of a loss of 1: `ours` and `twins` are differences, one number or one for each step."""
    base = torch.ones(steps, dtype=torch.float64)
    return curves.Losses(
        reference=base,
        implementation=base + ours,
        twins=torch.stack([base + twins, base - twins]),
        test={"reference": 0.55, "implementation": final},
        twin_tests=[0.55 + 1e-9],
        seed_tests=seeds,
    )


def test_three_twins_and_four_roundings_are_the_limit():
    limit = 3 * 1e-6 + 2.0**-21
    assert curves.judged(losses(0.99 * limit, 1e-6), 3.0).status == "passed"
    over = curves.judged(losses(1.01 * limit, 1e-6), 3.0)
    assert over.status == "failed"
    assert over.worst == pytest.approx(1.01)
    assert over.passed_at == 1


def test_a_tightened_factor_is_tighter():
    assert curves.judged(losses(2.5e-6, 1e-6), 1.0).status == "failed"


def test_the_envelope_never_narrows_again():
    """The twins may cross the reference: where they once were, the implementation may be too."""
    twins = torch.zeros(50, dtype=torch.float64)
    twins[9] = 1e-5
    assert curves.judged(losses(torch.where(torch.arange(50) >= 9, 2.9e-5, 0.0), twins), 3.0).status == "passed"
    early = curves.judged(losses(torch.where(torch.arange(50) >= 8, 2.9e-5, 0.0), twins), 3.0)
    assert (early.status, early.passed_at) == ("failed", 9)


@pytest.mark.parametrize("wrong", [math.nan, math.inf], ids=str)
def test_a_loss_that_is_no_number_fails(wrong):
    ours = torch.zeros(50, dtype=torch.float64)
    ours[30] = wrong
    found = curves.judged(losses(ours), 3.0)
    assert (found.status, found.passed_at) == ("failed", 31)


def test_beyond_the_horizon_the_curve_is_not_held_against_the_twins_but_the_final_error_against_the_seeds():
    """One rounding grows past 1 % of the seeds' deviation at step 21: what follows may part, if it ends among them."""
    grown = torch.where(torch.arange(50) >= 20, 0.1, 1e-8).double()
    parted = torch.where(torch.arange(50) >= 20, 0.9, 1e-8).double()
    among = curves.judged(losses(parted, grown), 3.0)
    assert (among.status, among.horizon) == ("passed", 20)
    assert "20 of 50 steps" in among.detail
    assert curves.judged(losses(parted, grown, final=1.9), 3.0).status == "failed"
    assert "nothing is said of the rest" in curves.judged(losses(parted, grown, seeds=()), 3.0).detail


def test_a_horizon_after_a_few_steps_is_no_verdict():
    grown = torch.where(torch.arange(50) >= 5, 0.1, 1e-8).double()
    found = curves.judged(losses(1e-8, grown), 3.0)
    assert (found.status, found.horizon) == ("inconclusive", 5)
    assert curves.judged(losses(math.nan, math.nan), 3.0).status == "inconclusive"


@pytest.mark.parametrize(("final", "status"), [(0.55 + 2e-7, "passed"), (0.55 + 1e-6, "failed"), (math.nan, "failed")])
def test_the_test_error_is_held_against_the_twins(final, status):
    held = losses(1e-8, final=final)
    assert curves.test_error(held, curves.judged(held, 3.0), 3.0)[0] == status


# --- gradients --------------------------------------------------------------------------------------------------------


def difference(**values):
    right = {"relative": 1e-7, "ratio": 1.0, "cosine": 1.0, "twin": 1e-7, "exact": 1e-7, "reference_exact": 1e-7}
    return Difference("norm.weight", **right | values)


@pytest.mark.parametrize(
    ("values", "measure"),
    [
        ({"relative": 1.5e-6}, "relative error"),
        ({"ratio": 1.00012}, "norm ratio"),
        ({"ratio": 0.99988}, "norm ratio"),
        ({"cosine": 1 - 2e-6}, "cosine"),
        ({"exact": 5e-7}, "distance from float64"),
        ({"relative": math.nan}, "relative error"),
        ({"cosine": math.nan}, "cosine"),
    ],
    ids=str,
)
def test_each_measure_has_a_limit_of_its_own(values, measure):
    over = [name for name, share in difference(**values).measures.items() if not share <= 1.0]
    assert over == [measure]
    assert all(share <= 1.0 for share in difference().measures.values())


def test_nothing_is_asked_below_the_noise_of_the_reference_itself():
    assert all(share <= 1.0 for share in difference(relative=1e-2, exact=2e-2, reference_exact=1e-2).measures.values())


# --- plan -------------------------------------------------------------------------------------------------------------


def test_the_phases_of_a_run(trainer):
    settings = trainer.settings(train__twins=1, train__optimizers=["sgd"])
    assert [phase.key for phase in phases(settings, "fused")] == [
        "sgd/reference",
        "sgd/fused",
        "sgd/twin-1",
        "sgd/seed-1",
    ]
    assert phases(settings, "reference")[1].key == "sgd/reference-again"
