"""A replica shares a model's weights, and has gradients and buffers of its own."""

import pytest
import torch
from torch import nn

from models import Normed, Tokens, seeded
from samestep.engine.replica import replicate, require_untouched
from samestep.errors import InputError


class Listing(nn.Module):
    """Holds one of its layers in a place where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.hidden = [self.layer]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](inputs)


def test_gradients_and_buffers_are_its_own_and_weights_are_shared() -> None:
    model = seeded(0, Normed)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    replica = replicate(model)
    replica.module(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(alias.grad is not None for alias in replica.parameters.values())
    assert all(alias.data_ptr() == parameter.data_ptr() for parameter, alias in replica.parameters.items())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert not torch.equal(replica.module[1].running_mean, model[1].running_mean)


def test_structure_is_kept() -> None:
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


def test_frozen_parameters_stay_frozen() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    replica = replicate(model)
    assert [alias.requires_grad for alias in replica.module.parameters()] == [True, False]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_use_the_replicas_weights(kind: type[nn.Module]) -> None:
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


def test_a_module_that_is_reached_in_another_way_is_noticed() -> None:
    model = Listing()
    replica = replicate(model)
    replica.module(torch.randn(3, 2)).sum().backward()
    with pytest.raises(InputError, match="reached the model's own parameters"):
        require_untouched(list(model.parameters()))


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_are_refused(hook: str) -> None:
    model = nn.Linear(2, 2)
    getattr(model.bias, hook)(lambda found: None)
    with pytest.raises(InputError, match="the parameter 'bias' has hooks"):
        replicate(model)
