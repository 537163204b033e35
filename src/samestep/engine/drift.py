"""Drift: ranks that should hold the same weights, buffers and optimizer state, and do not."""

from __future__ import annotations

import hashlib
import json
import time

import torch

from samestep.engine.buffer_history import BufferHistory
from samestep.engine.checksum import checksum
from samestep.engine.ema import AveragedWeights
from samestep.engine.held import held_tensors
from samestep.errors import DriftError, InputError
from samestep.parallel.gather import gather_numbers, gather_texts
from samestep.runtime.majority import odd_ranks, ranks_text
from samestep.runtime.world import World

_NAMED = 3  # tensors that a report names


class DriftCheck:
    """Compares ranks by checksums, after every `every` steps; does nothing if that is None.

    Args:
        averaged: the moving average of the weights, if there is one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        every: int | None,
        averaged: AveragedWeights | None = None,
    ) -> None:
        self._model, self._optimizer, self._world = model, optimizer, world
        self._every = every if world.size > 1 else None
        average = averaged.tensors if averaged is not None else {}
        self._average = {f"average of {name}": tensor for name, tensor in average.items()}
        self._history = BufferHistory(model)
        self._agreed: int | None = None

    def begin_step(self, steps: int) -> None:
        """A step is about to be made, after `steps` others; what the first one starts from is compared."""
        if self._agreed is None:
            self.compare(steps)
        if self._every is not None:
            self._history.add()

    def end_step(self, steps: int) -> None:
        """Step number `steps` is done."""
        if self._every is not None and steps % self._every == 0:
            self.compare(steps)

    def compare(self, steps: int) -> None:
        """Compare now, after `steps` steps.

        Raises:
            DriftError: ranks differ; on all of them, with the same words.
        """
        if self._every is None:
            return
        held = held_tensors(self._model, self._optimizer) | self._average | self._history.tensors()
        numbers = [_signed(_shape_checksum(held)), _signed(checksum(held.values()))]
        found = dict(enumerate(gather_numbers(self._world, numbers)))
        if len(set(found.values())) > 1:
            raise self._drift(steps, found, held)
        self._agreed = steps

    def _drift(self, steps: int, found: dict[int, tuple[int, ...]], held: dict[str, torch.Tensor]) -> DriftError:
        mine = {name: f"{_shape(tensor)} {checksum([tensor]):x}" for name, tensor in held.items()}
        said = [json.loads(text) for text in gather_texts(self._world, json.dumps(mine).encode())]
        everywhere = dict.fromkeys(name for tensors in said for name in tensors)
        names = [name for name in everywhere if len({tensors.get(name) for tensors in said}) > 1]
        odd = odd_ranks(found)
        others = [rank for rank in found if rank not in odd]
        if odd:
            who = f"{ranks_text(odd)} {'no longer holds' if len(odd) == 1 else 'no longer hold'} what "
            who += f"{ranks_text(others)} hold"
        else:
            who = f"{ranks_text(others)} no longer hold the same, and it cannot be told which of them is right"
        shown = "".join(f"\n    {name}" for name in names[:_NAMED])
        more = f"\n    and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        last = f"they agreed last after step {self._agreed}" if self._agreed is not None else "they never agreed"
        return DriftError(
            f"after step {steps}, {who}; {last}\n  {len(names)} of {len(everywhere)} tensors differ:{shown}{more}",
            rule="parameters, buffers and optimizer state have the same bits on every rank",
            do=_way_out(self._agreed),
        )


def begin_checks(world: World, every: int | None) -> None:
    """Agree with the other ranks on whether this engine is checked, and if so begin to call the roll.

    Raises:
        InputError: `every` is less than 1, or not the same on every rank.
    """
    if every is not None and every < 1:
        raise InputError(f"check_every is {every}", rule="at least 1 step, or None", do="check_every=100")
    if world.size == 1:
        return
    # Rank 0's clock tells this world from an earlier one that used the same store.
    rows = gather_numbers(world, [every or 0, time.time_ns()])
    if len({row[0] for row in rows}) > 1:
        raise InputError(
            f"check_every differs between ranks: {', '.join(str(row[0] or None) for row in rows)}",
            rule="the same on every rank",
            do="give every rank's engine the same check_every",
        )
    if every is not None:
        world.roll_call.begin(rows[0][1])


def _way_out(agreed: int | None) -> str:
    checkpoint = (
        f"resume from a checkpoint of step {agreed} or before; later ones may hold the difference. "
        if agreed is not None
        else ""
    )
    return (
        f"{checkpoint}Look for code that changes the model on one rank only; if there is none and it comes back on the "
        "same machine, test its memory"
    )


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _shape_checksum(held: dict[str, torch.Tensor]) -> int:
    text = "\n".join(f"{name} {_shape(tensor)}" for name, tensor in held.items())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _signed(number: int) -> int:
    """Of 64 bits: as tensors hold it."""
    return number - 2**64 if number >= 2**63 else number
