"""Which optimizers update parts of parameters as they update the whole, tried without ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from helpers.view_checks import error_code
from samestep.strategies.split_optimizer_trial import require_update_by_parts

ELEMENT = (True, True)  # taken under `tp`, and under `pp`
PARAMETER = (False, True)
ALL = (False, False)


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


OPTIMIZERS: dict[str, tuple[Callable[[Any], optim.Optimizer], tuple[bool, bool]]] = {
    "sgd": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), ELEMENT),
    "sgd, fused": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True), ELEMENT),
    "adam": (lambda p: optim.Adam(p, lr=0.01, amsgrad=True, foreach=True), ELEMENT),
    "adamw, a tensor as rate": (lambda p: optim.AdamW(p, lr=torch.tensor(0.01)), ELEMENT),
    "adagrad": (lambda p: optim.Adagrad(p, lr=0.01), ELEMENT),
    "adadelta": (optim.Adadelta, ELEMENT),
    "adamax": (optim.Adamax, ELEMENT),
    "asgd": (optim.ASGD, ELEMENT),
    "nadam": (optim.NAdam, ELEMENT),
    "radam": (optim.RAdam, ELEMENT),
    "rmsprop": (lambda p: optim.RMSprop(p, momentum=0.5, centered=True), ELEMENT),
    "rprop": (optim.Rprop, ELEMENT),
    "adafactor": (optim.Adafactor, PARAMETER),
    "adafactor, warming": (warming, PARAMETER),
    "trust": (Trust, PARAMETER),
    "sharpness": (Sharpness, ALL),
    "noise": (lambda p: Noise(p, lr=0.1), ALL),
    "lbfgs": (optim.LBFGS, ALL),  # its step needs a closure
}


@pytest.mark.parametrize("layout", ["tp", "pp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_is_taken_if_it_updates_parts_alone(name: str, layout: str) -> None:
    make, (under_tp, under_pp) = OPTIMIZERS[name]
    rows, bias, columns, whole = list(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)).parameters())
    divided: dict[Tensor, int] = {}
    is_taken = under_pp
    if layout == "tp":
        divided = {rows: 0, bias: 0, columns: 1}
        is_taken = under_tp
    optimizer = make([rows, bias, columns, whole])
    for one in (rows, bias, columns, whole):
        one.grad = torch.randn_like(one)
    kept = [(one, one.detach().clone(), one.grad) for one in (rows, bias, columns, whole)]
    states = len(optimizer.state)
    generators = torch.get_rng_state()
    code = error_code(lambda: require_update_by_parts(optimizer, divided, has_stages=layout == "pp"))
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
    require_update_by_parts(optimizer, {model.weight: 0}, has_stages=True)
    assert len(steps) == 1
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], state)
    assert optimizer.param_groups[0]["lr"] == 0.1
