"""Buffers end a step as the mean over shards of what each shard made of what the step began with."""

import pytest
import torch
from torch import nn

from samestep.engine.buffers import ShardedBuffers, set_modes, training_modes


class Counter(nn.Module):
    """Buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("phase", torch.tensor(1 + 2j))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        self.register_buffer("absent", None)


def test_floating_buffers_and_counters_are_averaged_and_nothing_else() -> None:
    buffers = ShardedBuffers(Counter())
    assert buffers.length == 3
    assert buffers.read().tolist() == [0, 0, 0]


def test_a_written_vector_is_read_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), Counter())
    buffers = ShardedBuffers(model)
    vector = torch.arange(float(buffers.length), dtype=torch.float64)
    buffers.write(vector)
    assert torch.equal(buffers.read(), vector)
    assert model[0].running_mean.tolist() == [0, 1]
    assert model[0].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("count", [1, 7, 12345, 2**40 + 1])
def test_counters_that_agree_keep_their_value(count: int) -> None:
    model = Counter()
    buffers = ShardedBuffers(model)
    for shards in range(1, 65):
        one = torch.tensor([0.5, 0.25, count], dtype=torch.float64)
        buffers.write(sum([one] * shards) / shards)
        assert (model.mean.tolist(), int(model.seen)) == ([0.5, 0.25], count)


def test_restoring_gives_back_what_the_step_began_with() -> None:
    model = nn.BatchNorm1d(3)
    buffers = ShardedBuffers(model)
    model(torch.randn(4, 3))
    before = buffers.read()
    buffers.begin()
    model(torch.randn(4, 3))
    assert not torch.equal(buffers.read(), before)
    buffers.restore()
    assert torch.equal(buffers.read(), before)


def test_a_buffer_that_a_module_puts_in_anew_is_followed() -> None:
    model = Counter()
    buffers = ShardedBuffers(model)
    buffers.begin()
    model.mean = torch.ones(2)
    assert buffers.read().tolist() == [1, 1, 0]
    buffers.restore()
    assert model.mean.tolist() == [0, 0]


def test_a_module_that_is_used_twice_is_averaged_once() -> None:
    norm = nn.BatchNorm1d(2)
    assert ShardedBuffers(nn.Sequential(norm, norm)).length == 5


def test_a_model_without_buffers_has_an_empty_vector() -> None:
    buffers = ShardedBuffers(nn.Linear(2, 2))
    buffers.begin()
    buffers.restore()
    buffers.write(buffers.read())
    assert (buffers.length, buffers.read().shape) == (0, (0,))


def test_every_module_is_set_to_training() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.BatchNorm1d(2, affine=False)).eval()
    set_modes(training_modes(model))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm2d])
def test_a_frozen_norm_keeps_its_statistics(norm: type[nn.Module]) -> None:
    frozen = norm(2, affine=True).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Dropout())
    set_modes(training_modes(model))
    assert not frozen.training
    assert model[1].training


def test_a_norm_that_is_frozen_in_part_is_trained() -> None:
    norm = nn.BatchNorm1d(2)
    norm.weight.requires_grad_(False)
    set_modes(training_modes(norm))
    assert norm.training
