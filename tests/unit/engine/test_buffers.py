"""Buffers changed by a training forward: averaging, restoring, and training modes."""

import pytest
import torch
from torch import nn

from samestep.engine.buffers import MicrobatchBuffers
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
    buffers = MicrobatchBuffers(Counter())
    assert buffers.length == 3
    assert buffers.read().tolist() == [0, 0, 0]


def test_read_returns_the_written_vector() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), Counter())
    buffers = MicrobatchBuffers(model)
    vector = torch.arange(float(buffers.length), dtype=torch.float64)
    buffers.write(vector)
    assert torch.equal(buffers.read(), vector)
    assert model[0].running_mean.tolist() == [0, 1]
    assert model[0].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("count", [1, 7, 12345, 2**40 + 1])
def test_equal_counters_have_an_exact_mean(count: int) -> None:
    model = Counter()
    buffers = MicrobatchBuffers(model)
    for microbatches in range(1, 65):
        one = torch.tensor([0.5, 0.25, count], dtype=torch.float64)
        buffers.write(sum([one] * microbatches) / microbatches)
        assert (model.mean.tolist(), int(model.counter)) == ([0.5, 0.25], count)


def test_restore_sets_the_values_at_the_beginning_of_the_step() -> None:
    model = nn.BatchNorm1d(3)
    buffers = MicrobatchBuffers(model)
    model(torch.randn(4, 3))
    before = buffers.read()
    buffers.begin()
    model(torch.randn(4, 3))
    assert not torch.equal(buffers.read(), before)
    buffers.restore()
    assert torch.equal(buffers.read(), before)


def test_replaced_buffer_is_read_and_restored() -> None:
    model = Counter()
    buffers = MicrobatchBuffers(model)
    buffers.begin()
    model.mean = torch.ones(2)
    assert buffers.read().tolist() == [1, 1, 0]
    buffers.restore()
    assert model.mean.tolist() == [0, 0]


def test_shared_module_is_counted_once() -> None:
    norm = nn.BatchNorm1d(2)
    assert MicrobatchBuffers(nn.Sequential(norm, norm)).length == 5


def test_model_without_buffers_has_an_empty_vector() -> None:
    buffers = MicrobatchBuffers(nn.Linear(2, 2))
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
