"""Models split between real ranks, compared with the plain loop; each check returns a JSON value."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import samestep
from helpers import pipeline_models, tensor_models
from helpers.view_checks import difference, error_code
from samestep.config import MeshConfig, StrategyConfig
from samestep.distributed.world import World
from samestep.global_view import parallel_module
from samestep.strategies.split import Split
from samestep.view.view import View

ROWS, STEPS = 7, 4


def bits(name: str, mesh: dict[str, int], models: list[str], slices: int = 1) -> dict[str, list[Any]]:
    """Return for each model, on each rank, a hash of all values under `exact`, and divided and whole calls."""
    config, world = _joined(name, mesh, "exact")
    results = {}
    for model in models:
        divided, inputs = _divided(model, config, microbatches=4, reduction="exact", tensor_slices=slices)
        digest = hashlib.sha256()
        torch.manual_seed(1)
        for value in _script(divided, inputs, clips=True):
            digest.update(b"none" if value is None else value.contiguous().numpy().tobytes())
        owner = parallel_module(divided)
        assert owner is not None
        own = [digest.hexdigest(), owner.summary.divided, owner.summary.whole, owner.summary.reasons]
        results[model] = samestep.all_gather(own, world)
    return results


def refusals(name: str, mesh: dict[str, int], models: list[str]) -> list[str]:
    """Return the code of the error of each model under `exact`."""
    config, _ = _joined(name, mesh, "exact")
    return [error_code(partial(_divided, model, config, microbatches=4, reduction="exact")) for model in models]


def _joined(name: str, mesh: dict[str, int], reduction: Any) -> tuple[StrategyConfig, World]:
    torch.set_default_dtype(torch.float64)
    View.divides_small_calls = True
    config = StrategyConfig(name=name, mesh=MeshConfig(**mesh))  # type: ignore[arg-type]
    strategy = config if mesh else None
    limit = timedelta(seconds=60)
    return config, samestep.init(threads=1, timeout=limit, strategy=strategy, reduction=reduction)


def run(name: str, mesh: dict[str, int], models: list[str]) -> dict[str, list[Any]]:
    """Return for each model, on each rank: largest difference, divided and whole calls, and reasons for whole ones."""
    config, world = _joined(name, mesh, "fast")
    return {model: samestep.all_gather(_compared(model, config), world) for model in models}


def checkpoints(name: str, mesh: dict[str, int], models: list[str], folder: str, epochs: int) -> dict[str, list[Any]]:
    """Resume each model from its last checkpoint, if there is one, and train to the end of some epoch.

    Return on each rank, after the last epoch: whether each model takes a full state dict.
    """
    config, world = _joined(name, mesh, "fast")
    results = {}
    for model in models:
        divided, inputs = _divided(model, config)
        optimizer = torch.optim.Adam(divided.parameters(), lr=0.05)
        dataset = torch.utils.data.TensorDataset(inputs(0, 3 * ROWS))
        batches = samestep.loader(dataset, batch_size=ROWS, shuffle=True)
        manager = samestep.CheckpointManager(f"{folder}/{model}", divided, batches, optimizer=optimizer)
        for _ in manager.epochs(epochs):
            for (batch,) in batches:
                optimizer.zero_grad()
                divided(batch).pow(2).mean().backward()
                optimizer.step()
        state = samestep.full_state_dict(divided)
        doubled = {key: value * 2 for key, value in state.items()}
        divided.load_state_dict(doubled)
        loaded = samestep.full_state_dict(divided)
        complete = all(torch.equal(loaded[key], value) for key, value in doubled.items())
        results[model] = samestep.all_gather(complete and list(loaded) == list(MODELS[model][0]().state_dict()), world)
    return results


class Convolutions(nn.Module):
    """A network of images whose batch norms are in several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        logits: Tensor = self.head(self.body(hidden.transpose(2, 3)))
        return logits


class Pair(nn.Module):
    """Returns a dictionary of a tensor, a loss and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        logits = self.second(torch.tanh(self.first(inputs)))
        return {"logits": logits, "loss": logits.pow(2).mean(), "classes": 4}


def _untied() -> nn.Module:
    layers = [nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def _points(step: int, rows: int) -> Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(step))


def _tokens(step: int, rows: int, vocabulary: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(step))


def _images(step: int, rows: int) -> Tensor:
    return torch.randn(rows, 3, 10, 8, generator=torch.Generator().manual_seed(step))


Inputs = Callable[[int, int], Any]
MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "deep": (pipeline_models.Deep, _points),
    "untied": (_untied, _points),
    "dropout": (lambda: pipeline_models.Deep(0.3), _points),
    "layouts": (pipeline_models.Layouts, _points),
    "shared function": (pipeline_models.SharedFunction, _points),
    "first frozen": (lambda: pipeline_models.HalfFrozen(("blocks.4", "last")), _points),
    "last frozen": (lambda: pipeline_models.HalfFrozen(("first", "norm", "blocks.0")), _points),
    "images": (Convolutions, _images),
    "pair": (Pair, _points),
    "perceptron": (lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)), _points),
    "text": (lambda: tensor_models.model_of("gpt"), lambda step, rows: _tokens(step, rows, 13, 6)),
    "layers": (lambda: tensor_models.model_of("layers"), lambda step, rows: _tokens(step, rows, 13, 6)),
}
PLANS = {"layers": tensor_models.PLAN, "perceptron": {"0": "column", "2": "row"}}


def _divided(name: str, config: StrategyConfig, **options: Any) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    plan = PLANS.get(name, {})
    return samestep.parallel(make().double(), strategy=config, tensor_plan=plan, **options), inputs


def _compared(name: str, config: StrategyConfig) -> list[Any]:
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    divided, inputs = _divided(name, config)
    outcomes: list[list[Tensor | None]] = []
    for one in (model, divided):
        torch.manual_seed(1)
        outcomes.append(list(_script(one, inputs, clips=True)))
    owner = parallel_module(divided)
    assert owner is not None
    return [difference(*outcomes), owner.summary.divided, owner.summary.whole, owner.summary.reasons]


def _script(model: nn.Module, inputs: Inputs, *, clips: bool = False) -> Iterator[Tensor | None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = model(inputs(step, ROWS + step % 2))
        loss = outputs["loss"] + outputs["logits"].sum() if isinstance(outputs, dict) else outputs.pow(2).mean()
        loss.backward()
        yield loss.detach()
        yield from _full(model, lambda parameter: parameter.grad)
        if clips:
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            yield nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], math.inf)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for step in range(2):
            outputs = model(inputs(step, ROWS))
            yield outputs["logits"] if isinstance(outputs, dict) else outputs
    yield from _full(model, lambda parameter: parameter)
    yield from [buffer.clone() for buffer in model.buffers()]
    yield functional.dropout(torch.ones(5))  # the generator


def _full(model: nn.Module, value: Callable[[nn.Parameter], Tensor | None]) -> Iterator[Tensor | None]:
    owner = parallel_module(model)
    for parameter in model.parameters():
        own = value(parameter)
        if own is None and parameter.requires_grad:
            own = torch.zeros_like(parameter)
        if owner is not None and own is not None and isinstance(owner.strategy, Split):
            own = owner.strategy.full_tensor(parameter, own)
        yield None if own is None else own.detach().clone()
