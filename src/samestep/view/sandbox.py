"""Surroundings of a trial: whatever code of a script does inside of them leaves no trace."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

import torch
from torch import nn

from samestep.distributed.devices import tf32_off
from samestep.distributed.rng import preserved_generators
from samestep.view.recomputation import checkpointing_off
from samestep.view.slots import ModuleState


@contextmanager
def sandbox(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Restore the attributes of the module, generators and settings of torch after the block, and mute it.

    Inside, activation checkpointing and compiled code are off, the default dtype is `dtype`, and
    autocast is off.
    """
    state = ModuleState(module, hooks=True)
    with ExitStack() as stack:
        stack.callback(state.restore)
        stack.enter_context(preserved_generators(device))
        stack.enter_context(_settings(dtype))
        stack.enter_context(_muted())
        stack.enter_context(checkpointing_off())
        if (
            "torch._dynamo" in sys.modules
        ):  # otherwise nothing is compiled, and the import takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for kind in {"cpu", device.type}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _settings(dtype: torch.dtype) -> Iterator[None]:
    default = torch.get_default_dtype()
    grad = torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_default_dtype(dtype)
    try:
        with torch.autograd.set_detect_anomaly(False), tf32_off():
            yield
    finally:
        torch.set_default_dtype(default)
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextmanager
def _muted() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(sys.maxsize)
    try:
        with (
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
