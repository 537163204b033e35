"""Parameters that change after the engine was made."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

import samestep
from own_loops.cases import Setting, refused, same
from own_loops.modes import assert_trained_alike, batches_of, engine_of, plain_step, twins
from samestep.data.loader import Loader

Change = Callable[[nn.Module, torch.optim.Optimizer, int], None]  # at the beginning of an epoch


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def frozen_network() -> nn.Sequential:
    """Return a network of which only the head is trained."""
    model = network()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def sgd_of_all(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=0.01)


def change_twice(
    setting: Setting,
    build: Callable[[], nn.Module],
    change: Change,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    **options: Any,
) -> Any:
    """Train with an engine and in a plain loop, with the same changes at the beginning of epochs, and compare."""
    models = twins(build)
    optimizers = [optimizer_of(model) for model in models]
    engine = samestep.Engine(models[0], optimizers[0], nn.CrossEntropyLoss(), world=setting.world, **options)
    losses = []
    for epoch in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(epoch)
            change(model, optimizer, epoch)
        for batch in batches_of(setting):
            losses.append(engine.step(batch).loss)
            plain_step(models[1], optimizers[1], batch)
    assert_trained_alike(*models)
    return models[0], optimizers[0], losses, engine.evaluate(batches_of(setting, shuffle=False))


@same
def gradual_unfreezing(setting: Setting) -> Any:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        model[4 - 2 * epoch].requires_grad_(True)

    return change_twice(setting, frozen_network, change, sgd_of_all)


@same
def gradual_unfreezing_with_new_parameter_groups(setting: Setting) -> Any:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        if epoch:
            model[4 - 2 * epoch].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[4 - 2 * epoch].parameters()), "lr": 0.01})

    return change_twice(setting, frozen_network, change, adam_of_trained)


@same
def freezing_later_with_a_moving_average(setting: Setting) -> Any:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        model[0].requires_grad_(epoch != 1)

    return change_twice(setting, network, change, sgd_of_all, ema=0.9)


@same
def parts_trained_in_alternation_of_steps(setting: Setting) -> Any:
    models = twins(network)
    optimizers = [sgd_of_all(model) for model in models]
    engine = samestep.Engine(models[0], optimizers[0], nn.CrossEntropyLoss(), world=setting.world)
    losses = []
    for batch in batches_of(setting):
        for model in models:
            model[0].requires_grad_(engine.steps % 2 == 0)
            model[2].requires_grad_(engine.steps % 2 == 1)
        losses.append(engine.step(batch).loss)
        plain_step(models[1], optimizers[1], batch)
    assert_trained_alike(*models)
    return models[0], optimizers[0], losses


@same
def bias_unfrozen_under_checks_of_the_ranks(setting: Setting) -> Any:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        model[0].bias.requires_grad_(epoch == 1)

    return change_twice(setting, frozen_network, change, sgd_of_all, check_every=1)


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of rank 2."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, layer.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


@same
def low_rank_updates_added_later(setting: Setting) -> Any:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        if epoch == 1:
            model[2] = LowRank(model[2])
            optimizer.add_param_group({"params": [model[2].down, model[2].up]})

    return change_twice(setting, network, change, sgd_of_all)


@same
def head_replaced_together_with_its_parameters_in_the_optimizer(setting: Setting) -> Any:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        if epoch == 1:
            model[4] = nn.Linear(8, 3)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return change_twice(setting, network, change, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


@refused("E_OPTIMIZER")
def head_replaced_without_the_optimizer(setting: Setting) -> Any:
    model = network()
    engine = engine_of(setting, model)
    losses = [engine.step(batch).loss for batch in batches_of(setting)]
    model[4] = nn.Linear(8, 3)
    return losses, [engine.step(batch).loss for batch in batches_of(setting)]


@refused("E_OPTIMIZER")
def weights_loaded_by_assignment(setting: Setting) -> Any:
    model, other = network(), network()
    engine = engine_of(setting, model)
    model.load_state_dict(other.state_dict(), assign=True)
    return [engine.step(batch).loss for batch in batches_of(setting)]


@refused("E_OPTIMIZER")
def unfreezing_of_a_parameter_that_the_optimizer_lacks(setting: Setting) -> Any:
    model = frozen_network()
    engine = engine_of(setting, model)
    losses = [engine.step(batch).loss for batch in batches_of(setting)]
    model.requires_grad_(True)
    return losses, [engine.step(batch).loss for batch in batches_of(setting)]


@refused("E_OPTIMIZER")
def parameter_group_of_a_tensor_outside_the_model(setting: Setting) -> Any:
    model = network()
    optimizer = sgd_of_all(model)
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world)
    losses = [engine.step(batch).loss for batch in batches_of(setting)]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return losses, [engine.step(batch).loss for batch in batches_of(setting)]


@refused("E_OPTIMIZER")
def everything_frozen_later(setting: Setting) -> Any:
    model = network()
    engine = engine_of(setting, model)
    losses = [engine.step(batch).loss for batch in batches_of(setting)]
    model.requires_grad_(False)
    return losses, [engine.step(batch).loss for batch in batches_of(setting)]


@refused("E_UNUSED_PARAMETER")
def new_layer_that_the_forward_does_not_use(setting: Setting) -> Any:
    model = nn.ModuleDict({"net": network()})
    model.forward = model["net"].__call__
    optimizer = sgd_of_all(model)
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=setting.world)
    losses = [engine.step(batch).loss for batch in batches_of(setting)]
    model["idle"] = nn.Linear(2, 2)
    optimizer.add_param_group({"params": model["idle"].parameters()})
    return losses, [engine.step(batch).loss for batch in batches_of(setting)]


@same
def weight_normalization_added_later(setting: Setting) -> Any:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        if epoch == 1:
            nn.utils.parametrizations.weight_norm(model[2])
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return change_twice(setting, network, change, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


@same
def pruning_later(setting: Setting) -> Any:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        if epoch == 1:
            prune.l1_unstructured(model[2], "weight", amount=0.5)

    return change_twice(setting, network, change, sgd_of_all)


@same
def head_that_grows(setting: Setting) -> Any:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        if epoch == 1:
            model[4].weight.data = torch.cat([model[4].weight.data, torch.ones(1, 8)])
            model[4].bias.data = torch.cat([model[4].bias.data, torch.ones(1)])

    return change_twice(setting, network, change, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


@same
def precision_changed_later(setting: Setting) -> Any:
    class Casting(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs.to(self[0].weight.dtype))

    def change(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        if epoch == 1:
            model.double()

    return change_twice(
        setting, lambda: Casting(*network()), change, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    )


def _unfreeze_and_resume(setting: Setting, *, unfreeze_first: bool) -> Any:
    """Save after unfreezing, and resume in a new engine."""

    def start() -> tuple[nn.Module, samestep.Engine, Loader]:
        torch.manual_seed(0)
        model = frozen_network()
        engine = samestep.Engine(model, sgd_of_all(model), nn.CrossEntropyLoss(), world=setting.world, ema=0.9)
        return model, engine, batches_of(setting)

    model, engine, batches = start()
    losses = [engine.step(batch).loss for batch in batches]
    model.requires_grad_(True)
    with samestep.CheckpointManager(setting.folder, engine, batches) as checkpoints:
        losses += [engine.step(batch).loss for batch in batches]
        checkpoints.save()
    expected = [engine.step(batch).loss for batch in batches]
    again, engine, batches = start()
    if unfreeze_first:
        again.requires_grad_(True)
    with samestep.CheckpointManager(setting.folder, engine, batches) as checkpoints:
        checkpoints.resume()
    again.requires_grad_(True)
    assert [engine.step(batch).loss for batch in batches] == expected
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    return losses, expected, again


@same
def resuming_after_unfreezing(setting: Setting) -> Any:
    return _unfreeze_and_resume(setting, unfreeze_first=True)


@refused("E_CHECKPOINT")
def resuming_with_a_moving_average_before_unfreezing(setting: Setting) -> Any:
    return _unfreeze_and_resume(setting, unfreeze_first=False)


@refused("E_OPTIMIZER")
def saving_with_a_replaced_head(setting: Setting) -> Any:
    model = network()
    engine, batches = engine_of(setting, model), batches_of(setting)
    for batch in batches:
        engine.step(batch)
    model[4] = nn.Linear(8, 3)
    with samestep.CheckpointManager(setting.folder, engine, batches) as checkpoints:
        checkpoints.save()
