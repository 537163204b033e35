"""Last batches with few samples: microbatches of one sample, and ranks without samples."""

from typing import Any

import torch
from torch import nn

import samestep
from own_loops.cases import Setting, refused, same
from own_loops.modes import Points
from samestep.errors import InputError


class Images(Points):
    """Points as images of 2 x 3 pixels."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs.view(1, 2, 3), target


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(24, 3))


def points() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def train(setting: Setting, model: nn.Module, dataset: Points, forward: Any = None, **options: Any) -> Any:
    engine = samestep.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        world=setting.world,
        config=samestep.StepConfig(**options),
    )
    batches = samestep.loader(dataset, batch_size=16, microbatches=4, world=setting.world)
    losses = []
    try:
        for _ in range(2):
            for batch in batches:
                losses.append(engine.step(batch, forward=forward).loss)
    finally:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        assert engine.steps == len(losses)
    return weights, losses


@refused("E_BATCH_NORM")
def last_batch_of_one_sample(setting: Setting) -> Any:
    train(setting, points(), Points(17))


@refused("E_BATCH_NORM")
def one_sample_in_a_forward_function(setting: Setting) -> Any:
    forward = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    train(setting, points(), Points(17), forward)


@refused("E_BATCH_NORM")
def one_sample_with_statistics_of_the_global_batch(setting: Setting) -> Any:
    train(setting, points(), Points(17), batch_norm="sync")


@same
def one_sample_of_several_pixels(setting: Setting) -> Any:
    return train(setting, convolutions(), Images(17))


@same
def one_sample_with_batch_norm_in_evaluation_mode(setting: Setting) -> Any:
    model = points()
    model[1].eval()
    return train(setting, model, Points(17))


@same
def training_continues_after_the_error(setting: Setting) -> Any:
    model = points()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world)
    batches = samestep.loader(Points(33), batch_size=16, microbatches=4, world=setting.world)
    losses, failed = [], 0
    for _ in range(2):
        for batch in batches:
            before = [value.clone() for value in model.state_dict().values()]
            try:
                losses.append(engine.step(batch).loss)
            except InputError:
                failed += 1
                assert all(map(torch.equal, before, model.state_dict().values()))
    assert (len(losses), failed) == (4, 2)
    return model, losses
