"""Which optimizers update the parameters of a stage as they update all, tried without ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from helpers.view_checks import error_code
from samestep.strategies.stage_optimizer_trial import require_update_by_stages


class Trust(optim.Optimizer):
    """A rate for each parameter from norms (You et al., "Large Batch Training of Convolutional Networks", 2017)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.add_(one.grad, alpha=-group["lr"] * float(one.norm() / one.grad.norm()))


class Sharpness(optim.SGD):
    """A step with gradients divided by the norm of all, through an optimizer of its own (Foret et al., "SAM", 2021)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base = optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        self.base.step()


class Noise(optim.SGD):
    """Random numbers for each element (Welling, Teh, "Stochastic Gradient Langevin Dynamics", 2011)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(torch.randn_like(one), alpha=0.01)


def warming(parameters: Any) -> optim.Optimizer:
    """Adafactor with a rate of zero in the first step."""
    optimizer = optim.Adafactor(parameters, lr=0.1)
    optim.lr_scheduler.LambdaLR(optimizer, float)
    return optimizer


OPTIMIZERS: dict[str, tuple[Callable[[Any], optim.Optimizer], bool]] = {
    "sgd": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), True),
    "sgd, fused": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True), True),
    "adam": (lambda p: optim.Adam(p, lr=0.01, amsgrad=True, foreach=True), True),
    "adamw, a tensor as rate": (lambda p: optim.AdamW(p, lr=torch.tensor(0.01)), True),
    "adagrad": (lambda p: optim.Adagrad(p, lr=0.01), True),
    "adadelta": (optim.Adadelta, True),
    "adamax": (optim.Adamax, True),
    "asgd": (optim.ASGD, True),
    "nadam": (optim.NAdam, True),
    "radam": (optim.RAdam, True),
    "rmsprop": (lambda p: optim.RMSprop(p, momentum=0.5, centered=True), True),
    "rprop": (optim.Rprop, True),
    "adafactor": (optim.Adafactor, True),
    "adafactor, warming": (warming, True),
    "trust": (Trust, True),
    "sharpness": (Sharpness, False),
    "noise": (lambda p: Noise(p, lr=0.1), False),
    "lbfgs": (optim.LBFGS, False),  # its step needs a closure
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_is_taken_if_it_updates_parameters_alone(name: str) -> None:
    make, is_taken = OPTIMIZERS[name]
    parameters = list(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)).parameters())
    optimizer = make(parameters)
    for one in parameters:
        one.grad = torch.randn_like(one)
    kept = [(one, one.detach().clone(), one.grad) for one in parameters]
    states = len(optimizer.state)
    generators = torch.get_rng_state()
    code = error_code(lambda: require_update_by_stages(optimizer))
    assert code == ("none" if is_taken else "E_OPTIMIZER")
    # The optimizer and the generators are as before.
    assert len(optimizer.state) == states
    assert torch.equal(torch.get_rng_state(), generators)
    for one, value, gradient in kept:
        assert torch.equal(one, value)
        assert one.grad is gradient


def test_hooks_and_later_steps_are_the_scripts_own() -> None:
    model = nn.Linear(6, 4)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    steps: list[Any] = []
    optimizer.register_step_post_hook(lambda *arguments: steps.append(arguments))
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]["exp_avg"].clone()
    require_update_by_stages(optimizer)
    assert len(steps) == 1
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], state)
    assert optimizer.param_groups[0]["lr"] == 0.1
