"""Checks that ranks have the same settings, and hold the same weights, buffers and optimizer state."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch
from samestep.distributed.collective_check import BATCH, DATASET
from samestep.distributed.status import odd_ranks, ranks_text
from samestep.distributed.world import World, all_gather, gather_numbers
from samestep.engine.buffer_rules import buffers_of
from samestep.engine.buffers import AveragedBuffers
from samestep.engine.checksum import checksum, mix, signed
from samestep.engine.ema import AveragedWeights
from samestep.errors import InputError, RankMismatchError

_MAX_LISTED = 3  # tensors in a report


def optimizer_tensors(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors of the optimizer's state by parameter name and key, in the order of its groups."""
    names = {parameter: name for name, parameter in parameters.items()}
    return {
        (names.get(parameter, "?"), key): value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


class ConsistencyCheck:
    """Compares ranks by checksums: at the first step, on request, and after every `every` steps.

    Parameters, persistent buffers, optimizer state and the moving average are compared. With `every`, so are all other
    buffers, and hashes of the averaged buffers at the beginning of each step: a step ends with the mean of the buffers
    over microbatches, so a wrong buffer of one rank soon is the same on all ranks, and a comparison of the buffers
    alone is too late.

    Attributes:
        is_active: whether ranks are compared; not if they divide the parameters, and so hold different ones.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        every: int | None,
        averaged: AveragedWeights | None = None,
        *,
        is_active: bool = True,
    ) -> None:
        self._model, self._optimizer, self._world = model, optimizer, world
        self.is_active = is_active and world.size > 1
        self._every = every if self.is_active else None
        average = averaged.tensors if averaged is not None else {}
        self._average = {f"average of {name}": tensor for name, tensor in average.items()}
        self._buffers = AveragedBuffers(model)
        self._history: torch.Tensor | None = None  # one word per element of the buffers
        self._has_begun = False
        self._last_equal: list[int] = []  # at most one step

    def begin_step(self, steps: int) -> None:
        """Compare the initial state before the first step, and record the buffers after `steps` steps."""
        if not self._has_begun:
            self._has_begun = True
            self.compare(steps)
        if self._every is not None:  # h = h P + bits modulo 2^64, so a difference never disappears
            bits = self._buffers.read().view(torch.int64)
            self._history = bits if self._history is None else mix(self._history, bits)

    def end_step(self, steps: int) -> None:
        """Compare after step number `steps`, if due."""
        if self._every is not None and steps % self._every == 0:
            self.compare(steps)

    def compare(self, steps: int) -> None:
        """Compare now, after `steps` steps; a collective.

        Raises:
            RankMismatchError: ranks differ; raised on every rank with the same message.
        """
        if not self.is_active:
            return
        try:
            _require_equal(self._tensors(), self._world, f"after step {steps}", self._last_equal)
        except RankMismatchError:
            self._world.context.collective_check.at_end.pop(weakref.ref(self), None)  # one report suffices
            raise
        self._last_equal[:] = [steps] if self._has_begun else []

    def compare_at_end(self) -> None:
        """Compare the parameters also at the end of the world, when the engine may be gone; a collective.

        Parameters of engines that no rank uses any longer are compared now and released.
        """
        if not self.is_active:
            return
        entries = self._world.context.collective_check.at_end
        is_used = [int(reference() is not None) for reference in entries]
        columns = zip(*gather_numbers(self._world, is_used), strict=True)
        for reference, column in zip(list(entries), columns, strict=True):
            if not any(column):
                entries.pop(reference)()
        tensors = {f"parameter {name}": parameter.detach() for name, parameter in self._model.named_parameters()}
        end = "at the end of samestep.start()"
        entries[weakref.ref(self)] = partial(_require_equal, tensors, self._world, end, self._last_equal)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the compared tensors by descriptive names."""
        parameters = dict(self._model.named_parameters())
        tensors = {f"parameter {name}": parameter.detach() for name, parameter in parameters.items()}
        buffers = buffers_of(self._model, persistent=self._every is None)
        tensors |= {f"buffer {name}": buffer for name, buffer in buffers.items()}
        state = {} if self._optimizer is None else optimizer_tensors(parameters, self._optimizer)
        tensors |= {f"optimizer {key} of {name}": value for (name, key), value in state.items()}
        tensors |= self._average
        if self._history is not None and self._buffers.names:
            hashes = self._history.split([self._model.get_buffer(name).numel() for name in self._buffers.names])
            for name, part in zip(self._buffers.names, hashes, strict=True):
                tensors[f"buffer {name} at the beginning of a step"] = part
        return tensors


def _require_equal(tensors: Mapping[str, torch.Tensor], world: World, when: str, last_equal: list[int]) -> None:
    checksums = dict(enumerate(gather_numbers(world, [signed(checksum(tensors))])))
    if len(set(checksums.values())) == 1:
        return
    local = {name: f"{_shape(tensor)} {checksum({name: tensor}):x}" for name, tensor in tensors.items()}
    by_rank: list[dict[str, str]] = all_gather(local, world)
    all_names = dict.fromkeys(name for rank in by_rank for name in rank)
    names = [name for name in all_names if len({rank.get(name) for rank in by_rank}) > 1]
    odd = odd_ranks(checksums)
    others = ranks_text([rank for rank in checksums if rank not in odd])
    problem = f"{others} differ, with no majority"
    if odd:
        problem = f"{ranks_text(odd)} {'differs' if len(odd) == 1 else 'differ'} from {others}"
    listed = "".join(f"\n    {name}" for name in names[:_MAX_LISTED])
    more = f"\n    and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    last, fix = "never equal", "seed before the model is built (torch.manual_seed(0)), and load weights on every rank. "
    for step in last_equal:
        last = f"last equal after step {step}"
        fix = f"resume from a checkpoint of step {step} or before; later ones may contain the difference. "
    raise RankMismatchError(
        f"{when}, {problem}; {last}\n  {len(names)} of {len(all_names)} tensors differ:{listed}{more}",
        expected="parameters, buffers and optimizer state have the same bits on every rank",
        fix=f"{fix}Look for code that changes the model on one rank only; if there is none and the error recurs "
        "on the same machine, test its memory",
    )


def settings_of(config: StepConfig, optimizer: torch.optim.Optimizer, loss: object) -> dict[str, str]:
    """Return the settings that are equal on every rank, as text by kind."""
    groups = [_plain(group) for group in optimizer.param_groups]
    options = _plain(vars(loss)) if isinstance(loss, torch.nn.Module) else ""
    return {
        "configuration of the step": repr(config),
        "optimizer": f"{type(optimizer).__qualname__} {groups}",
        "loss": f"{getattr(loss, '__qualname__', type(loss).__qualname__)} {options}",
    }


def facts_of_step(
    batch: GlobalBatch, optimizer: torch.optim.Optimizer, *, is_current: bool, is_verified: bool
) -> dict[str, str]:
    """Return the properties of a step that are equal on every rank.

    Args:
        batch: batch of the step.
        optimizer: optimizer of the step.
        is_current: the parameters are those of the last step.
        is_verified: `samestep verify` compares most properties itself, and finds the cause of a difference.
    """
    facts = {BATCH: batch.identity, "set of parameters": str(is_current)}
    if not is_verified:
        rates = [group["lr"] for group in optimizer.param_groups]
        facts[DATASET] = batch.dataset
        facts["learning rate"] = repr([rate for rate in rates if not isinstance(rate, torch.Tensor)])
    return facts


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, int | float | str) or value is None}


def require_equal_interval(world: World, check_every: int | None) -> None:
    """Require the same interval of checks on every rank; a collective.

    Raises:
        InputError: the interval is less than 1, or differs between ranks.
    """
    if check_every is not None and check_every < 1:
        raise InputError(f"check_every is {check_every}", "at least 1 step, or None", "check_every=100", code="E_VALUE")
    if world.size == 1:
        return
    intervals = [interval for (interval,) in gather_numbers(world, [check_every or 0])]
    if len(set(intervals)) > 1:
        raise InputError(
            f"check_every differs between ranks: {', '.join(str(value or None) for value in intervals)}",
            expected="the same value on every rank",
            fix="pass the same check_every to every rank's engine",
            code="E_VALUE",
        )


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
