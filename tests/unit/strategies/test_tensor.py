"""Divided weights in one process: a divided call has the results and the operations of a whole one."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from helpers import tensor_models
from samestep.distributed.world import Session, World
from samestep.errors import InputError
from samestep.strategies.tensor import TensorParallel
from samestep.strategies.tensor_slices import Slicing
from samestep.view.operations import Operations

SLOW = [name for name in tensor_models.MODELS if name not in ("layers", "gpt")]
SLICES = {"timm vit": 3, "torchvision vit": 1}


@pytest.fixture
def world() -> World:
    return World(0, 1, torch.device("cpu"), Session.local())


def first_rows(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = [sample[0] for sample in tensor_models.data_of(name)[:5]]
    if isinstance(inputs[0], dict):
        return (), {key: torch.stack([row[key] for row in inputs]) for key in inputs[0]}
    return (torch.stack(inputs),), {}


def computed(model: nn.Module, name: str) -> tuple[torch.Tensor, Operations]:
    arguments, options = first_rows(name)
    torch.manual_seed(3)
    with Operations() as operations:
        result = model.forward(*arguments, **options)
    return getattr(result, "logits", result), operations


@pytest.mark.parametrize("name", ["layers", "gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_divided_products_are_those_of_the_whole_model(name: str, world: World) -> None:
    model = tensor_models.model_of(name)
    sliced = copy.deepcopy(model)
    tensor = TensorParallel(sliced, Slicing(SLICES.get(name, 2), world), tensor_models.plan_of(name))
    result, operations = computed(model, name)
    with tensor.divided_weights():
        divided, seen = computed(sliced, name)
    torch.testing.assert_close(divided, result, rtol=0, atol=1e-12)
    assert seen.functions == operations.functions
    assert seen.draws == operations.draws
    assert seen.numbers == operations.numbers
    result.square().sum().backward()
    divided.square().sum().backward()
    for one, other in zip(model.parameters(), sliced.parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None
        else:
            torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=1e-12)
    assert list(sliced.state_dict()) == list(model.state_dict())
    assert all("forward" not in vars(part) for part in sliced.modules())


def test_other_uses_of_a_divided_weight_are_errors(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    tensor = TensorParallel(model, Slicing(2, world), {"0": "column_gathered"})
    with tensor.divided_weights():
        weight: Any = model[0]._parameters["weight"]
        assert weight.shape == (4, 4)
        with pytest.raises(InputError, match=r"sum of 0\.weight"):
            weight.sum()
        with pytest.raises(InputError, match=r"add of 0\.weight"):
            torch.add(weight, 1)
    assert isinstance(model[0].weight, nn.Parameter)


@pytest.mark.parametrize(
    "kinds", [("column", "row"), ("column", "column_gathered"), ("column_gathered", "row"), ("row", "column_gathered")]
)
def test_each_kind_has_the_gradients_of_the_whole_model(world: World, kinds: tuple[str, str]) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)).double()
    plain = copy.deepcopy(model)
    inputs = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    plain(inputs).square().sum().backward()
    expected, inputs.grad = inputs.grad, None
    tensor = TensorParallel(model, Slicing(3, world), dict(zip(("0", "2"), kinds, strict=True)))
    with tensor.divided_weights():
        result = model(inputs)
    result.square().sum().backward()
    torch.testing.assert_close(inputs.grad, expected)
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)
