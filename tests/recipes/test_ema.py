"""Moving average of the weights: values of torch's, and evaluation in its place."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from samestep.errors import InputError
from samestep.recipes.driver import AveragedWeights

DECAY = 0.8


def test_average_equals_that_of_torch() -> None:
    """The decay increases during the first steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    averaged = AveragedWeights(dict(model.named_parameters()), DECAY)
    decays = iter([2 / 11, 3 / 12, 4 / 13, 5 / 14])

    def move(average: list[torch.Tensor], weights: list[torch.Tensor], count: int) -> None:
        get_ema_multi_avg_fn(next(decays))(average, weights, count)

    reference = AveragedModel(model, multi_avg_fn=move)
    reference.update_parameters(model)  # its first update is a copy
    for step in range(1, 5):
        with torch.no_grad():
            model.weight.add_(0.1 * step)
        averaged.update(step)
        reference.update_parameters(model)
    expected = dict(reference.module.named_parameters())
    assert averaged.tensors.keys() == expected.keys()
    for name, average in averaged.tensors.items():
        assert torch.equal(average, expected[name]), name
    assert not torch.equal(averaged.tensors["weight"], model.weight)


def test_later_steps_use_the_configured_decay() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    averaged = AveragedWeights(dict(model.named_parameters()), DECAY)
    before = averaged.tensors["weight"].clone()
    with torch.no_grad():
        model.weight.fill_(5.0)
    averaged.update(1000)
    assert torch.allclose(averaged.tensors["weight"], DECAY * before + (1 - DECAY) * 5)


def test_the_average_is_in_place_for_a_block_alone() -> None:
    model = torch.nn.Linear(2, 1)
    averaged = AveragedWeights(dict(model.named_parameters()), DECAY)
    with torch.no_grad():
        model.weight.fill_(3.0)
    before = model.weight.clone()
    with averaged.in_place():
        assert torch.equal(model.weight, averaged.tensors["weight"])
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, 2.0])
def test_invalid_decay_is_refused(decay: float) -> None:
    with pytest.raises(InputError, match="ema is"):
        AveragedWeights({}, decay)
