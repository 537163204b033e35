"""Operations that an unchanged script is refused, and wrappers of one device made transparent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

import samestep.global_view
import samestep.loading
import samestep.session
from samestep.distributed.collective_check import script_line
from samestep.distributed.devices import is_accelerator
from samestep.distributed.env import visible_devices_kept
from samestep.distributed.logging import logger
from samestep.errors import InputError
from samestep.script.process_end import children_ended, plain_start_method
from samestep.script.replaced import replaced


def _line_of_script() -> str:
    file, line = script_line(sys._getframe(1))
    return f"{file}:{line}"


def _refusing(operation: str, expected: str, fix: str, code: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        value = f"{_line_of_script()}: {operation} in an unchanged script"
        raise InputError(value, expected, fix, code=code)

    return refuse


@contextmanager
def refusals(*, has_own_device: bool) -> Iterator[None]:
    """Refuse operations outside of the global view; make wrappers of one device transparent.

    Args:
        has_own_device: each rank computes on an accelerator of its own; CUDA_VISIBLE_DEVICES stays
            as it is then.
    """
    with ExitStack() as stack:
        # Not `torch.multiprocessing.spawn`: the package has a function of this name.
        spawn = sys.modules["torch.multiprocessing.spawn"]
        # In each module with the name: a script may import from any of them.
        for owner, name, operation in (
            (dist, "init_process_group", "torch.distributed.init_process_group"),
            (dist.distributed_c10d, "init_process_group", "torch.distributed.init_process_group"),
            (torch.multiprocessing, "spawn", "torch.multiprocessing.spawn"),
            (spawn, "spawn", "torch.multiprocessing.spawn"),
            (torch.multiprocessing, "start_processes", "torch.multiprocessing.start_processes"),
            (spawn, "start_processes", "torch.multiprocessing.start_processes"),
            (DistributedDataParallel, "__init__", "DistributedDataParallel"),
        ):
            expected = "a script for one process, whose work is divided"
            fix = "samestep run --own-group for a script that distributes its work; or remove this"
            refuse = _refusing(operation, expected, fix, "E_OWN_GROUP")
            stack.enter_context(replaced(owner, **{name: refuse}))
        for module, name in (
            (samestep.session, "init"),
            (samestep.global_view, "parallel"),
            (samestep.loading, "loader"),
        ):
            expected = "the script itself imports samestep, and so decides which calls are divided"
            fix = "import samestep in the script itself"
            refuse = _refusing(f"samestep.{name}", expected, fix, "E_LAUNCH")
            stack.enter_context(replaced(module, **{name: refuse}))
        stack.enter_context(
            replaced(nn.DataParallel, __init__=_init_data_parallel, forward=_forward_data_parallel)
        )
        convert = staticmethod(_convert_sync_batchnorm)
        stack.enter_context(replaced(nn.SyncBatchNorm, convert_sync_batchnorm=convert))
        if has_own_device:
            stack.enter_context(visible_devices_kept(_report_visible_devices))
        stack.enter_context(plain_start_method())
        stack.enter_context(children_ended())
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
    logger.info(text, _line_of_script())


def _forward_data_parallel(self: nn.DataParallel[Any], *inputs: Any, **options: Any) -> Any:
    device = next((parameter.device for parameter in self.module.parameters()), None)
    if device is not None and is_accelerator(device):  # scripts leave the transfer to DataParallel
        inputs, options = _pytree.tree_map_only(
            torch.Tensor, lambda value: value.to(device), (inputs, options)
        )
    return self.module(*inputs, **options)


def _convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    text = "%s: the module stays as it is: batch norm uses statistics of the whole batch"
    logger.info(text, _line_of_script())
    return module


def _report_visible_devices(value: str | None) -> None:
    text = "%s: CUDA_VISIBLE_DEVICES stays as it is (not %s): each rank has a device"
    logger.info(text, _line_of_script(), value)
