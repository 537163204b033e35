"""State of modules with divided parameters on real ranks; each check returns a JSON value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import samestep
from helpers.view_checks import difference, error_code, run_checks
from samestep.config import MeshConfig, StrategyConfig
from samestep.view.view import View

EPOCHS = 3
CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def run(strategy: str, replicate: int = 1) -> dict[str, list[Any]]:
    """Return the results of all checks on each rank."""
    return run_checks(CHECKS, configuration(strategy, replicate))


def configuration(strategy: str, replicate: int = 1) -> StrategyConfig:
    return StrategyConfig(name=strategy, mesh=MeshConfig(replicate=replicate))  # type: ignore[arg-type]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch(seed: int) -> Tensor:
    return torch.randn(11, 6, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        optimizer.zero_grad()
        model(batch(number)).pow(2).mean().backward()
        optimizer.step()
    return model


@check
def full_state() -> Any:
    """Full tensors under the plain names, which plain and divided modules load."""
    plain, model = trained(network()), trained(samestep.parallel(network()))
    state = samestep.full_state_dict(model)
    fresh = network()
    fresh.load_state_dict(state)
    other = samestep.parallel(network())
    other.load_state_dict(state)
    reloaded = samestep.full_state_dict(other)
    return [
        list(state) == list(plain.state_dict()),
        {type(value) for value in state.values()} == {Tensor},
        difference(list(plain.state_dict().values()), list(fresh.state_dict().values())) < 1e-12,
        all(torch.equal(state[name], reloaded[name]) for name in state),
    ]


@check
def parts() -> Any:
    """Each rank has a part of a parameter, and copies have memory of their own."""
    model: Any = samestep.parallel(network())
    copied = copy.deepcopy(model)
    own = model[0].weight.to_local()
    with torch.no_grad():
        copied[0].weight.to_local().zero_()
    return [own.numel(), bool(own.any()), type(model) is type(copied), type(model).__name__]


@check
def gradient_norm() -> Any:
    norms = []
    for model in (network(), samestep.parallel(network())):
        for number in range(3):
            model.zero_grad()
            model(batch(number)).pow(2).mean().backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        norms.append((norm, float(nn.utils.get_total_norm([one.grad for one in model.parameters()]))))
    return max(abs(one - other) for one, other in zip(*norms, strict=True)) < 1e-12


@check
def stale_optimizer() -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samestep.parallel(model)(batch(0)).mean().backward()
    return error_code(optimizer.step)


@check
def divided_twice() -> Any:
    model: Any = network()
    samestep.parallel(model[0])
    return error_code(lambda: samestep.parallel(model))


@check
def replaced_parameter() -> Any:
    model: Any = samestep.parallel(network())
    for number in range(3):
        model(batch(number)).mean().backward()
    model[0].weight = nn.Parameter(torch.zeros(8, 6))
    return error_code(lambda: model(batch(0)))


@check
def unused_backward() -> Any:
    """Forwards without a backward, and evaluations, leave nothing for later ones."""
    model = samestep.parallel(network())
    plain = network()
    for number in range(4):
        for one in (model, plain):
            one(batch(number))
            with torch.no_grad():
                one(batch(number))
            (one(batch(number)).mean() + one(batch(number + 1)).pow(2).mean()).backward()
    gradients: list[Any] = [one.grad for one in model.parameters()]
    return difference([one.grad for one in plain.parameters()], gradients) < 1e-12


def train(folder: Path, strategy: str, replicate: int, steps: int) -> list[Any]:
    """Train with checkpoints for some steps at most; return the losses, and a sum of the weights at the end."""
    torch.set_default_dtype(torch.float64)
    View.divides_small_calls = True
    config = None if strategy == "ddp" else configuration(strategy, replicate)
    model: Any = samestep.parallel(network(), strategy=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(44, 6, generator=generator), torch.randint(0, 3, (44,), generator=generator)
    )
    batches = samestep.loader(data, batch_size=11, seed=3)
    checkpoints = samestep.CheckpointManager(folder, model, batches, optimizer=optimizer)
    losses = []
    for _ in checkpoints.epochs(EPOCHS):
        for inputs, targets in batches:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                return losses
    return losses


def losses_with(options: dict[str, Any]) -> list[float]:
    """Train a few steps with options of the strategy; return the losses."""
    torch.set_default_dtype(torch.float64)
    View.divides_small_calls = True
    world = samestep.init(strategy=StrategyConfig(name="fsdp", **options))
    place: Any = nullcontext()
    if options.get("meta") and world.rank:
        place = torch.device("meta")
    with place:
        model = network()
    samestep.parallel(model)
    torch.manual_seed(1)  # a model on the meta device draws no numbers
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number in range(4):
        loss = model(batch(number)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
