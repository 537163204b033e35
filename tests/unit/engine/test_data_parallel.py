"""A replica shares the weights of a model and has separate gradients and buffers."""

import pytest
import torch
from torch import nn

from helpers.models import Normed, Tokens, seeded
from samestep.engine.data_parallel import replicate, require_untouched
from samestep.errors import InputError


class Listing(nn.Module):
    """A module that stores a layer in a list, which `named_modules` does not search."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.hidden = [self.layer]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](inputs)


def test_replica_shares_weights_but_not_gradients_and_buffers() -> None:
    model = seeded(0, Normed)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    replica = replicate(model)
    replica.module(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(alias.grad is not None for alias in replica.parameters.values())
    assert all(alias.data_ptr() == parameter.data_ptr() for parameter, alias in replica.parameters.items())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert not torch.equal(replica.module[1].running_mean, model[1].running_mean)


def test_structure_names_and_modes_are_equal() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.ModuleDict({"tokens": Tokens(), "one": norm, "two": norm, "none": nn.Linear(2, 2, bias=False)})
    model.eval()
    replica = replicate(model)
    copy = replica.module
    assert copy["tokens"].out.weight is copy["tokens"].embed.weight
    assert copy["one"] is copy["two"]
    assert copy["one"].running_mean is not norm.running_mean
    assert copy["none"].bias is None
    assert [name for name, _ in copy.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in copy.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert not any(module.training for module in copy.modules())


def test_frozen_parameters_are_frozen_in_the_replica() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    replica = replicate(model)
    assert [alias.requires_grad for alias in replica.module.parameters()] == [True, False]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_use_the_weights_of_the_replica(kind: type[nn.Module]) -> None:
    model = kind(3, 4)
    replica = replicate(model)
    replica.module(torch.randn(5, 2, 3))[0].sum().backward()
    require_untouched(list(model.parameters()))
    assert all(alias.grad is not None for alias in replica.parameters.values())


def test_parametrized_weights_are_replicated() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    replica = replicate(model)
    replica.module(torch.randn(3, 2)).sum().backward()
    require_untouched(list(model.parameters()))
    assert all(alias.grad is not None for alias in replica.parameters.values())


def test_module_in_a_list_is_refused() -> None:
    model = Listing()
    replica = replicate(model)
    replica.module(torch.randn(3, 2)).sum().backward()
    with pytest.raises(InputError) as error:
        require_untouched(list(model.parameters()))
    assert error.value.code == "E_INCOMPATIBLE"


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_are_refused(hook: str) -> None:
    model = nn.Linear(2, 2)
    getattr(model.bias, hook)(lambda gradient: None)
    with pytest.raises(InputError, match="'bias'") as error:
        replicate(model)
    assert error.value.code == "E_PARAMETER"
