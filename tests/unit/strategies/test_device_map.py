"""Device map: devices of the modules of a model, and inputs that follow them; `meta` stands for a second device."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from samestep.config import StrategyConfig
from samestep.distributed.world import Session, World
from samestep.errors import InputError
from samestep.strategies import device_map
from samestep.strategies.device_map import apply_device_map

DEVICES = (torch.device("cpu"), torch.device("meta"))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x) * scale)


def applied(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **place: int) -> nn.Module:
    strategy = StrategyConfig(name="device_map", place=place)
    world = World(0, 1, DEVICES[0], Session.local(), strategy=strategy)
    monkeypatch.setattr(device_map, "rank_devices", lambda *arguments: DEVICES)
    apply_device_map(model, world)
    return model


def devices_of(model: nn.Module) -> dict[str, str]:
    return {name: value.device.type for name, value in model.state_dict().items()}


def test_the_last_pattern_that_matches_a_module_or_an_ancestor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    model = applied(Pair(), monkeypatch, **{"*": 0, "head": 1})
    devices = devices_of(model)
    assert {name for name, device in devices.items() if device == "meta"} == {"head.weight", "head.bias"}
    result = model(torch.randn(3, 4), scale=torch.ones(1))
    assert (result.device.type, result.shape) == ("meta", (3, 2))
    assert devices_of(applied(Pair(), monkeypatch, **{"body": 1, "head": 1, "body.1": 0}))["body.1.weight"] == "cpu"


def sharing() -> nn.Module:
    model = nn.Sequential(OrderedDict(one=nn.Linear(2, 2), two=nn.Linear(2, 2)))
    model.two.weight = model.one.weight
    return model


@pytest.mark.parametrize(
    ("model", "place"),
    [
        (Pair(), {"tail": 0}),  # matches no module
        (Pair(), {"body": 2}),  # a device that is not there
        (Pair(), {"body": 0}),  # no device for the head
        (Pair(), {}),
        (sharing(), {"one": 0, "two": 1}),
    ],
)
def test_maps_that_do_not_fit_are_errors(
    model: nn.Module, place: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError) as error:
        applied(model, monkeypatch, **place)
    assert error.value.code == "E_STRATEGY"


def test_random_numbers_continue_from_device_to_device(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    drawn = {first: 0, second: 0}  # in place of states

    class Accelerator:
        get_rng_state = staticmethod(drawn.__getitem__)

        @staticmethod
        def set_rng_state(state: int, device: torch.device) -> None:
            drawn[device] = state

    monkeypatch.setattr(device_map, "accelerator_module", lambda: Accelerator)
    mover = device_map._Mover(first)
    layer = torch.nn.Identity()
    for number in range(3):
        for device in (first, second):
            mover.move(device, layer, (), {})
            drawn[device] += 1
        mover.end(layer, (), None)
        drawn[first] += 1  # the script draws between two forwards
        assert drawn[first] == 3 * (number + 1)
