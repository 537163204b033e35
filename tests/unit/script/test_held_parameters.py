"""Parameters that a script holds when a strategy divides them."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from samestep.errors import RunError
from samestep.script.held_parameters import HeldParameters


def replaced(module: nn.Module) -> dict[str, Any]:
    """Give a module other parameters, as a strategy does; return them by name."""
    held = HeldParameters(module)
    for part in module.modules():
        for name, one in part._parameters.items():
            if one is not None:
                part._parameters[name] = nn.Parameter(one.detach().clone(), requires_grad=one.requires_grad)
    held.replace()
    return dict(module.named_parameters())


def test_containers_objects_and_closures_have_the_new_parameters() -> None:
    module = nn.Linear(2, 3)
    weight = module.weight
    by_name = {"w": weight}
    listed = [weight, 1]
    queue = deque([weight])
    group = {weight}
    holder = SimpleNamespace(weight=weight)

    def closure() -> torch.Tensor:
        return kept

    kept = module.weight
    new = replaced(module)["weight"]
    held = [by_name["w"], listed[0], queue[0], *group, holder.weight, closure()]
    assert all(one is new for one in held)
    assert listed[1] == 1


def test_optimizer_keeps_its_state_in_order() -> None:
    module = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [state["exp_avg"] for state in optimizer.state.values()]
    new = replaced(module)
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, new.values()))
    assert list(map(id, optimizer.state)) == list(map(id, new.values()))
    assert [state["exp_avg"] for state in optimizer.state.values()] == before


@pytest.mark.parametrize(
    "hold",
    [
        lambda module: module.weight,
        lambda module: (module.weight,)[0],
        lambda module: module.weight.detach(),
        lambda module: module.state_dict()["weight"],
    ],
)
def test_use_of_a_former_parameter_is_an_error(hold: Callable[[nn.Module], torch.Tensor]) -> None:
    module = nn.Linear(2, 3)
    former = hold(module)
    replaced(module)
    with pytest.raises(RunError) as raised:
        former.sum()
    assert raised.value.code == "E_INCOMPATIBLE"


def test_copies_stay() -> None:
    module = nn.Linear(2, 3)
    copied = module.weight.detach().clone()
    new = replaced(module)["weight"]
    assert torch.equal(copied, new)
