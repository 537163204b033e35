"""Samestep: the number of GPUs is not a hyperparameter.

    with samestep.start() as world:
        engine = samestep.Engine(model, optimizer, loss, world=world)
        for batch in samestep.loader(dataset, batch_size=256, shards=8, shuffle=True, world=world):
            result = engine.step(batch)

Names are imported when they are first used, so that `import samestep` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.checkpoints import Checkpoints
    from samestep.config import Mesh, StepRules, StrategyPart
    from samestep.data.loader import loader
    from samestep.engine.learning_rate import scaled_lr
    from samestep.engine.loss import Loss, cross_entropy
    from samestep.engine.multi_loss import LossPart, MultiLoss
    from samestep.engine.result import StepResult
    from samestep.engine.step import Engine
    from samestep.runtime.gather import all_gather, reduce_dict
    from samestep.runtime.launch import launch
    from samestep.runtime.session import start
    from samestep.runtime.world import World

__version__ = "0.1.0"

_HOMES = {
    "Checkpoints": "checkpoints",
    "Engine": "engine.step",
    "Loss": "engine.loss",
    "LossPart": "engine.multi_loss",
    "Mesh": "config",
    "MultiLoss": "engine.multi_loss",
    "StepResult": "engine.result",
    "StepRules": "config",
    "StrategyPart": "config",
    "World": "runtime.world",
    "all_gather": "runtime.gather",
    "cross_entropy": "engine.loss",
    "launch": "runtime.launch",
    "loader": "data.loader",
    "reduce_dict": "runtime.gather",
    "scaled_lr": "engine.learning_rate",
    "start": "runtime.session",
}

__all__ = [
    "Checkpoints",
    "Engine",
    "Loss",
    "LossPart",
    "Mesh",
    "MultiLoss",
    "StepResult",
    "StepRules",
    "StrategyPart",
    "World",
    "__version__",
    "all_gather",
    "cross_entropy",
    "launch",
    "loader",
    "reduce_dict",
    "scaled_lr",
    "start",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(f"samestep.{_HOMES[name]}"), name)
