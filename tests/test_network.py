"""The small network and its examples: drawn from a seed alone, learnable, and blind to what else the process does."""

import torch

from rmsnorm_cli.config import Data
from rmsnorm_cli.kernels import implementation
from rmsnorm_cli.network import (
    PARTITIONS,
    Network,
    Partition,
    generator,
    initial_state,
    mean_squared_error,
    partitions,
    teacher,
)

SMALL = Data(inputs=5, outputs=3, train=40, validation=20, test=20)
REFERENCE = implementation("reference")


def small_state(seed: int = 1, width: int = 7) -> dict[str, torch.Tensor]:
    return initial_state(seed, inputs=5, width=width, outputs=3)


def test_a_seed_means_the_same_examples_whatever_the_process_did_before():
    first = partitions(3, SMALL)
    torch.manual_seed(99)
    torch.rand(7)
    again = partitions(3, SMALL)
    assert {name: part.sha256 for name, part in first.items()} == {name: part.sha256 for name, part in again.items()}
    assert list(first) == list(PARTITIONS)


def test_another_seed_means_other_examples_in_every_partition():
    one, two = partitions(3, SMALL), partitions(4, SMALL)
    assert all(one[name].sha256 != two[name].sha256 for name in PARTITIONS)


def test_the_three_partitions_share_no_example():
    made = partitions(0, SMALL)
    rows = {tuple(row) for part in made.values() for row in part.inputs.tolist()}
    assert len(rows) == 40 + 20 + 20


def test_the_size_of_one_partition_leaves_the_others_as_they_are():
    wider = partitions(0, SMALL.model_copy(update={"train": 50}))
    assert wider["test"].sha256 == partitions(0, SMALL)["test"].sha256


def test_the_hash_sees_one_changed_bit_a_shape_and_an_order():
    part = partitions(0, SMALL)["test"]
    changed = part.targets.clone()
    changed[0, 0] = torch.nextafter(changed[0, 0], torch.tensor(torch.inf))
    others = [
        Partition(part.inputs, changed),
        Partition(part.inputs.reshape(10, 10), part.targets),
        part.rows(torch.arange(19, -1, -1)),
    ]
    assert len({part.sha256, *(other.sha256 for other in others)}) == 4


def test_targets_are_the_teacher_of_the_direction_plus_the_stated_noise():
    """Rows differ 100-fold in scale, and the teacher does not see it."""
    part = partitions(0, Data(train=4000, noise=0.05))["train"]
    noise = part.targets.double() - teacher(part.inputs.double(), part.targets.shape[1])
    assert 0.048 < float(noise.std()) < 0.052
    assert abs(float(noise.mean())) < 0.003
    scale = part.inputs.square().mean(-1).sqrt()
    assert float(scale.max() / scale.min()) > 100


def test_streams_of_one_seed_are_independent_and_repeat():
    draws = {name: torch.rand(4, generator=generator(5, name)).tolist() for name in ("a", "b")}
    assert draws["a"] != draws["b"]
    assert draws["a"] == torch.rand(4, generator=generator(5, "a")).tolist()


def test_gamma_starts_where_mistakes_show():
    gamma = initial_state(0, inputs=16, width=4096, outputs=4)["norm.weight"]
    assert 0.19 < float(gamma.std()) < 0.21
    assert abs(float(gamma.mean()) - 1.0) < 0.02
    assert gamma.dtype == torch.float32


def test_the_network_is_linear_norm_silu_linear():
    """Against the formula, written out in float64."""
    state = {name: tensor.double() for name, tensor in small_state().items()}
    network = Network(state, REFERENCE, 1e-3, dtype=torch.float64)
    x = partitions(0, SMALL)["test"].inputs.double()
    hidden = x @ state["first.weight"].T + state["first.bias"]
    normal = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-3).sqrt() * state["norm.weight"]
    expected = (normal * torch.sigmoid(normal)) @ state["last.weight"].T + state["last.bias"]
    assert float((network(x) - expected).detach().abs().max()) < 1e-14


def test_the_state_dict_exchanges_strictly_with_torch_nn_modules():
    network = Network(small_state(), REFERENCE, 1e-6)
    theirs = torch.nn.Module()
    theirs.first, theirs.norm, theirs.last = torch.nn.Linear(5, 7), torch.nn.RMSNorm(7), torch.nn.Linear(7, 3)
    theirs.load_state_dict(network.state_dict(), strict=True)
    network.load_state_dict(theirs.state_dict(), strict=True)
    assert list(network.state_dict()) == list(small_state())


def test_building_a_network_leaves_the_generators_alone():
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    Network(small_state(), REFERENCE, 1e-6)
    assert torch.rand(3).tolist() == expected


def test_the_mean_squared_error_is_a_mean_over_rows_and_outputs():
    """Predictions that are off by 3 in one of two outputs: (9 + 0) / 2, and no gradient is kept."""
    network = Network(small_state(), REFERENCE, 1e-6)
    x = partitions(0, SMALL)["test"].inputs
    with torch.no_grad():
        targets = network(x).clone()
    targets[:, 0] += 3.0
    assert abs(mean_squared_error(network, Partition(x, targets)) - 3.0) < 1e-5
    assert all(parameter.grad is None for parameter in network.parameters())
