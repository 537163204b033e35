"""Forward and backward of several shards at the same time, by threads: the way of torch's `nn.DataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from samestep.config import StepRules
from samestep.data.batch import GlobalBatch, Shard
from samestep.data.transfer import move
from samestep.engine.buffers import ShardedBuffers
from samestep.engine.gradients import ShardGradients
from samestep.engine.replica import replicate, require_untouched
from samestep.engine.tally import Tally, read_tally, tally_length
from samestep.errors import InputError
from samestep.parallel.tree import ShardTree
from samestep.runtime.own_devices import own_devices
from samestep.runtime.random_state import preserved_generators, shared_state
from samestep.runtime.thread_state import ThreadState
from samestep.runtime.threads import Threads

Weights = dict[nn.Parameter, torch.Tensor]
# What a shard tells all others, and the gradients of the trained parameters.
Computed = tuple[torch.Tensor, list[torch.Tensor | None]]


class GradientsAtOnce(ShardGradients):
    """Computes as many shards at a time as this rank has devices, each on a replica; their sum is as ever.

    A process has one set of random generators for its threads. A model that draws from them computes its shards one
    after another, as one device does; that it draws is seen in the first group of shards, whose work is then dropped.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._devices = own_devices(self._world)
        self._threads = Threads("samestep-device")
        # Observers look at one shard at a time.
        self.takes_turns = bool(self._observers)

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> Tally:
        _require_work_for_all(len(self._devices), batch.shards)
        if not self.takes_turns:
            found = self._at_once(batch, position, save)
            if found is not None:
                return found
            self.takes_turns = True
        return super().compute(batch, position, save=save)

    def _at_once(self, batch: GlobalBatch, position: int, save: bool) -> Tally | None:
        """The same, several shards at a time; None, with nothing changed, where the model draws."""
        tree = ShardTree(batch.shards, batch.size)
        vectors: dict[int, torch.Tensor] = {}
        weights = self._scattered()
        self._buffers.begin()
        with preserved_generators(self._world.device), self._undone_on_failure():
            before = shared_state()
            for first in range(0, len(batch.parts), len(self._devices)):
                group = batch.parts[first : first + len(self._devices)]
                computed = self._group(group, weights, batch, position, save)
                if shared_state() != before:
                    self._strategy.abandon()
                    return None
                for part, (vector, gradients) in zip(group, computed, strict=True):
                    vectors[part.number] = vector
                    with self._strategy.shard(tree, part.number, last=part is batch.parts[-1]):
                        for parameter, gradient in zip(self._names, gradients, strict=True):
                            parameter.grad = gradient
            self._world.pulse.arrive(len(batch.parts))
        total = self._strategy.sum_vectors(tree, vectors, tally_length(batch.shards, self._buffers.length))
        self._strategy.finish(tree)
        return read_tally(batch.shards, total.wait())

    def _scattered(self) -> list[Weights]:
        """The weights of this step on each device; the same memory where a device is the model's own."""
        if self._scaler.is_enabled():
            self._scaler.scale(torch.zeros((), device=self._world.device))  # it makes its scale at the first use
        parameters = list(self._model.parameters())
        return [{p: p.detach().to(device, non_blocking=True) for p in parameters} for device in self._devices]

    def _group(
        self, group: Sequence[Shard], weights: Sequence[Weights], batch: GlobalBatch, position: int, save: bool
    ) -> list[Computed]:
        """Forward and backward of some shards, each on a device of its own."""

        def shard_on(number: int) -> Computed:
            with _lasting_casts():
                return self._shard(number, group[number], weights[number], batch, position, save)

        states = [ThreadState(device) for device in self._devices[: len(group)]]
        try:
            return _all_of([lambda n=n: shard_on(n) for n in range(len(group))], states, self._threads)  # type: ignore[misc]
        finally:
            torch.clear_autocast_cache()

    def _shard(
        self, number: int, part: Shard, weights: Weights, batch: GlobalBatch, position: int, save: bool
    ) -> Computed:
        device, home = self._devices[number], self._world.device
        replica = replicate(self._model, device, weights)
        buffers = ShardedBuffers(replica.module)
        here = part._replace(data=move(part.data, device))
        _, loss = self._forward(replica.module, here, "shard", position, beside=True)
        vector = self._vector(batch, part, loss, buffers, save)
        aliases = {replica.parameters[parameter]: name for parameter, name in self._names.items()}
        self._backward(loss.sum, batch.size)
        require_untouched(list(self._names))
        self._require_used(aliases)
        return vector, [alias.grad.to(home) if alias.grad is not None else None for alias in aliases]


def require_replicas(rules: StepRules, *, joins: bool) -> None:
    """Refuse rules that copies of a model on several devices cannot follow.

    Args:
        joins: shards meet in norm layers.
    """
    if joins:
        raise InputError(
            "strategy dp with batch_norm: sync",
            rule="under dp each norm layer sees the shard of its own replica, as nn.DataParallel has it",
            do="--strategy ddp, or set batch_norm: shard",
        )
    if rules.compile or rules.recompute:
        raise InputError(
            f"strategy dp with step.{'compile' if rules.compile else 'recompute'}",
            rule="dp computes on copies of the model, which neither compiled modules nor those that are computed again "
            "allow",
            do=f"--strategy ddp, or leave step.{'compile' if rules.compile else 'recompute'} out",
        )


def _require_work_for_all(devices: int, shards: int) -> None:
    if devices > shards:
        raise InputError(
            f"strategy dp has {devices} devices but the recipe has {shards} shards, so {devices - shards} would have "
            "nothing to do",
            rule="devices <= shards",
            do=f"set strategy.devices: {shards}",
        )


def _all_of(tasks: Sequence[Callable[[], Computed]], states: Sequence[ThreadState], threads: Threads) -> list[Computed]:
    """What each task returns, all of them run at the same time.

    Raises:
        BaseException: what the first of those that fail has raised, when all have ended.
    """
    ended: SimpleQueue[int] = SimpleQueue()
    values: dict[int, Computed] = {}
    failures: dict[int, BaseException] = {}

    def run(number: int) -> None:
        def task() -> None:
            values[number] = tasks[number]()

        try:
            states[number].run(task)
        except BaseException as error:  # boundary: raised in the thread that waits for all
            failures[number] = error
        finally:
            ended.put(number)

    try:
        for number in range(len(tasks)):
            threads.submit(number, lambda number=number: run(number))  # type: ignore[misc]
        for _ in tasks:
            ended.get()
        if failures:
            raise failures[min(failures)]
    except BaseException:
        threads.end()
        raise
    finally:
        failures.clear()  # what was raised holds frames, which hold the graphs of shards
    return [values[number] for number in range(len(tasks))]


@contextmanager
def _lasting_casts() -> Iterator[None]:
    """Keep what autocast casts until all shards of a group are done, each weight cast once, as on one device.

    There is one cache for all threads, and a thread that leaves autocast for good empties it under the others' hands.
    """
    torch.set_autocast_cache_enabled(True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
