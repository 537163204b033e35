"""Samestep: the number of GPUs is not a hyperparameter.

    with samestep.start() as world:
        engine = samestep.Engine(model, optimizer, loss, world=world)
        for batch in samestep.loader(dataset, batch_size=256, shuffle=True, world=world):
            result = engine.step(batch)

Names are imported when they are first used, so that `import samestep` does not import torch.
"""

from __future__ import annotations

from importlib import import_module

# Not from `typing`: `python -m samestep` imports this file before it removes the current folder from `sys.path`, and a
# file typing.py there would be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:  # `as` marks a name as exported for type checkers
    from typing import Any

    from samestep.checkpoint_manager import CheckpointManager as CheckpointManager
    from samestep.config import MeshConfig as MeshConfig
    from samestep.config import StepConfig as StepConfig
    from samestep.config import StrategyConfig as StrategyConfig
    from samestep.data.whole_batches import epochs as epochs
    from samestep.distributed.world import World as World
    from samestep.engine.callbacks import Callback as Callback
    from samestep.engine.corruption_witness import Witness as Witness
    from samestep.engine.engine import Engine as Engine
    from samestep.engine.evaluation import evaluate as evaluate
    from samestep.engine.learning_rate import scaled_lr as scaled_lr
    from samestep.engine.loss import Loss as Loss
    from samestep.engine.loss import cross_entropy as cross_entropy
    from samestep.engine.multi_loss import LossTerm as LossTerm
    from samestep.engine.multi_loss import MultiLoss as MultiLoss
    from samestep.engine.step_stats import StepResult as StepResult
    from samestep.global_view import no_sync as no_sync
    from samestep.global_view import parallel as parallel
    from samestep.launcher.launch import launch as launch
    from samestep.loading import loader as loader
    from samestep.metrics.counts import Accuracy as Accuracy
    from samestep.metrics.counts import OverlapMetric as OverlapMetric
    from samestep.metrics.metrics import FunctionMetric as FunctionMetric
    from samestep.ranks import all_gather as all_gather
    from samestep.ranks import is_main as is_main
    from samestep.ranks import main_first as main_first
    from samestep.ranks import reduce_dict as reduce_dict
    from samestep.session import init as init
    from samestep.session import start as start
    from samestep.strategies.divided_parameters import full_state_dict as full_state_dict

__version__ = "0.1.0"

_HOMES = {
    "Accuracy": "metrics.counts",
    "Callback": "engine.callbacks",
    "CheckpointManager": "checkpoint_manager",
    "Engine": "engine.engine",
    "Loss": "engine.loss",
    "LossTerm": "engine.multi_loss",
    "MeshConfig": "config",
    "MultiLoss": "engine.multi_loss",
    "OverlapMetric": "metrics.counts",
    "StepConfig": "config",
    "StepResult": "engine.step_stats",
    "StrategyConfig": "config",
    "Witness": "engine.corruption_witness",
    "World": "distributed.world",
    "all_gather": "ranks",
    "cross_entropy": "engine.loss",
    "epochs": "data.whole_batches",
    "evaluate": "engine.evaluation",
    "FunctionMetric": "metrics.metrics",
    "full_state_dict": "strategies.divided_parameters",
    "init": "session",
    "is_main": "ranks",
    "launch": "launcher.launch",
    "loader": "loading",
    "main_first": "ranks",
    "no_sync": "global_view",
    "parallel": "global_view",
    "reduce_dict": "ranks",
    "scaled_lr": "engine.learning_rate",
    "start": "session",
}

__all__ = list(_HOMES)
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(f"samestep.{_HOMES[name]}"), name)
