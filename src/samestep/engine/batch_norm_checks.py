"""Checks of training modes, and of the number of samples from which batch norm computes its statistics."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch
from samestep.distributed.world import World, all_gather
from samestep.errors import InputError
from samestep.microbatches import MIN_BATCH_NORM_SAMPLES
from samestep.units import plural

_TORCH_MESSAGE = "Expected more than 1 value per channel when training"


class FewSamplesWarning(UserWarning):
    """Batch norm computes statistics of few samples, because a number of microbatches was set."""


def few_samples_message(batch_size: int, microbatches: int) -> str | None:
    """Return a warning if microbatches of a batch are small for the statistics of batch norm; None otherwise."""
    samples = max(1, batch_size // microbatches)
    if microbatches == 1 or samples >= MIN_BATCH_NORM_SAMPLES:
        return None
    return (
        f"batch norm computes its statistics from {plural(samples, 'sample')}: {microbatches} microbatches of "
        f"a batch of {batch_size}. Models can train worse than with the {MIN_BATCH_NORM_SAMPLES} or more of "
        "`microbatches: auto`; `step.batch_norm: sync` uses the statistics of the whole batch"
    )


def uses_batch_statistics(model: torch.nn.Module) -> bool:
    """Return whether a norm layer of the model uses statistics of the batch in its present mode.

    Torch's synchronized layers count in every mode: DDP supports them on GPUs only.
    """
    return any(
        isinstance(module, torch.nn.SyncBatchNorm)
        or (isinstance(module, _BatchNorm) and (module.training or module.running_mean is None))
        for module in model.modules()
    )


def may_have_one_value(batch: GlobalBatch, model: torch.nn.Module) -> bool:
    """Return whether a norm layer may compute statistics of one value per channel; equal on every rank."""
    return any(stop - start == 1 for start, stop in batch.bounds) and uses_batch_statistics(model)


@contextmanager
def one_value_errors(batch: GlobalBatch, world: World, *, is_shared: bool) -> Iterator[None]:
    """Explain the error of a norm layer that receives one value per channel.

    With `is_shared`, every rank raises the error, also those without samples; a collective at the end of the block,
    which has no other collectives.
    """
    own: InputError | None = None
    try:
        yield
    except (ValueError, InputError) as error:
        own = _one_value_error(batch, error)
        if own is None or (own is error and not is_shared):
            raise
        if not is_shared:
            raise own from error
    if is_shared:
        arguments = None if own is None else [own.value, own.expected, own.fix, own.code]
        for value, expected, fix, code in filter(None, all_gather(arguments, world)):
            raise InputError(value, expected, fix, code=code)


def _one_value_error(batch: GlobalBatch, error: ValueError | InputError) -> InputError | None:
    """Return the error of statistics that cannot be computed; None for another error."""
    if isinstance(error, InputError):  # with statistics of the global batch
        return error if error.code == "E_BATCH_NORM" else None
    if _TORCH_MESSAGE not in str(error):
        return None
    smallest = min(stop - start for start, stop in batch.bounds if stop > start)
    return InputError(
        f"batch norm cannot compute statistics: a batch of {plural(batch.size, 'sample')} has "
        f"{plural(batch.microbatches, 'microbatch')}, the smallest with {plural(smallest, 'sample')}, and a layer has "
        "one value per channel for each sample",
        expected="at least 2 samples in each microbatch",
        fix="drop_last=True of the loader (data.drop_last in a recipe), fewer microbatches, or another batch size",
        code="E_BATCH_NORM",
    )


class ModeWarnings:
    """Warnings of rank 0, each once: of few samples for batch norm in the first step, and of evaluation mode."""

    def __init__(self, config: StepConfig, *, is_main: bool) -> None:
        self._checks_batch = is_main and config.batch_norm == "microbatch"
        self._checks_mode = is_main

    def begin_step(self, model: torch.nn.Module, batch: GlobalBatch) -> None:
        """Warn before a step; the line of the warning is the user's `engine.step()`."""
        stack_level = 4
        if self._checks_batch:
            self._checks_batch = False
            message = few_samples_message(batch.size, batch.microbatches)
            if message is not None and uses_batch_statistics(model):
                warnings.warn(message, FewSamplesWarning, stacklevel=stack_level)
        if self._checks_mode and not model.training:
            self._checks_mode = False
            warnings.warn(
                "the model is in evaluation mode: dropout is off, and batch norm uses its running statistics, as in a "
                "plain loop. If this is not intended, call model.train() before the steps",
                stacklevel=stack_level,
            )
