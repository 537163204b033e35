"""Buffers changed by a training forward: averaging, restoring, and training modes."""

import pytest
import torch
from torch import nn

import samestep
from helpers.batches import batch_of, random_data
from samestep.engine.buffers import AveragedBuffers
from samestep.errors import InputError
from samestep.recipes.parameter_groups import set_training_mode


class Counter(nn.Module):
    """A module with one buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("counter", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("phase", torch.tensor(1 + 2j))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        self.register_buffer("absent", None)


def test_only_floating_point_buffers_and_counters_are_averaged() -> None:
    buffers = AveragedBuffers(Counter())
    assert buffers.length == 3
    assert buffers.read().tolist() == [0, 0, 0]


def test_read_returns_the_written_vector() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), Counter())
    buffers = AveragedBuffers(model)
    vector = torch.arange(float(buffers.length), dtype=torch.float64)
    buffers.write(vector)
    assert torch.equal(buffers.read(), vector)
    assert model[0].running_mean.tolist() == [0, 1]
    assert model[0].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("count", [1, 7, 12345, 2**40 + 1])
def test_equal_counters_have_an_exact_mean(count: int) -> None:
    model = Counter()
    buffers = AveragedBuffers(model)
    for microbatches in range(1, 65):
        one = torch.tensor([0.5, 0.25, count], dtype=torch.float64)
        buffers.write(sum([one] * microbatches) / microbatches)
        assert (model.mean.tolist(), int(model.counter)) == ([0.5, 0.25], count)


def test_restore_sets_the_values_at_the_beginning_of_the_step() -> None:
    model = nn.BatchNorm1d(3)
    buffers = AveragedBuffers(model)
    model(torch.randn(4, 3))
    before = buffers.read()
    buffers.begin()
    model(torch.randn(4, 3))
    assert not torch.equal(buffers.read(), before)
    buffers.restore()
    assert torch.equal(buffers.read(), before)


def test_replaced_buffer_is_read_and_restored() -> None:
    model = Counter()
    buffers = AveragedBuffers(model)
    buffers.begin()
    model.mean = torch.ones(2)
    assert buffers.read().tolist() == [1, 1, 0]
    buffers.restore()
    assert model.mean.tolist() == [0, 0]


def test_shared_module_is_counted_once() -> None:
    norm = nn.BatchNorm1d(2)
    assert AveragedBuffers(nn.Sequential(norm, norm)).length == 5


def test_model_without_buffers_has_an_empty_vector() -> None:
    buffers = AveragedBuffers(nn.Linear(2, 2))
    buffers.begin()
    buffers.restore()
    buffers.write(buffers.read())
    assert (buffers.length, buffers.read().shape) == (0, (0,))


def test_training_mode_of_a_recipe_is_set_in_every_module() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.BatchNorm1d(2, affine=False)).eval()
    set_training_mode(model)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm2d])
def test_frozen_norm_layer_of_a_recipe_is_in_evaluation_mode(norm: type[nn.Module]) -> None:
    frozen = norm(2, affine=True).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Dropout())
    set_training_mode(model)
    assert not frozen.training
    assert model[1].training


def test_partly_frozen_norm_layer_is_in_training_mode() -> None:
    norm = nn.BatchNorm1d(2)
    norm.weight.requires_grad_(False)
    set_training_mode(norm)
    assert norm.training


class Table(nn.Module):
    """Writes a buffer of `size` elements from the second step on, in place or by `.data`."""

    def __init__(self, size: int, *, by_data: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(size))
        self.out, self.by_data, self.writes = nn.Linear(6, 4), by_data, False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.writes:
            table = self.table.data if self.by_data else self.table
            table[:6] += inputs.detach().mean(0)
        outputs: torch.Tensor = self.out(inputs)
        return outputs


def train_table(world: samestep.World, model: Table, steps: int = 3) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world)
    inputs, targets = random_data(12)
    for step in range(steps):
        model.writes = step > 0
        engine.step(batch_of(world, inputs.float() + step, targets, 4))
    return model.table[:6]


def test_large_buffer_that_changes_after_the_first_step_has_its_mean(alone: samestep.World) -> None:
    """Large buffers are found by their versions, small ones are always compared."""
    small, large = (train_table(alone, Table(size)) for size in (6, 100_000))
    assert torch.equal(small, large)
    assert small.abs().sum() > 0
    assert torch.equal(small, train_table(alone, Table(6, by_data=True)))


def test_large_buffer_that_changes_without_a_new_version_is_refused(alone: samestep.World) -> None:
    model = Table(100_000, by_data=True)
    with pytest.raises(InputError, match="buffer table without a new version") as error:
        train_table(alone, model)
    assert error.value.code == "E_BUFFER"
    assert not model.table.any(), "restored"
