"""Slices in one process: sums in tree order, gradients, divided tensors and their errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from samestep.distributed.world import Session, World
from samestep.errors import InputError
from samestep.strategies.tensor_slices import SlicedTensor, Slicing, checked_forward, divide, join
from samestep.view.crossings import enter, leave

SLICES = 3


@pytest.fixture
def world() -> World:
    return World(0, 1, torch.device("cpu"), Session.local())


@pytest.fixture
def slicing(world: World) -> Slicing:
    return Slicing(SLICES, world)


@pytest.fixture
def divided(slicing: Slicing) -> SlicedTensor:
    return SlicedTensor(slicing.divide(torch.randn(4, 6), -1), slicing)


def test_sums_are_in_tree_order(slicing: Slicing) -> None:
    first, second, third = (torch.tensor([value]) for value in (1.0, 2.0**-24, 2.0**-24))
    assert float(leave([first, second, third], slicing)) == 1.0 + 2.0**-23
    assert float(first + second + third) == 1.0


def test_the_four_functions_have_exact_gradients(slicing: Slicing) -> None:
    full = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 6, dtype=torch.float64)
    (join(divide(full, slicing), slicing) * weights).sum().backward()
    assert torch.equal(full.grad, weights)  # type: ignore[arg-type]
    full.grad = None
    (leave(enter(full, slicing, SLICES), slicing) * weights).sum().backward()
    assert torch.equal(full.grad, (weights + weights) + weights)  # type: ignore[arg-type]
    assert not any(part.requires_grad for part in enter(full.detach(), slicing, SLICES))


@pytest.mark.parametrize(
    "function",
    [
        functional.gelu,
        functional.relu,
        nn.ReLU(inplace=True),
        nn.SiLU(),
        lambda x: 0.5 * x * (1.0 + torch.tanh(x + 0.1 * torch.pow(x, 3.0))),
        lambda x: (2 - x / 3).abs().clamp(min=0.5),
        lambda x: x * torch.tensor(2.0),
        lambda x: x.to(torch.bfloat16),
        lambda x: functional.dropout(x, 0.5, training=True),
        lambda x: functional.dropout(x, 0.5, training=False),
    ],
)
def test_elementwise_functions_are_those_of_the_full_tensor(
    divided: SlicedTensor, function: Callable[[Any], Any]
) -> None:
    full = divided.join()
    torch.manual_seed(0)
    result = function(divided)
    torch.manual_seed(0)
    expected = function(full)
    assert isinstance(result, SlicedTensor)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result.join(), expected)


def test_plain_operands_are_divided(slicing: Slicing) -> None:
    full = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    other = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    product = SlicedTensor(divide(full, slicing), slicing) * other
    product.view(2, 2, 6).join().sum().backward()
    assert torch.equal(full.grad, other.detach())  # type: ignore[arg-type]
    assert torch.equal(other.grad, full.detach())  # type: ignore[arg-type]


def test_function_modes_see_methods_as_those_of_tensors(divided: SlicedTensor) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Mode():
        assert divided.size(-1) == 6
        assert isinstance(2 * divided, SlicedTensor)
        assert divided.view(2, 2, 6).parts[0].shape == (2, 2, 2)
    seen = [function for function in seen if function.__name__ != "__get__"]
    assert seen == [torch.Tensor.size, torch.Tensor.mul, torch.Tensor.view]
    assert {torch.Tensor.size}.issuperset(seen[:1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(),
        lambda x: x.view(2, 12),
        lambda x: x @ torch.ones(6, 2),
        lambda x: x + torch.ones(6),
        lambda x: x > 0,
        lambda x: x == 0,
        lambda x: x[0],
        lambda x: x.grad_fn,
        lambda x: x.mean(dim=1),
        lambda x: torch.cat([x, x]),
        lambda x: functional.softmax(x, dim=1),
        lambda x: functional.layer_norm(x, (6,)),
        torch.rand_like,
        lambda x: checked_forward(lambda: {"outputs": [x]}),
    ],
)
def test_other_functions_are_errors(divided: SlicedTensor, function: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError) as error:
        function(divided)
    assert error.value.code == "E_STRATEGY"
