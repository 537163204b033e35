"""Steps in which batch norm uses the statistics of the global batch.

Decisions: docs/decisions/batch-norm.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from samestep.data.batch import GlobalBatch, Microbatch
from samestep.engine.batch_norm_checks import one_value_errors
from samestep.engine.callbacks import Callback
from samestep.engine.data_parallel import (
    Gradients,
    Replica,
    replicate,
    require_no_hooks,
    require_untouched,
    set_gradients,
)
from samestep.engine.gather import LocalOutputs, Roots
from samestep.engine.global_loss import NO_LOSS, GlobalLoss, OutputGradients
from samestep.engine.loss import Loss
from samestep.engine.microbatch_forward import TRAINING
from samestep.engine.microbatch_threads import Threads, Track, run_in_lockstep
from samestep.engine.non_finite import flagged_by_any, has_finite_gradient
from samestep.engine.step_runner import SequentialRunner
from samestep.engine.step_stats import LocalStats, StepStats
from samestep.engine.sync_batch_norm import (
    AllGathers,
    Direction,
    Message,
    StatisticsExchange,
    norm_layers,
    synchronized_layers,
)
from samestep.errors import InputError
from samestep.reduce.tree import MicrobatchTree


class _SingleMicrobatch:
    """The only microbatch of a rank, computed by the model itself."""

    def __init__(self, exchange: StatisticsExchange) -> None:
        self._exchange = exchange

    def exchange(self, message: Message | None) -> Any:
        return self._exchange([message])


class SyncBatchNormRunner(SequentialRunner):
    """Computes all microbatches with the statistics of the global batch.

    With one microbatch per rank, each rank computes its own with the model itself, and gradients are reduced during
    backward. With several, with a loss of the whole batch, and in the first step, a rank computes its microbatches in
    lockstep, each on a replica, and gradients are reduced after the last one. So a forward that does not fit replicas
    is refused on any number of ranks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._threads = Threads("samestep-microbatch")
        self._all_gathers = AllGathers(self.world)
        self._exchange: StatisticsExchange | None = None
        self._plan: list[int] = []  # of exchanges
        self._is_checked = False  # a replica shows a forward that writes to, or reads, the model itself
        self._global_loss = GlobalLoss(self.forward, self.world.data)

    def joins_check(self, batch: GlobalBatch, *, has_forward: bool) -> bool:
        return False  # norm layers communicate before the statistics of the step

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        if self.forward.gathers and batch.size == 1:  # norm layers may raise on one rank, while others gather outputs
            raise InputError(
                "a batch of one sample with step.gather: global and step.batch_norm: sync",
                expected="at least 2 samples in each batch",
                fix="drop_last=True of the loader (data.drop_last in a recipe), or another batch size",
                code="E_INCOMPATIBLE",
            )
        tree = MicrobatchTree(batch.microbatches, batch.size)
        self._begin_exchange(batch, tree)
        nodes = [node for cover in tree.covers(self.world.shares) for node in cover]
        has_single = all(len(cover) <= 1 for cover in tree.covers(self.world.shares))
        has_single = has_single and all(stop - start == 1 for start, stop in nodes)
        if has_single and not self.forward.gathers and self._is_checked:
            require_no_hooks(self.model)  # as in lockstep, on any number of ranks
            return super().compute(batch, position, save=save)
        self.strategy.uses_replicas = True
        try:
            total = self._compute_in_lockstep(batch, tree, position, save)
        finally:
            self.strategy.uses_replicas = False
        self._is_checked = True
        return total

    def _compute_in_lockstep(self, batch: GlobalBatch, tree: MicrobatchTree, position: int, save: bool) -> torch.Tensor:
        stats, gradients = LocalStats(), dict[int, Gradients]()

        def end_microbatch(microbatch: Microbatch, replica: Replica, loss: Loss, roots: Roots) -> None:
            stats.add(microbatch.number, loss, self.buffers.read(microbatch.number, replica.module))
            copies = {replica.parameters[parameter]: name for parameter, name in self.names.items()}
            torch.autograd.backward(*roots)
            require_untouched(list(self.names))
            self.require_gradients(copies, microbatch.number)
            gradients[microbatch.number] = [copy.grad for copy in copies]

        self.buffers.begin(batch.microbatches)
        with self.undo_on_failure(), one_value_errors(batch, self.world, is_shared=self.shares_errors(batch)):
            self._run(batch, position, end_microbatch, self.callbacks)
            self.world.context.status.end_compute(len(batch.local_microbatches))
            for microbatch in batch.local_microbatches:
                set_gradients(self, batch, tree, microbatch, gradients.pop(microbatch.number))
        return self.finish(tree, self.sum_stats(tree, stats, save))

    def shares_errors(self, batch: GlobalBatch) -> bool:
        return batch.size == 1

    @contextmanager
    def _microbatch_context(self, microbatch: Microbatch) -> Iterator[None]:
        """Synchronize norm layers in forward and backward of the only microbatch of this rank."""
        exchange, uses_cache = self._exchange, torch.is_autocast_cache_enabled()
        assert exchange is not None
        torch.set_autocast_cache_enabled(False)  # as in lockstep
        try:
            with synchronized_layers(self.model, _SingleMicrobatch(exchange)):
                yield
            exchange([None])
        finally:
            torch.set_autocast_cache_enabled(uses_cache)
        self._plan = exchange.codes

    def _loss(self, microbatch: Microbatch, position: int) -> Loss:
        loss = super()._loss(microbatch, position)
        assert self._exchange is not None
        if self._exchange.has_other_ranks:  # those at different layers raise before any rank sends gradients
            self._exchange([self._exchange.end_of_forward(lambda *_: None)])
        return loss

    def bad_losses(self, batch: GlobalBatch, stats: StepStats) -> list[int]:
        """Return the microbatches with the first non-finite statistics: all others share them."""
        bad = self._global_loss.bad_microbatches() if self.forward.gathers else stats.bad_microbatches
        return self._first_bad(batch, "forward") or bad

    def bad_gradients(self, batch: GlobalBatch, position: int) -> list[int] | None:
        """Return the microbatches with the first non-finite statistics, or those whose own gradient is not finite."""
        first_bad = self._first_bad(batch, "backward")
        if first_bad:
            return first_bad
        bad: list[int] = []

        def check_microbatch(microbatch: Microbatch, replica: Replica, loss: Loss, roots: Roots) -> None:
            if not has_finite_gradient(*roots, [replica.parameters[parameter] for parameter in self.names]):
                bad.append(microbatch.number)

        self._begin_exchange(batch, MicrobatchTree(batch.microbatches, batch.size))
        self._run(batch, position, check_microbatch)
        return flagged_by_any(bad, batch, self.world)

    def _run(
        self,
        batch: GlobalBatch,
        position: int,
        end: Callable[[Microbatch, Replica, Loss, Roots], None],
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Compute the forward of each microbatch of this rank and call `end`, in lockstep with all microbatches."""
        computed: dict[int, LocalOutputs] = {}

        def global_loss(*_: torch.Tensor) -> OutputGradients:
            # Removed: graphs hold the tracks, which hold this function.
            entries = [computed.pop(microbatch.number) for microbatch in batch.local_microbatches]
            return self._global_loss.gradients(entries, batch, position, self.scaler)

        if not batch.local_microbatches:
            if self.forward.gathers:
                global_loss()
            return
        exchange = self._exchange
        assert exchange is not None

        def on_track(microbatch: Microbatch, track: Track) -> None:
            replica = replicate(self.model)
            with synchronized_layers(replica.module, track):
                compute_microbatch(microbatch, replica, track)

        def compute_microbatch(microbatch: Microbatch, replica: Replica, track: Track) -> None:
            for callback in callbacks:
                callback.begin_microbatch(microbatch)
            if self.forward.gathers:
                entry = computed[microbatch.number] = self.forward.outputs(
                    replica.module, microbatch, TRAINING, position
                )
                outputs, loss = entry.outputs, NO_LOSS
            else:
                outputs, loss = self.forward(replica.module, microbatch, position)
            for callback in callbacks:
                callback.end_microbatch(self.forward.with_targets(microbatch), outputs, loss)
            if self.forward.gathers:
                result: OutputGradients = track.exchange(exchange.end_of_forward(global_loss))
                end(microbatch, replica, result.loss_of(microbatch), result.roots(entry))
            else:
                end(microbatch, replica, loss, self.roots(loss.sum, batch.size))

        tasks = [partial(on_track, microbatch) for microbatch in batch.local_microbatches]
        run_in_lockstep(tasks, exchange, self.world.device, self._threads)
        self._plan = exchange.codes

    def _begin_exchange(self, batch: GlobalBatch, tree: MicrobatchTree) -> None:
        all_gather = self._all_gathers.between_ranks_of(tree)  # a collective of all ranks
        if not batch.local_microbatches:
            self._exchange = None
            return
        layers = norm_layers(self.model)
        width = 2 * max(layer.num_features for layer in layers.values())
        numbers = [microbatch.number for microbatch in batch.local_microbatches]
        self._exchange = StatisticsExchange(self.world, all_gather, tree, numbers, list(layers), width, self._plan)

    def _first_bad(self, batch: GlobalBatch, direction: Direction) -> list[int]:
        """Return the microbatches with the first non-finite statistics, if these occurred in `direction`."""
        exchange = self._exchange
        is_first = batch.local_microbatches and exchange is not None and exchange.bad_direction == direction
        return flagged_by_any(exchange.bad if exchange is not None and is_first else [], batch, self.world)
