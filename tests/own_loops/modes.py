"""Training modes that a script sets on parts of its model."""

from typing import Any

import torch
from torch import nn

import samestep
from own_loops.cases import Setting, same
from samestep.data.loader import Loader


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random points with classes."""

    def __init__(self, size: int = 50, features: int = 6) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(size, features, generator=generator)
        self._targets = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index], self._targets[index]


def engine_of(setting: Setting, model: nn.Module, **options: Any) -> samestep.Engine:
    """Return an engine with SGD of all parameters that are trained now."""
    optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)
    return samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world, **options)


def batches_of(setting: Setting, *, shuffle: bool = True) -> Loader:
    """Return a loader of 48 points: 3 batches of 16 in each epoch, in 4 microbatches."""
    return samestep.loader(Points(48), batch_size=16, microbatches=4, shuffle=shuffle, world=setting.world)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Train one step on a global batch as a plain loop on one device."""
    inputs, targets = torch.utils.data.default_collate([Points(48)[int(index)] for index in batch.indices])
    optimizer.zero_grad()
    nn.CrossEntropyLoss()(model(inputs), targets).backward()
    optimizer.step()


def assert_trained_alike(model: nn.Module, plain: nn.Module) -> None:
    """Assert that parameters and buffers equal those of a plain loop to rounding."""
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


def model_with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def model_with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def train_twice(setting: Setting, models: list[nn.Module], epochs: int = 2) -> list[float]:
    """Train the first of two equal models with an engine and the second one in a plain loop, and compare them."""
    model, plain = models
    engine = engine_of(setting, model)
    optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, plain.parameters()), lr=0.1)
    losses = []
    for _ in range(epochs):
        for batch in batches_of(setting):
            losses.append(engine.step(batch).loss)
            plain_step(plain, optimizer, batch)
    assert_trained_alike(model, plain)
    return losses


def twins(build: Any) -> list[nn.Module]:
    """Return two models with the same initial weights."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    return models


@same
def batch_norm_in_eval_mode_trains_like_a_plain_loop(setting: Setting) -> Any:
    models = twins(model_with_batch_norm)
    for model in models:
        model[1].eval()
    return models[0], train_twice(setting, models)


@same
def dropout_off_by_hand_stays_off(setting: Setting) -> Any:
    models = twins(model_with_dropout)
    for model in models:
        model[1].eval()
    return models[0], train_twice(setting, models)


class Distilled(nn.Module):
    """A student and a frozen teacher with dropout and batch norm, as attributes of one model."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3), nn.Sequential(*model_with_batch_norm(), nn.Dropout(0.5))
        self.teacher.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.student(inputs) + self.teacher(inputs)


@same
def teacher_in_eval_mode_stays_there(setting: Setting) -> Any:
    models = twins(Distilled)
    for model in models:
        model.teacher.eval()
    losses = train_twice(setting, models)
    assert not models[0].teacher.training
    return models[0], losses


@same
def frozen_key_encoder_in_training_mode_follows_its_batches(setting: Setting) -> Any:
    """As in MoCo: the encoder of the keys is frozen, and its batch norm uses and records statistics of the batch."""
    model = Distilled()
    engine = engine_of(setting, model)
    losses = [engine.step(batch).loss for batch in batches_of(setting)]
    assert model.teacher[1].running_mean.any()
    return model, losses


class KeepsNormsInEvalMode(nn.Sequential):
    """The usual override of `train` for fine-tuning with small batches."""

    def __init__(self) -> None:
        super().__init__(*model_with_batch_norm())

    def train(self, mode: bool = True) -> "KeepsNormsInEvalMode":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


@same
def overridden_train_is_respected_after_an_evaluation(setting: Setting) -> Any:
    model = KeepsNormsInEvalMode().train()
    engine, losses = engine_of(setting, model), []
    for _ in range(2):
        losses += [engine.step(batch).loss for batch in batches_of(setting)]
        losses.append(engine.evaluate(batches_of(setting, shuffle=False))["loss"])
    assert model.training and not model[1].training
    assert not model[1].running_mean.any()
    return model, losses


class Merged(nn.Linear):
    """A layer that adds an update to its weight in eval mode and subtracts it again, as implementations of LoRA."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.is_merged = False

    def train(self, mode: bool = True) -> "Merged":
        if mode is self.is_merged:
            self.weight.data += -0.5 if mode else 0.5
            self.is_merged = not mode
        super().train(mode)
        return self


@same
def layer_that_is_merged_for_evaluation_is_separated_again(setting: Setting) -> Any:
    model = Merged()
    engine, losses = engine_of(setting, model), []
    for _ in range(2):
        losses += [engine.step(batch).loss for batch in batches_of(setting)]
        losses.append(engine.evaluate(batches_of(setting, shuffle=False))["loss"])
        assert model.training and not model.is_merged
    return model, losses


@same
def modes_that_change_between_epochs(setting: Setting) -> Any:
    model = model_with_batch_norm()
    engine, losses, means = engine_of(setting, model), [], []
    for epoch in range(3):
        model.train()
        model[1].train(epoch == 1)
        losses += [engine.step(batch).loss for batch in batches_of(setting)]
        means.append(model[1].running_mean.clone())
    assert not means[0].any() and means[1].any() and torch.equal(means[1], means[2])
    return model, losses


@same
def evaluation_restores_the_mode_of_each_module(setting: Setting) -> Any:
    model = nn.Sequential(model_with_batch_norm(), nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Dropout()))
    model[0][1].eval()
    model[2].eval()
    model[2][1].train()
    modes = [module.training for module in model.modules()]
    value = engine_of(setting, model).evaluate(batches_of(setting, shuffle=False))
    assert modes == [module.training for module in model.modules()]
    return value


@same
def model_in_eval_mode_before_the_engine_trains_in_eval_mode(setting: Setting) -> Any:
    models = twins(lambda: nn.Sequential(*model_with_batch_norm(), nn.Dropout(0.5)).eval())
    return models[0], train_twice(setting, models)


@same
def forgotten_train_after_an_own_evaluation_as_in_a_plain_loop(setting: Setting) -> Any:
    model = model_with_batch_norm()
    engine = engine_of(setting, model)
    losses = [engine.step(batch).loss for batch in batches_of(setting)]
    model.eval()
    means = model[1].running_mean.clone()
    losses += [engine.step(batch).loss for batch in batches_of(setting)]
    assert torch.equal(means, model[1].running_mean)
    return model, losses


@same
def synchronized_batch_norm_that_starts_in_eval_mode(setting: Setting) -> Any:
    model = model_with_batch_norm().eval()
    engine = engine_of(setting, model, config=samestep.StepConfig(batch_norm="sync"))
    losses = [engine.step(batch).loss for batch in batches_of(setting)]
    assert not model[1].running_mean.any()
    model.train()
    plain = model_with_batch_norm()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches_of(setting):
        losses.append(engine.step(batch).loss)
        plain_step(plain, optimizer, batch)
    assert_trained_alike(model, plain)  # statistics of the whole batch
    return model, losses
