"""Slots of parameters and buffers."""

import weakref
from collections import deque, namedtuple

import pytest
import torch
from torch import nn

from samestep.view.module_tensors import ModuleState, ParameterSlots, replaced

Pair = namedtuple("Pair", ["left", "right"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.names = {"head": [self.head.weight]}
        self.pair = Pair(self.head.weight, 3)
        self.hidden = [nn.Linear(2, 2)]
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x) * self.scale)


def test_all_slots_of_a_tied_parameter_are_filled_and_restored() -> None:
    module = Tied()
    weight = module.embedding.weight
    other = nn.Parameter(torch.zeros(5, 3))
    with replaced(ParameterSlots(module).entries({weight: other})):
        assert module.embedding.weight is other
        assert module.head.weight is other
        assert module.names["head"][0] is other
        assert module.pair == Pair(other, 3)
    assert module.embedding.weight is module.head.weight is module.names["head"][0] is module.pair.left is weight


def test_buffers_have_slots() -> None:
    module = Tied()
    scale = module.scale
    with replaced(ParameterSlots(module).entries({scale: torch.full((3,), 2.0)})):
        assert module.scale.tolist() == [2.0] * 3
    assert module.scale is scale


def test_other_tensors_have_slots_on_request() -> None:
    module = Tied()
    hidden = module.hidden[0].weight
    assert not any(tensor is hidden for tensor in ParameterSlots(module).tensors)
    assert any(tensor is hidden for tensor in ParameterSlots(module, attributes=True).tensors)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_flat_weights_of_recurrent_layers_are_replaced_with_their_references(kind: type[nn.LSTM | nn.GRU]) -> None:
    module = kind(3, 4, num_layers=2)
    flat = module._flat_weights
    slots = ParameterSlots(module)
    mapping = {tensor: nn.Parameter(torch.zeros_like(tensor)) for tensor in slots.tensors}
    with replaced(slots.entries(mapping)):
        output, _ = module(torch.randn(5, 2, 3))
        assert module._flat_weights is flat  # not built again
        assert not output.any()
    assert all(weight is parameter for weight, parameter in zip(flat, module.parameters(), strict=True))
    assert all(reference() is weight for reference, weight in zip(module._flat_weight_refs, flat, strict=True))


def test_a_tensor_assigned_in_the_block_stays() -> None:
    module = Tied()
    new = torch.zeros(3)
    with replaced(ParameterSlots(module).entries({module.scale: torch.ones(3)})):
        module.scale = new
        del module.names["head"][0]
    assert module.scale is new


def test_slots_are_restored_after_an_exception() -> None:
    module = Tied()
    weight = module.head.weight
    with pytest.raises(KeyError), replaced(ParameterSlots(module).entries({weight: nn.Parameter(torch.zeros(5, 3))})):
        raise KeyError
    assert module.head.weight is weight


def test_state_restores_attributes_and_containers() -> None:
    module = Tied()
    module.history = [1, 2]
    module.seen = {1}
    module.recent = deque([1], maxlen=2)
    module.nested = {"a": {"b": [3]}}
    history, order = module.history, list(module.__dict__)
    state = ModuleState(module)
    module.history.append(3)
    module.seen.add(2)
    module.recent.append(2)
    module.nested["a"]["b"].clear()
    module.hidden[0].extra = 1
    module.embedding.count = 7
    module.eval()
    del module.names
    module.history = []
    state.restore()
    assert module.history is history
    assert (history, module.seen, list(module.recent), module.nested) == ([1, 2], {1}, [1], {"a": {"b": [3]}})
    assert module.training
    assert not hasattr(module.embedding, "count")
    assert not hasattr(module.hidden[0], "extra")
    assert list(module.__dict__) == order


def test_state_with_hooks_removes_hooks() -> None:
    module = nn.Linear(2, 2)
    state = ModuleState(module, hooks=True)
    module.register_forward_hook(lambda *_: None)
    state.restore()
    assert not module._forward_hooks


def test_a_container_in_itself_is_no_problem() -> None:
    module = nn.Linear(2, 2)
    module.loop = [module]
    module.loop.append(module.loop)
    module.reference = weakref.ref(module)
    state = ModuleState(module)
    module.loop.pop()
    state.restore()
    assert len(module.loop) == 2
