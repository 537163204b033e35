"""Steps of strategy `dp`: the microbatches of one process on several devices, as in `nn.DataParallel`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial

import torch

from samestep.data.batch import GlobalBatch, Microbatch, move
from samestep.distributed.devices import rank_devices
from samestep.distributed.rng import generator_state
from samestep.engine.batch_norm_checks import one_value_errors
from samestep.engine.loss import Loss
from samestep.engine.microbatch import SequentialRunner
from samestep.engine.microbatch_threads import Threads, ThreadState
from samestep.engine.replicas import Gradients, Weights, replicate, require_untouched, set_gradients
from samestep.engine.step_stats import LocalStats
from samestep.errors import InputError
from samestep.strategies.reduction import MicrobatchTree

# Loss and buffers of a microbatch, and the gradients of the trained parameters.
Computed = tuple[Loss, torch.Tensor | None, Gradients]


@contextmanager
def _shared_autocast_cache() -> Iterator[None]:
    """Cast each weight once per group of microbatches, as on one device.

    All threads share one autocast cache, and a thread that leaves the outermost autocast context clears the cache.
    """
    torch.set_autocast_cache_enabled(True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


class DataParallelRunner(SequentialRunner):
    """Computes one microbatch per device of the rank at the same time, each on a replica, as `torch.nn.DataParallel`.

    All threads of a process share its random generators. A model that draws from them is computed sequentially, as on
    one device: the first group of microbatches shows whether the model draws, and is then computed again.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._devices = rank_devices(self.world)
        self._threads = Threads("samestep-device")
        self.is_sequential = bool(self.callbacks)  # callbacks expect one microbatch at a time

    def joins_check(self, batch: GlobalBatch, *, has_forward: bool) -> bool:
        return False  # a group of microbatches may be computed again

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        devices, microbatches = len(self._devices), batch.microbatches
        if devices > microbatches and not batch.begin.samples:  # a last batch may have fewer microbatches
            raise InputError(
                f"strategy dp has {devices} devices but the recipe has {microbatches} microbatches, so "
                f"{devices - microbatches} devices would be idle",
                expected="devices <= microbatches",
                fix=f"set strategy.devices: {microbatches}",
                code="E_TOO_MANY_RANKS",
            )
        total = None if self.is_sequential else self._concurrent(batch, position, save)
        if total is None:
            self.is_sequential = True
            return super().compute(batch, position, save=save)
        return total

    def _concurrent(self, batch: GlobalBatch, position: int, save: bool) -> torch.Tensor | None:
        """Compute the step with one thread per device; return None, with nothing changed, if the model draws."""
        tree, stats = MicrobatchTree(batch.microbatches, batch.size), LocalStats()
        weights = self._device_weights()
        self.buffers.begin(batch.microbatches)
        errors = one_value_errors(batch, self.world, is_shared=False)
        with self.generators.preserved(), self.undo_on_failure(), errors:
            before = generator_state()
            for first in range(0, len(batch.local_microbatches), len(self._devices)):
                group = batch.local_microbatches[first : first + len(self._devices)]
                computed = self._group(group, weights, batch, position)
                if generator_state() != before:
                    self.strategy.abandon()
                    return None
                for microbatch, (loss, buffers, gradients) in zip(group, computed, strict=True):
                    stats.add(microbatch.number, loss, buffers)
                    set_gradients(self, batch, tree, microbatch, gradients)
            self.world.context.status.end_compute(len(batch.local_microbatches))
        return self.finish(tree, self.sum_stats(tree, stats, save))

    def _device_weights(self) -> list[Weights]:
        """Copy the weights to each device; the model's own device uses the same memory."""
        if self.scaler.is_enabled():
            self.scaler.scale(torch.zeros((), device=self.world.device))  # creates the scale at the first call
        parameters = list(self.model.parameters())
        return [{p: p.detach().to(device, non_blocking=True) for p in parameters} for device in self._devices]

    def _group(
        self, group: Sequence[Microbatch], weights: Sequence[Weights], batch: GlobalBatch, position: int
    ) -> list[Computed]:
        """Compute forward and backward of some microbatches at the same time, each on its own device."""
        futures: list[Future[Computed]] = []
        computed = []
        try:
            for number, microbatch in enumerate(group):
                task = partial(self._microbatch, number, microbatch, weights[number], batch, position)
                futures.append(self._threads.submit(number, partial(ThreadState(self._devices[number]).run, task)))
            wait(futures)
            while futures:
                computed.append(futures.pop(0).result())
            return computed
        except BaseException:
            self._threads.end()
            raise
        finally:
            futures.clear()  # an exception holds frames, which hold the graphs of microbatches
            torch.clear_autocast_cache()

    @_shared_autocast_cache()
    def _microbatch(
        self, number: int, microbatch: Microbatch, weights: Weights, batch: GlobalBatch, position: int
    ) -> Computed:
        replica = replicate(self.model, self._devices[number], weights)
        on_device = microbatch._replace(data=move(microbatch.data, self._devices[number]))
        _, loss = self.forward(replica.module, on_device, position, concurrent=True)
        buffers = self.buffers.read(microbatch.number, replica.module)
        copies = {replica.parameters[parameter]: name for parameter, name in self.names.items()}
        torch.autograd.backward(*self.roots(loss.sum, batch.size))
        require_untouched(list(self.names))
        self.require_gradients(copies)
        detached = Loss(loss.sum.detach(), loss.count)
        return detached, buffers, [None if copy.grad is None else copy.grad.to(self.world.device) for copy in copies]
