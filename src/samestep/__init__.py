"""Samestep: the number of GPUs is not a hyperparameter.

    model = samestep.parallel(model)
    for inputs, targets in samestep.loader(dataset, batch_size=256, shuffle=True):
        loss = loss_function(model(inputs), targets)
        ...

Names are imported when they are first used, so that `import samestep` does not import torch.
"""

from __future__ import annotations

from importlib import import_module

# Not from `typing`: `python -m samestep` imports this file before it removes the current folder
# from `sys.path`, and a file typing.py there would be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:  # `as` marks a name as exported for type checkers
    from typing import Any

    from samestep import errors as errors
    from samestep.checkpoint_manager import CheckpointManager as CheckpointManager
    from samestep.cli.train import train as train
    from samestep.data.whole_batches import epochs as epochs
    from samestep.launcher.launch import launch as launch
    from samestep.loading import loader as loader
    from samestep.parallelize import no_sync as no_sync
    from samestep.parallelize import parallel as parallel
    from samestep.runs import RunResult as RunResult
    from samestep.session import all_gather as all_gather
    from samestep.session import init as init
    from samestep.session import is_main as is_main
    from samestep.session import main_first as main_first
    from samestep.session import request_stop as request_stop
    from samestep.strategies.divided_parameters import full_state_dict as full_state_dict

__version__ = "0.1.0"

_HOMES = {
    "CheckpointManager": "checkpoint_manager",
    "RunResult": "runs",
    "all_gather": "session",
    "epochs": "data.whole_batches",
    "full_state_dict": "strategies.divided_parameters",
    "init": "session",
    "is_main": "session",
    "launch": "launcher.launch",
    "loader": "loading",
    "main_first": "session",
    "no_sync": "parallelize",
    "parallel": "parallelize",
    "request_stop": "session",
    "train": "cli.train",
}

__all__ = list(_HOMES)
__all__ += ["__version__", "errors"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("samestep.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(f"samestep.{_HOMES[name]}"), name)
