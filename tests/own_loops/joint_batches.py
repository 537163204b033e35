"""Steps with the batches of several loaders: semi-supervised training, two domains, pairs of any sizes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import samestep
from own_loops.cases import Setting, digest, refused, same
from own_loops.data import Noisy
from own_loops.modes import Points
from samestep.data.loader import Loader
from samestep.microbatches import Cursor


def supervised_and_consistent(model: nn.Module, data: Any) -> Any:
    """Cross entropy of labelled samples, and agreement of two noisy views of unlabelled ones."""
    (inputs, targets), (unlabelled, _) = data
    first, second = (model(unlabelled + 0.1 * torch.randn_like(unlabelled)) for _ in range(2))
    return nn.functional.cross_entropy(model(inputs), targets) + (first - second).square().mean()


class Loop:
    """A model, 40 labelled samples in batches of 8, and 96 unlabelled ones in batches of 16."""

    def __init__(self, setting: Setting, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.setting = setting
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.engine = samestep.Engine(self.model, optimizer, world=setting.world)
        self.labelled = self.loader(Points(40), 8, **options)
        self.unlabelled = self.loader(Noisy(96), 16, seed=1, **options)
        self.used: list[tuple[list[int], ...]] = []

    def loader(self, data: Points, size: int, **options: Any) -> Loader:
        options = {"microbatches": 4, "shuffle": True, **options}
        return samestep.loader(data, batch_size=size, world=self.setting.world, **options)

    def step(self, *batches: Any) -> samestep.StepResult:
        self.used.append(tuple(batch.indices.tolist() for batch in batches))
        return self.engine.step(batches, forward=supervised_and_consistent)

    def seen(self, number: int) -> list[int]:
        return [index for batches in self.used for index in batches[number]]

    @property
    def result(self) -> Any:
        return {name: value.clone() for name, value in self.model.state_dict().items()}, self.used


@same
def zip_of_two_loaders_moves_both(setting: Setting) -> Any:
    loop = Loop(setting)
    for _ in range(6):
        for pair in zip(loop.labelled, loop.unlabelled, strict=False):
            loop.step(*pair)
    labelled, unlabelled = loop.seen(0), loop.seen(1)
    for start in range(0, len(unlabelled) - 95, 96):
        assert sorted(unlabelled[start : start + 96]) == list(range(96))
    for start in range(0, len(labelled) - 39, 40):
        assert sorted(labelled[start : start + 40]) == list(range(40))
    assert unlabelled[:96] != unlabelled[96:192]
    return loop.result


@same
def zip_with_an_endless_loader(setting: Setting) -> Any:
    loop = Loop(setting, num_workers=1)
    for epoch in samestep.epochs(loop.labelled, 5):
        for pair in zip(loop.labelled, loop.unlabelled.endless(), strict=False):
            loop.step(*pair)
        assert loop.labelled.cursor == Cursor(epoch + 1)
    assert loop.unlabelled.cursor == Cursor(4, 16)
    assert sorted(loop.seen(1)[:96]) == list(range(96)) == sorted(loop.seen(1)[96:192])
    loop.labelled.close(), loop.unlabelled.close()
    return loop.result


@same
def iterators_that_are_made_again_at_their_ends(setting: Setting) -> Any:
    def forever(batches: Loader) -> Iterator[Any]:
        while True:
            yield from batches

    loop = Loop(setting)
    labelled, unlabelled = forever(loop.labelled), forever(loop.unlabelled)
    for _ in range(14):
        loop.step(next(labelled), next(unlabelled))
    other = Loop(setting)
    while len(other.used) < 14:
        for pair in zip(other.labelled, other.unlabelled, strict=False):
            other.step(*pair)
            if len(other.used) == 14:
                break
    assert digest(loop.result) == digest(other.result)
    return loop.result


@same
def two_domains_with_two_engines(setting: Setting) -> Any:
    """Each generator maps a domain to the other, as in CycleGAN (Zhu et al., 2017)."""
    models = nn.ModuleDict({"one": nn.Linear(6, 6), "two": nn.Linear(6, 6)})
    critic = nn.Linear(6, 1)

    def cycle(model: Any, data: Any) -> Any:
        (one, _), (two, _) = data
        back = model["two"](model["one"](one)), model["one"](model["two"](two))
        return (back[0] - one).abs().mean() + (back[1] - two).abs().mean() - critic(model["one"](one)).mean()

    def judge(model: Any, data: Any) -> Any:
        fake = models["one"](data[0][0]).detach()
        return nn.functional.softplus(model(fake)).mean() + nn.functional.softplus(-model(data[1][0])).mean()

    engines = [
        samestep.Engine(model, torch.optim.Adam(model.parameters()), world=setting.world) for model in (models, critic)
    ]
    loop, losses = Loop(setting), []
    for pair in zip(loop.labelled, loop.loader(Points(60), 12, seed=2), strict=False):
        losses += [engines[0].step(pair, forward=cycle).loss, engines[1].step(list(pair), forward=judge).loss]
    return models, critic, losses


@same
def resumption_continues_both_loaders(setting: Setting) -> Any:
    def manager(loop: Loop) -> samestep.CheckpointManager:
        return samestep.CheckpointManager(
            setting.folder, loop.engine, {"labelled": loop.labelled, "unlabelled": loop.unlabelled}
        )

    def train(loop: Loop, steps: int) -> None:
        while len(loop.used) < steps:
            for pair in zip(loop.labelled, loop.unlabelled, strict=False):
                loop.step(*pair)
                if len(loop.used) == steps:
                    break

    whole = Loop(setting)
    train(whole, 15)
    first = Loop(setting)
    train(first, 8)
    manager(first).save()
    second = Loop(setting, seed=5)
    assert manager(second).resume()
    second.used = first.used
    train(second, 15)
    assert digest(second.result) == digest(whole.result)
    return whole.result


@same
def statistics_of_the_global_batch_with_joint_batches(setting: Setting) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    config = samestep.StepConfig(batch_norm="sync")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = samestep.Engine(model, optimizer, world=setting.world, config=config)
    loop = Loop(setting)
    for pair in zip(loop.labelled, loop.unlabelled, strict=False):
        engine.step(pair, forward=supervised_and_consistent)
    return model


@same
def evaluation_of_joint_batches(setting: Setting) -> Any:
    loop = Loop(setting)
    pairs = list(zip(loop.labelled, loop.unlabelled, strict=False))
    values = loop.engine.evaluate(pairs, forward=supervised_and_consistent)
    assert values["samples"] == 40
    assert loop.labelled.cursor == Cursor()
    return values


@refused("E_BATCH")
def joint_batches_without_a_forward(setting: Setting) -> Any:
    loop = Loop(setting)
    for pair in zip(loop.labelled, loop.unlabelled, strict=False):
        loop.engine.step(pair)


@refused("E_BATCH")
def last_batch_with_fewer_microbatches(setting: Setting) -> Any:
    loop = Loop(setting)
    for pair in zip(loop.loader(Points(18), 8), loop.unlabelled, strict=False):
        loop.step(*pair)


@refused("E_BATCH")
def batch_of_a_plain_data_loader(setting: Setting) -> Any:
    loop = Loop(setting)
    for batch in DataLoader(Points(40), batch_size=8):
        loop.engine.step(batch)
