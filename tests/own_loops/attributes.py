"""Tensors in plain attributes of modules: state that the forward carries on, and caches of many correct models."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import samestep
from own_loops.buffers import Watched, train
from own_loops.cases import Setting, refused, same
from own_loops.modes import Points


def losses_of(setting: Setting, change: Callable[..., None], **attributes: Any) -> tuple[nn.Module, Any]:
    """Train a model whose outputs depend on the attribute `scale`, a tensor of no dimension or of 6 elements."""

    class Scaled(Watched):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                with torch.no_grad():
                    self.change(self, inputs)
            return self.linear(inputs * self.scale)

    model = Scaled(change)
    for name, value in {"scale": torch.ones(6), **attributes}.items():
        setattr(model, name, value)
    return model, train(setting, model)


# State that the forward carries on.


class Recurrent(nn.Module):
    """Carries its state from microbatch to microbatch, also in evaluation, in attributes of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)
        self.state: torch.Tensor | None = None
        self.total, self.calls = torch.zeros(8), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(8) if self.state is None else self.state
        states = self.cell(inputs, state.expand(len(inputs), -1))
        self.state = states.detach().mean(0)
        self.total.add_(self.state)
        self.calls += 1
        return self.head(states + self.total / self.calls)


@same
def state_that_an_evaluation_would_change(setting: Setting) -> Any:
    torch.manual_seed(0)
    model, values = Recurrent(), []
    engine = samestep.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), world=setting.world
    )
    batches = samestep.loader(Points(48), batch_size=16, microbatches=4, world=setting.world)
    values.append(engine.evaluate(batches)["loss"])
    assert (model.state, model.calls, model.total.tolist()) == (None, 0, [0.0] * 8)
    for epoch in range(2):
        values += [engine.step(batch).loss for batch in batches]
        before = (model.state, model.calls, model.total.clone())
        values.append(engine.evaluate(batches)["loss"])
        assert model.state is before[0]
        assert model.calls == before[1] == 3 * (epoch + 1)
        assert torch.equal(model.total, before[2])
    return model, model.state, model.total, values


@same
def running_mean_in_an_attribute(setting: Setting) -> Any:
    def change(module: Any, inputs: torch.Tensor) -> None:
        module.scale = 0.9 * module.scale + 0.1 * inputs.abs().mean(0)

    model, losses = losses_of(setting, change)
    assert not torch.equal(model.scale, torch.ones(6))
    return model, model.scale, losses


@same
def running_mean_written_in_place(setting: Setting) -> Any:
    model, losses = losses_of(setting, lambda module, inputs: module.scale.mul_(0.9).add_(0.1 * inputs.abs().mean(0)))
    assert not torch.equal(model.scale, torch.ones(6))
    return model, model.scale, losses


@same
def running_mean_that_begins_with_the_first_batch(setting: Setting) -> Any:
    def change(module: Any, inputs: torch.Tensor) -> None:
        now = inputs.abs().mean(0)
        module.mean = now if module.mean is None else 0.9 * module.mean + 0.1 * now
        module.scale = module.mean

    model, losses = losses_of(setting, change, mean=None)
    return model, model.mean, losses


@same
def counters_of_any_type_in_attributes(setting: Setting) -> Any:
    def change(module: Any, inputs: torch.Tensor) -> None:
        module.flags = module.flags | (inputs.amax(0) > 1)
        module.counts = module.counts + torch.bincount(inputs.argmax(1), minlength=6)
        module.spectrum = module.spectrum + torch.fft.fft(inputs).mean(0)
        module.half = module.half + inputs.mean(0).half()
        module.scale = module.counts.float() / (1 + module.counts.sum()) + module.spectrum.abs() + module.half.float()

    attributes = {
        "flags": torch.zeros(6, dtype=torch.bool),
        "counts": torch.zeros(6, dtype=torch.int64),
        "spectrum": torch.zeros(6, dtype=torch.complex64),
        "half": torch.zeros(6, dtype=torch.float16),
    }
    model, losses = losses_of(setting, change, **attributes)
    assert model.counts.dtype == torch.int64 and model.spectrum.dtype == torch.complex64
    return model, [getattr(model, name) for name in attributes], losses


@same
def state_that_is_cleared_by_the_forward(setting: Setting) -> Any:
    def change(module: Any, inputs: torch.Tensor) -> None:
        if module.memory is None:
            module.memory = inputs.mean(0)
        else:
            module.scale, module.memory = module.memory, None

    model, losses = losses_of(setting, change, memory=None)
    return model, model.scale, model.memory, losses


@same
def running_mean_in_an_attribute_with_statistics_of_the_global_batch(setting: Setting) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear, self.mean = nn.BatchNorm1d(6), nn.Linear(6, 3), torch.ones(6)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * inputs.abs().mean(0)
            return self.linear(self.norm(inputs) * self.mean)

    model = Net()
    losses = train(setting, model, batch_norm="sync")
    assert not torch.equal(model.mean, torch.ones(6))
    return model, model.mean, losses


@refused("E_BUFFER")
def attribute_written_in_place_with_statistics_of_the_global_batch(setting: Setting) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear, self.mean = nn.BatchNorm1d(6), nn.Linear(6, 3), torch.ones(6)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * inputs.abs().mean(0))
            return self.linear(self.norm(inputs) * self.mean)

    train(setting, Net(), batch_norm="sync")


@same
def skipped_step_leaves_attributes_unchanged(setting: Setting) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mean, self.calls = nn.Linear(6, 3), torch.ones(6), 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * inputs.abs().mean(0)
            return self.linear(inputs) * (float("nan") if self.calls == 3 else 1.0) * self.mean[:3]

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = samestep.StepConfig(non_finite="skip")
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world, config=config)
    skipped, means = 0, []
    for batch in samestep.loader(Points(), batch_size=16, microbatches=4, world=setting.world):
        before = model.mean.clone()
        if engine.step(batch).skipped:
            skipped += 1
            assert torch.equal(model.mean, before)
        means.append(model.mean.clone())
    assert skipped == 2  # the counter stays as well
    return model, means


# State that begins to change after the first step.


def late(change: Callable[[Any, torch.Tensor], None]) -> Callable[[Any, torch.Tensor], None]:
    """Return a change that begins in the third step."""

    def changed(module: Any, inputs: torch.Tensor) -> None:
        module.calls += 1
        if module.calls > 2:
            change(module, inputs)

    return changed


@same
def running_mean_that_replaces_none_later(setting: Setting) -> Any:
    def change(module: Any, inputs: torch.Tensor) -> None:
        now = inputs.abs().mean(0)
        module.mean = now if module.mean is None else 0.9 * module.mean + 0.1 * now
        module.scale = module.mean

    model, losses = losses_of(setting, late(change), calls=0, mean=None)
    return model, model.mean, losses


@same
def number_that_changes_later(setting: Setting) -> Any:
    def change(module: Any, inputs: torch.Tensor) -> None:
        module.largest = max(module.largest, float(inputs.max()))
        module.scale = torch.full((6,), module.largest)

    model, losses = losses_of(setting, late(change), calls=0, largest=0.0)
    assert isinstance(model.largest, float) and model.largest > 0
    return model, model.largest, losses


@refused("E_BUFFER")
def running_mean_written_in_place_later(setting: Setting) -> Any:
    change = late(lambda module, inputs: module.scale.mul_(0.9).add_(0.1 * inputs.abs().mean(0)))
    losses_of(setting, change, calls=0)


# Caches, which are computed again.


@same
def last_outputs_are_those_of_the_last_microbatch(setting: Setting) -> Any:
    class Inspected(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(inputs)
            self.last = outputs.detach()
            return outputs

    model = nn.Sequential(Inspected(6, 8), nn.Tanh(), nn.Linear(8, 3))
    losses = train(setting, model)
    return model, model[0].last, losses


@same
def last_outputs_with_their_graph(setting: Setting) -> Any:
    class Inspected(nn.Linear):
        last = None

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(inputs)
            return self.last

    model = nn.Sequential(Inspected(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, train(setting, model)


@same
def mask_as_long_as_the_inputs(setting: Setting) -> Any:
    class Masked(nn.Linear):
        mask = None

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.mask is None or len(self.mask) != len(inputs):
                self.mask = torch.arange(len(inputs)).float()[:, None] / len(inputs)
            return super().forward(inputs * self.mask)

    model = Masked(6, 3)
    return model, train(setting, model)
