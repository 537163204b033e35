"""Numbers of samples for the statistics of batch norm: a warning for few, an error for one value per channel."""

import warnings

import pytest
import torch
from torch import nn

from helpers.batches import batch_of, random_batch
from samestep import Engine, StepConfig, World, cross_entropy
from samestep.engine.batch_norm_checks import FewSamplesWarning, uses_batch_statistics
from samestep.errors import InputError


def net(*, norm: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5) if norm else nn.LayerNorm(5), nn.Linear(5, 4)).double()


def engine_of(world: World, model: nn.Module, **options: object) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Engine(model, optimizer, cross_entropy, world=world, config=StepConfig(**options))  # type: ignore[arg-type]


def test_few_samples_are_warned_of_in_the_first_step_only(alone: World) -> None:
    engine = engine_of(alone, net())
    with pytest.warns(FewSamplesWarning, match="from 4 samples: 8 microbatches of a batch of 32"):
        engine.step(random_batch(alone, 32, 8))
    with warnings.catch_warnings(action="error"):
        engine.step(random_batch(alone, 32, 8))


@pytest.mark.parametrize(
    ("norm", "batch_norm", "size", "microbatches"),
    [(True, "microbatch", 32, 2), (True, "microbatch", 8, 1), (True, "sync", 32, 8), (False, "microbatch", 32, 8)],
    ids=["16 samples", "one microbatch", "sync", "no batch norm"],
)
def test_enough_samples_are_not_warned_of(
    alone: World, norm: bool, batch_norm: str, size: int, microbatches: int
) -> None:
    with warnings.catch_warnings(action="error"):
        engine_of(alone, net(norm=norm), batch_norm=batch_norm).step(random_batch(alone, size, microbatches))


def test_one_value_per_channel_is_an_input_error(alone: World) -> None:
    engine = engine_of(alone, net())
    with pytest.raises(InputError) as caught:
        engine.step(random_batch(alone, 5, 4))
    assert caught.value.code == "E_BATCH_NORM"
    assert "a batch of 5 samples has 4 microbatches, the smallest with 1 sample" in caught.value.value
    assert engine.step(random_batch(alone, 5, 2)).step == 1, "the failed step changed nothing"


def test_other_value_errors_stay_themselves(alone: World) -> None:
    def fails(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the loss")

    model = net()
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), fails, world=alone)
    with pytest.raises(ValueError, match="of the loss"):
        engine.step(batch_of(alone, torch.randn(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.int64), 1))


def test_norm_layers_in_evaluation_mode_use_no_statistics_of_the_batch() -> None:
    model = net()
    assert uses_batch_statistics(model)
    model[1].eval()
    assert not uses_batch_statistics(model)
    assert not uses_batch_statistics(net(norm=False))
