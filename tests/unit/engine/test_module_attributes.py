"""Attributes of modules: microbatches start with the values of the step, and the last one decides."""

import pytest
import torch
from torch import nn

from samestep import World
from samestep.engine.module_attributes import ModuleAttributes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.mask, self.calls, self.cache = torch.zeros(2), torch.ones(2), 0, None


@pytest.fixture
def layer() -> Layer:
    return Layer()


def first_step(attributes: ModuleAttributes, layer: Layer, world: World) -> None:
    attributes.begin()
    layer.mean = layer.mean + 1
    layer.mask = torch.ones(2)
    assert list(attributes.read(None, is_last=True)) == []
    attributes.combine(world, [], may_grow=False)
    attributes.commit()


def test_microbatches_start_with_the_values_of_the_step(layer: Layer) -> None:
    attributes = ModuleAttributes(layer)
    attributes.begin()
    mean, layer.mean, layer.cache = layer.mean, torch.ones(2), torch.ones(3)
    list(attributes.read(None, is_last=False))
    attributes.restore()
    assert layer.mean is mean
    assert layer.cache is None
    layer.added = torch.ones(1)
    mean.add_(5)
    list(attributes.read(None, is_last=True))
    attributes.restore()
    assert not hasattr(layer, "added")
    assert mean.tolist() == [0.0, 0.0]


def test_last_microbatch_decides(layer: Layer, alone: World) -> None:
    attributes = ModuleAttributes(layer)
    attributes.begin()
    for number in (1.0, 2.0):
        attributes.restore()
        layer.mean = layer.mean + number
        list(attributes.read(None, is_last=number == 2.0))
    layer.mean = torch.full((2,), 9.0)  # of a filler
    attributes.combine(alone, [], may_grow=False)
    attributes.commit()
    assert layer.mean.tolist() == [2.0, 2.0]


def test_activations_are_left_alone(layer: Layer, alone: World) -> None:
    attributes = ModuleAttributes(layer)
    attributes.begin()
    layer.cache = torch.ones(2, requires_grad=True) * 2
    list(attributes.read(None, is_last=True))
    attributes.combine(alone, [], may_grow=False)
    attributes.commit()
    assert layer.cache.grad_fn is not None


def test_attribute_that_changes_later_is_handled_from_then_on(layer: Layer, alone: World) -> None:
    attributes = ModuleAttributes(layer)
    first_step(attributes, layer, alone)
    attributes.begin()
    layer.mask = torch.zeros(2)  # every forward computes it again
    list(attributes.read(None, is_last=False))
    assert not attributes.has_changed_late
    attributes.restore()
    layer.calls = 3
    list(attributes.read(None, is_last=True))
    assert attributes.has_changed_late
    attributes.restore()
    assert layer.calls == 0
    attributes.combine(alone, [], may_grow=True)
    attributes.commit()
    assert layer.calls == 3


def test_late_write_in_place_and_that_of_a_replica_are_problems(layer: Layer, alone: World) -> None:
    attributes = ModuleAttributes(layer)
    first_step(attributes, layer, alone)
    attributes.begin()
    layer.mean.add_(1)
    assert list(attributes.read(None, is_last=False)) == []
    attributes.restore()
    replica = layer._replicate_for_data_parallel()
    replica.mean.add_(1)
    assert list(attributes.read(replica, is_last=False)) == ["attribute mean in place"]
