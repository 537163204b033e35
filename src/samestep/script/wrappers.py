"""Wrappers of a module for several devices, which are the module itself in an unchanged script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from samestep.distributed.collective_check import line_of_script
from samestep.distributed.devices import is_accelerator
from samestep.distributed.logging import logger
from samestep.script.patches import replaced


@contextmanager
def transparent_wrappers() -> Iterator[None]:
    """Let `DataParallel` compute its module, and leave batch norm as it is, during the block."""
    convert = staticmethod(_convert_sync_batchnorm)
    with (
        replaced(nn.DataParallel, __init__=_init_data_parallel, forward=_forward_data_parallel),
        replaced(nn.SyncBatchNorm, convert_sync_batchnorm=convert),
    ):
        yield


def _init_data_parallel(
    self: nn.DataParallel[Any],
    module: nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
) -> None:
    nn.Module.__init__(self)
    self.module = module
    self.device_ids = []
    self.dim = dim
    text = "%s: DataParallel is the module itself: Samestep divides its calls"
    logger.info(text, line_of_script())


def _forward_data_parallel(self: nn.DataParallel[Any], *inputs: Any, **options: Any) -> Any:
    device = next((parameter.device for parameter in self.module.parameters()), None)
    if device is not None and is_accelerator(device):  # scripts leave the transfer to DataParallel
        inputs, options = _pytree.tree_map_only(
            torch.Tensor, lambda value: value.to(device), (inputs, options)
        )
    return self.module(*inputs, **options)


def _convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    text = "%s: the module stays as it is: batch norm uses statistics of the whole batch"
    logger.info(text, line_of_script())
    return module
