"""Refused operations of unchanged scripts: process groups, training in children; wrappers of one device."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree

import samestep.global_view
import samestep.loading
import samestep.session
from samestep.distributed.devices import is_accelerator
from samestep.distributed.env import visible_devices_kept
from samestep.distributed.logging import logger
from samestep.errors import EXIT_DONE, EXIT_FAILED, InputError
from samestep.launcher.worker import exit_process
from samestep.script.replaced import replaced
from samestep.view.in_step import script_line

_REPORT_BYTES = 4096  # of a child process
_INVALID_DEVICE = 101  # cudaErrorInvalidDevice, CUDA Runtime API


def _line_of_script() -> str:
    """Return file and line of the script that has called."""
    file, line = script_line(sys._getframe(1))
    return f"{file}:{line}"


def _refusing(what: str, expected: str, fix: str) -> Callable[..., NoReturn]:
    """Return a function that raises an `InputError` with the line of the script."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise InputError(
            f"{_line_of_script()}: {what} in an unchanged script", expected, fix, code="E_LAUNCH"
        )

    return refuse


@contextmanager
def refusals(*, has_own_device: bool) -> Iterator[None]:
    """Inside the block, refuse what would run beside the global view, and make wrappers of one device transparent.

    Args:
        has_own_device: each rank computes on an accelerator of its own; CUDA_VISIBLE_DEVICES stays
            as it is then.
    """
    with ExitStack() as stack:
        spawn = sys.modules[
            "torch.multiprocessing.spawn"
        ]  # the package has a function of this name
        for owner, name, what in (
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
            stack.enter_context(replaced(owner, **{name: _refusing(what, expected, fix)}))
        homes = {
            "init": samestep.session,
            "parallel": samestep.global_view,
            "loader": samestep.loading,
        }
        for name, module in homes.items():
            expected = (
                "the script itself imports samestep, so that only what it asks for is divided"
            )
            refuse = _refusing(f"samestep.{name}", expected, "import samestep in the script itself")
            stack.enter_context(replaced(module, **{name: refuse}))
        stack.enter_context(
            replaced(nn.DataParallel, __init__=_init_data_parallel, forward=_forward_data_parallel)
        )
        stack.enter_context(
            replaced(nn.SyncBatchNorm, convert_sync_batchnorm=staticmethod(_convert_sync_batchnorm))
        )
        if has_own_device:
            stack.enter_context(visible_devices_kept(_report_visible_devices))
            stack.enter_context(_own_devices_alone())
        stack.enter_context(plain_start_method())
        stack.enter_context(_children_without_training())
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
    logger.info(
        "%s: DataParallel is the module itself: Samestep divides its calls", _line_of_script()
    )


def _forward_data_parallel(self: nn.DataParallel[Any], *inputs: Any, **options: Any) -> Any:
    device = next((parameter.device for parameter in self.module.parameters()), None)
    if device is not None and is_accelerator(device):  # scripts leave the transfer to DataParallel
        inputs, options = _pytree.tree_map_only(
            torch.Tensor, lambda value: value.to(device), (inputs, options)
        )
    return self.module(*inputs, **options)


def _convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    logger.info(
        "%s: the module stays as it is: batch norm uses statistics of the whole batch",
        _line_of_script(),
    )
    return module


def _report_visible_devices(value: str | None) -> None:
    logger.info(
        "%s: CUDA_VISIBLE_DEVICES stays as it is (not %s): each rank has a device",
        _line_of_script(),
        value,
    )


@contextmanager
def _own_devices_alone() -> Iterator[None]:
    """Name the option with which a process has several devices, if the script uses one that is not there.

    Raises:
        InputError: it does.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        if getattr(error, "error_code", None) != _INVALID_DEVICE:
            raise
        raise InputError(
            f"the script uses a device that its process does not have: {error}",
            expected="a script for one device, cuda:0: the other devices belong to other processes",
            fix="--devices-per-process with the number of devices on which the script places parts of its model",
            code="E_DEVICES",
        ) from error


@contextmanager
def plain_start_method() -> Iterator[None]:
    """Let `multiprocessing` start processes as in plain Python: that of a rank would use the server of the ranks."""
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)  # the default of the system
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)


@contextmanager
def _children_without_training() -> Iterator[None]:
    """End the script if a forked child trains: its backward or step raises, and this process when the child has ended.

    Raises:
        InputError: at the end of the block, if the script has not waited for the child.
    """
    fork = os.fork
    waitpid = os.waitpid
    report = mmap.mmap(-1, _REPORT_BYTES)  # shared with children

    def forked() -> int:
        process = fork()
        if process == 0:
            torch.autograd.backward = refuse
            register_optimizer_step_pre_hook(refuse)
        return process

    def refuse(*_: Any, **__: Any) -> NoReturn:
        line = _line_of_script().encode()[: _REPORT_BYTES - 1]
        report[: len(line)] = line
        raise error(line)

    def error(line: bytes) -> InputError:
        return InputError(
            f"{line.decode()}: a child process trains in an unchanged script",
            expected="training in the process of the script; children may read and prepare data",
            fix="samestep run --processes 1, or --own-group for a script that distributes its work",
            code="E_LAUNCH",
        )

    def require_no_training() -> None:
        line = report[:].rstrip(b"\0")
        if line:
            raise error(line)

    def waited(process: int, options: int) -> tuple[int, int]:
        result = waitpid(process, options)
        # A pool, which polls, also in a thread and while an exception is on its way, must be able
        # to end.
        is_main = threading.current_thread() is threading.main_thread()
        if options == 0 and is_main and sys.exc_info()[0] is None:
            require_no_training()
        return result

    with report, replaced(os, fork=forked, waitpid=waited), children_ended():
        yield
        require_no_training()


@contextmanager
def children_ended() -> Iterator[None]:
    """End forked children at the end of the block: a child must not take part in the end of the rank."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            _end_child(sys.exc_info()[1])


def _end_child(error: BaseException | None) -> NoReturn:
    """End a child process with the exit code of the script, which it has run to its end."""
    code = error.code if isinstance(error, SystemExit) else error
    if code is not None and not isinstance(code, int):
        if not isinstance(error, InputError):  # the parent reports that the child trains
            traceback.print_exception(error)
        code = EXIT_FAILED
    exit_process(code or EXIT_DONE)
