"""Optimizers of torch, saved and resumed in the middle: the weights of a plain loop."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from own_loops.cases import Setting, each, refused, same
from own_loops.modes import Points
from own_loops.resume import Loop, Optimizers, Schedulers, loop, resumes, two_layers

Make = Callable[[Any], torch.optim.Optimizer]


def plain_weights(
    model: nn.Module, optimizer: Optimizers, scheduler: Schedulers | None, indices: list[list[int]]
) -> list[torch.Tensor]:
    """Return the weights of a plain loop over the same batches."""
    made, data, loss = optimizer(model), Points(), nn.CrossEntropyLoss()
    schedule = scheduler(made) if scheduler else None
    for batch in indices:
        made.zero_grad()
        inputs, targets = (torch.stack(column) for column in zip(*(data[index] for index in batch), strict=True))
        loss(model(inputs), targets).backward()
        made.step()
        if schedule is not None:
            schedule.step()
    return [parameter.detach() for parameter in model.parameters()]


def follows_plain_loop(
    setting: Setting,
    optimizer: Optimizers,
    model: Callable[[int], nn.Module] = two_layers,
    scheduler: Schedulers | None = None,
    tolerance: float = 1e-4,
) -> Any:
    """Require the weights of a plain loop to rounding, and equal bits after a resumption."""
    loops: list[Loop] = []

    def make(seed: int) -> Loop:
        loops.append(loop(setting, seed, optimizer, scheduler, model=model))
        return loops[-1]

    results = resumes(setting, make)
    weights = plain_weights(model(0), optimizer, scheduler, loops[0].indices)
    initial = [parameter.detach() for parameter in model(0).parameters()]
    for own, plain, before in zip(loops[0].model.parameters(), weights, initial, strict=True):
        assert not torch.equal(own, before), "a parameter was not trained"
        assert own.detach().numpy() == pytest.approx(plain.numpy(), rel=tolerance, abs=tolerance)
    return results


def with_options(kind: Make, **options: Any) -> Optimizers:
    return lambda model: kind(model.parameters(), **deepcopy(options))


def grouped(kind: Make, first: dict[str, Any], **options: Any) -> Optimizers:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        groups = [{"params": parameters[:1], **deepcopy(first)}, {"params": parameters[1:], "weight_decay": 0.1}]
        return kind(groups, **deepcopy(options))

    return make


class Own(torch.optim.Optimizer):
    """An optimizer of a user, with state of many types."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"last": [], "by_dimension": {}, "shape": tuple(parameter.shape), "count": 0}
                state["count"] += 1
                state["last"] = [parameter.grad.clone(), *state["last"][:2]]
                for dimension, size in enumerate(parameter.shape):
                    state["by_dimension"][dimension] = torch.full((size,), 1.0 / state["count"])
                factor = state["by_dimension"][0][0].item()
                parameter.sub_(sum(state["last"]), alpha=group["lr"] * factor)


class Global(torch.optim.SGD):
    """An optimizer with state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        calls = self.state["calls"] = {"number": self.state["calls"].get("number", 0) + 1}
        for group in self.param_groups:
            group["lr"] = 0.1 / calls["number"]
        super().step()


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd_without_momentum": with_options(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "sgd_with_momentum_and_dampening": with_options(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "sgd_with_nesterov": with_options(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": with_options(torch.optim.Adam, lr=0.01),
    "adam_with_amsgrad": with_options(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adam_with_decoupled_decay_and_maximize": with_options(
        torch.optim.Adam, lr=0.001, decoupled_weight_decay=True, weight_decay=0.1, maximize=True
    ),
    "adamw": with_options(torch.optim.AdamW, lr=0.01),
    "adagrad": with_options(torch.optim.Adagrad, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "adadelta": with_options(torch.optim.Adadelta, lr=1.0),
    "adamax": with_options(torch.optim.Adamax, lr=0.01),
    "nadam": with_options(torch.optim.NAdam, lr=0.01, momentum_decay=0.01),
    "radam": with_options(torch.optim.RAdam, lr=0.01),
    "rmsprop": with_options(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "asgd": with_options(torch.optim.ASGD, lr=0.05, t0=3),
    "a_fused_optimizer": with_options(torch.optim.AdamW, lr=0.01, fused=True),
    "a_rate_that_is_a_tensor": with_options(torch.optim.AdamW, lr=torch.tensor(0.01)),
    "betas_that_are_tensors": with_options(
        torch.optim.Adam, lr=torch.tensor(0.01), betas=(torch.tensor(0.8), torch.tensor(0.95))
    ),
    "named_parameters": lambda model: torch.optim.Adam(model.named_parameters(), lr=0.01),
    "several_groups": grouped(torch.optim.AdamW, {"lr": 0.02, "betas": (0.5, 0.7)}, lr=0.01),
    "several_groups_with_rates_that_are_tensors": grouped(
        torch.optim.AdamW, {"lr": torch.tensor(0.02), "name": "embedding"}, lr=torch.tensor(0.01)
    ),
    "groups_with_values_of_the_user": grouped(
        torch.optim.SGD,
        {"layers": {0: "first", (1, 2): None}, "tags": ("a", 1), "scale": torch.arange(3)},
        lr=0.1,
        momentum=0.9,
    ),
    "an_optimizer_of_the_user_with_lists_and_integer_keys": with_options(Own, lr=0.1),
    "an_optimizer_of_the_user_with_state_of_no_parameter": with_options(Global, lr=0.1, momentum=0.9),
}


@same
@each(OPTIMIZERS)
def optimizer_of_two_layers(setting: Setting, optimizer: Optimizers) -> Any:
    return follows_plain_loop(setting, optimizer)


@same
def rprop(setting: Setting) -> Any:
    return follows_plain_loop(setting, with_options(torch.optim.Rprop, lr=0.01), tolerance=0.05)


@same
def adafactor(setting: Setting) -> Any:
    return follows_plain_loop(setting, with_options(torch.optim.Adafactor, lr=0.05), tolerance=1e-3)


def without_bias(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


@same
@each({"muon": {}, "muon_with_a_rule_for_rates": {"adjust_lr_fn": "match_rms_adamw"}})
def muon_of_two_matrices(setting: Setting, options: dict[str, Any]) -> Any:
    return follows_plain_loop(setting, with_options(torch.optim.Muon, lr=0.02, **options), without_bias, tolerance=0.05)


@refused("E_OPTIMIZER")
def lbfgs_is_refused(setting: Setting) -> Any:
    follows_plain_loop(setting, with_options(torch.optim.LBFGS, lr=0.1))


@refused("E_OPTIMIZER")
def sparse_adam_is_refused(setting: Setting) -> Any:
    follows_plain_loop(setting, lambda model: torch.optim.SparseAdam(list(model.parameters()), lr=0.1))


@same
def a_rate_that_is_a_tensor_with_a_schedule(setting: Setting) -> Any:
    optimizer = with_options(torch.optim.Adam, lr=torch.tensor(0.01))
    return follows_plain_loop(setting, optimizer, scheduler=lambda made: StepLR(made, 3))
