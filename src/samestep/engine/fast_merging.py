"""Several microbatches of a rank in one forward and backward, under `reduction: fast`.

Decisions: docs/decisions/speed.md
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch, Microbatch, channels_last
from samestep.distributed.logging import logger
from samestep.distributed.rng import generator_state, microbatch_seed
from samestep.distributed.world import World, all_gather
from samestep.engine.batch_norm_checks import may_have_one_value, uses_batch_statistics
from samestep.engine.fast_merging_functions import MergedFunctions
from samestep.engine.loss import Loss
from samestep.engine.merge_check import MergeCheck
from samestep.engine.microbatch_forward import TRAINING, call_model
from samestep.engine.model_changes import ModelSignature
from samestep.engine.nested_data import join, split, why_not_joined
from samestep.engine.step_runner import SequentialRunner
from samestep.engine.step_stats import LocalStats
from samestep.engine.tensor_bits import copy_tensors
from samestep.microbatches import most_owned
from samestep.reduce.tree import MicrobatchTree
from samestep.strategies.ddp import DdpStrategy
from samestep.strategies.strategy import SingleStrategy, Strategy

SEPARATE = "the microbatches of a rank are computed one after another"


class MergedRunner(SequentialRunner):
    """Computes the microbatches of a rank in one forward and backward, if the model computes them as each alone.

    The first step with several microbatches on a rank decides. A change of the model between steps repeats the check on
    this rank, unless changes are frequent. A later step that reads values or draws random numbers for all samples at
    once ends the merging of this rank. A step whose inputs have different shapes, or in which a microbatch has no
    samples, is computed one microbatch after another.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_merged: bool | None = None  # None: not decided
        self._signature = ModelSignature(self.model, self.forward.outside)

    def joins_check(self, batch: GlobalBatch, *, has_forward: bool) -> bool:
        return super().joins_check(batch, has_forward=has_forward) and not self._decides(batch)

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        if self.forward.function is not None:
            self.separate_reason = "a forward function"
        if self._decides(batch):
            self._decide(batch, position)
        if self._is_merged and self._fits(batch) and self._may_still_merge(batch, position):
            return self._compute_merged(batch, position, save=save)
        return super().compute(batch, position, save=save)

    def _decides(self, batch: GlobalBatch) -> bool:
        """Return whether the ranks decide in this step; equal on every rank."""
        is_candidate = self._is_merged is None and self.forward.function is None
        return is_candidate and most_owned(batch.microbatches, self.world.data.shares) > 1

    def _decide(self, batch: GlobalBatch, position: int) -> None:
        """Check the model with samples of this rank, and decide for all ranks; a collective."""
        self._signature.has_changed()  # later steps are compared with this one
        own: str | None = ""  # not checked
        if sum(one.size > 0 for one in batch.local_microbatches) > 1 and self._has_statistics(batch):
            own = self._check(batch, position)
        reasons = all_gather(own, self.world.data)
        self.separate_reason = next(filter(None, reasons), None)
        if self.separate_reason is not None or None in reasons:  # some rank has checked
            self._is_merged = self.separate_reason is None

    def _check(self, batch: GlobalBatch, position: int) -> str | None:
        """Return the reason for which the model cannot compute the microbatches of this rank together."""
        microbatches = [one for one in batch.local_microbatches if one.size]
        self.buffers.begin(batch.microbatches)
        with self.generators.preserved(), self.undo_on_failure():
            reason = MergeCheck(self.model, self.forward, position).reason(microbatches)
        self.buffers.restore()
        return reason

    def _may_still_merge(self, batch: GlobalBatch, position: int) -> bool:
        """Check the model again if it has changed since the last step."""
        if not self._signature.has_changed():
            return True
        is_often = self._signature.changes_often
        reason = "the model changes between steps" if is_often else self._check(batch, position)
        if reason is not None:
            self._end_merging(reason, position)
        return reason is None

    def _end_merging(self, reason: str, position: int) -> None:
        """Compute one after another from now on, on this rank alone: both ways have the same messages."""
        self._is_merged, self.separate_reason = False, f"{reason}, from step {position + 1} on"
        logger.warning("%s: %s", SEPARATE, self.separate_reason)

    def _has_statistics(self, batch: GlobalBatch) -> bool:
        """Return whether each microbatch of this rank has enough samples for batch norm."""
        if may_have_one_value(batch, self.model):
            return False
        return all(one.size > 1 for one in batch.local_microbatches) or not uses_batch_statistics(self.model)

    def _fits(self, batch: GlobalBatch) -> bool:
        microbatches = batch.local_microbatches
        if self.forward.function is not None or batch.fillers or len(microbatches) < 2:
            return False
        if not all(one.size for one in microbatches) or not self._has_statistics(batch):
            return False
        inputs, sizes = [one.pair[0] for one in microbatches], [one.size for one in microbatches]
        return why_not_joined(inputs, sizes) is None

    def _compute_merged(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        strategy, total = self.strategy, None
        strategy.defers_reduction = False
        tree, stats = MicrobatchTree(batch.microbatches, batch.size), LocalStats()
        self.buffers.begin(batch.microbatches)
        merged = strategy.microbatch(tree, batch.local_microbatches[-1].number, last=True)
        with self.generators.preserved(), self.undo_on_failure(), merged:
            losses = self._losses(batch.local_microbatches, position, stats)
            if losses is None:
                stats = LocalStats()
                losses = [self._separate_losses(tree, batch.local_microbatches, position, stats)]
            strategy.prepare_backward()
            self.world.context.status.end_compute(len(batch.local_microbatches))
            total = self.sum_stats(tree, stats, save) if self._is_checked else None
            roots = [self.roots(loss.sum, batch.size) for loss in losses]
            torch.autograd.backward(
                [tensor for tensors, _ in roots for tensor in tensors],
                [gradient for _, gradients in roots for gradient in gradients],
            )
            if not strategy.defers_gradients:
                self.require_gradients(self.names)
        self._is_checked = True
        return self.finish(tree, total or self.sum_stats(tree, stats, save))

    def _losses(self, microbatches: Sequence[Microbatch], position: int, stats: LocalStats) -> list[Loss] | None:
        """Return the loss of each microbatch, and add statistics and buffers of each to `stats`.

        None if the forward did something for all samples at once that it did not in the first step.
        """
        for microbatch in microbatches:
            for callback in self.callbacks:
                callback.begin_microbatch(microbatch)
        forward, losses = self.forward, list[Loss]()
        sizes = [microbatch.size for microbatch in microbatches]
        seeds = [microbatch_seed(TRAINING, forward.seed, position, microbatch.number) for microbatch in microbatches]
        functions = MergedFunctions(self.model, sizes, seeds)
        inputs = join([microbatch.pair[0] for microbatch in microbatches])
        inputs = channels_last(inputs) if forward.config.channels_last else inputs
        with forward.outside.unchanged(None), forward.context(TRAINING, position, microbatches[0].number):
            before = generator_state(self.world.device)
            with functions:
                outputs = call_model(self.strategy.module, inputs)
            parts = split(outputs, sizes)
            for number, (microbatch, part) in enumerate(zip(microbatches, parts, strict=True)):
                losses.append(forward.combine(microbatch, forward.losses_of_outputs(microbatch, part)))
                self._add(stats, microbatch, losses[-1], functions, number, last=microbatch is microbatches[-1])
            if functions.has_read or generator_state(self.world.device) != before:
                action = "reads values" if functions.has_read else "draws random numbers"
                self._end_merging(f"the forward {action} for all samples at once", position)
                return None
        for microbatch, part, loss in zip(microbatches, parts, losses, strict=True):
            for callback in self.callbacks:
                callback.end_microbatch(forward.with_targets(microbatch), part, loss)
        return losses

    def _separate_losses(
        self, tree: MicrobatchTree, microbatches: Sequence[Microbatch], position: int, stats: LocalStats
    ) -> Loss:
        """Compute all but the last microbatch completely, and return the loss of the last one."""
        for microbatch in microbatches:
            self.buffers.restore()
            outputs, loss = self.forward(self.model, microbatch, position)
            stats.add(
                microbatch.number, loss, self.buffers.read(microbatch.number, last=microbatch is microbatches[-1])
            )
            if microbatch is not microbatches[-1]:
                self._backward(microbatch, loss, tree.samples)
                self.strategy.add_gradients(tree, microbatch.number)
            for callback in self.callbacks:
                callback.end_microbatch(self.forward.with_targets(microbatch), outputs, loss)
        return loss

    def _add(
        self, stats: LocalStats, microbatch: Microbatch, loss: Loss, functions: MergedFunctions, row: int, *, last: bool
    ) -> None:
        with torch.no_grad():
            pairs = [pair for running in functions.running for pair in running.rows(row)]
            copy_tensors([buffer for buffer, _ in pairs], [values for _, values in pairs])
        stats.add(microbatch.number, loss, self.buffers.read(microbatch.number, last=last))


def why_separate(
    config: StepConfig, world: World, strategy: Strategy, *, sync_batch_norm: bool, is_witnessed: bool
) -> str | None:
    """Return the option for which the microbatches of a rank are computed one after another; None if there is none."""
    is_replicated = isinstance(strategy, SingleStrategy | DdpStrategy)
    options = {
        "step.batch_norm: sync": sync_batch_norm,
        "several devices of a rank": world.strategy.name in ("dp", "device_map"),
        f"strategy {strategy.name}": not is_replicated,
        "step.gather: global": config.gather == "global",
        "step.compile": config.compile,
        "step.recompute": bool(config.recompute),
        "step.tensor_slices": config.tensor_slices > 1,
        "witnessed steps": is_witnessed,
    }
    return next((option for option, is_set in options.items() if is_set), None)
