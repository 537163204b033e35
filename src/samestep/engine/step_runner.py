"""Forward and backward of the microbatches of a rank, one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from samestep.data.batch import GlobalBatch, Microbatch
from samestep.distributed.devices import is_accelerator
from samestep.distributed.rng import SeededGenerators
from samestep.distributed.world import World
from samestep.engine.batch_norm_checks import may_have_one_value, one_value_errors
from samestep.engine.buffers import AveragedBuffers, ForwardState
from samestep.engine.callbacks import Callback
from samestep.engine.gather import Roots
from samestep.engine.loss import Loss
from samestep.engine.microbatch_forward import MicrobatchForward
from samestep.engine.non_finite import flagged_by_any, has_finite_gradient
from samestep.engine.step_stats import LocalStats, StepStats, vector_length
from samestep.errors import UnusedParameterError
from samestep.reduce.tree import MicrobatchTree
from samestep.strategies.strategy import Strategy, Sum, sparse_error


@dataclass(eq=False, repr=False)
class StepRunner(ABC):
    """Computes the microbatches of a rank in one step.

    Attributes:
        model: the model before the strategy wraps it.
        names: the trained parameters that receive gradients in the backward, with their names in the model.
        replays_graphs: whether they are replayed as CUDA graphs; None if not known yet. `graphs_reason`: why not.
    """

    model: torch.nn.Module
    forward: MicrobatchForward
    strategy: Strategy
    buffers: AveragedBuffers | ForwardState
    scaler: torch.amp.GradScaler
    names: Mapping[torch.nn.Parameter, str]
    world: World
    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        self._used_in: int | None = None  # the last microbatch with all gradients
        self._is_checked = False  # a step has been computed
        self.replays_graphs: bool | None = None
        self.graphs_reason: str | None = None
        self.separate_reason: str | None = None  # why `merge: auto` computes microbatches one after another
        self.generators = SeededGenerators(self.world.device)

    def joins_check(self, batch: GlobalBatch, *, has_forward: bool) -> bool:
        """Return whether ranks may compare the step, with or without a forward function, by its statistics."""
        return False

    @abstractmethod
    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        """Leave the sum over microbatches of the gradient, divided by the number of samples, in `.grad`.

        Args:
            batch: the samples of the step.
            position: number of earlier steps; random states depend on it.
            save: this rank requests a checkpoint after the step.

        Returns:
            The sum of the statistics vectors.
        """

    def bad_losses(self, batch: GlobalBatch, stats: StepStats) -> list[int]:
        """Return the microbatches that caused a non-finite loss in the step just computed; equal on every rank."""
        return stats.bad_microbatches

    def bad_gradients(self, batch: GlobalBatch, position: int) -> list[int] | None:
        """Return the microbatches whose own gradient is not finite; None if the strategy cannot separate them."""
        return None

    @contextmanager
    def undo_on_failure(self) -> Iterator[None]:
        """Restore the state before the step if the block raises: the caller may catch the error and continue."""
        try:
            yield
        except BaseException:
            self.buffers.restore()
            self.strategy.abandon()
            raise

    def sum_stats(self, tree: MicrobatchTree, stats: LocalStats, save: bool) -> Sum:
        """Start the sum of the statistics of all microbatches; `save` is a request for a checkpoint."""
        data, length, requests = self.world.data, self.buffers.length, (self.world.stop_requested, save)
        cover, in_order = tree.cover(data.rank, data.shares), length > self.buffers.control_length
        step_hash = self.world.context.collective_check.step_hash
        vectors = stats.vectors(
            tree,
            cover,
            self.world.device,
            length,
            in_order=in_order,
            requests=requests,
            step_hash=step_hash,
            values=self.forward.step_values(),
        )
        others = self.forward.values.length(tree.microbatches) + length
        return self.strategy.sum_vectors(tree, vectors, vector_length(tree.microbatches, others))

    def finish(self, tree: MicrobatchTree, total: Sum) -> torch.Tensor:
        """Complete the gradients and return the sum of the statistics vectors."""
        self.strategy.finish(tree)
        return total()

    def read(self, batch: GlobalBatch, total: torch.Tensor, norm: torch.Tensor) -> StepStats:
        """Wait for the device, and return the statistics of the step; complete the state that the forward changed."""
        tree, values = MicrobatchTree(batch.microbatches, batch.size), self.forward.values
        lengths = self.buffers.control_length, values.length(tree.microbatches)
        status, is_wait = self.world.context.status, is_accelerator(self.world.device)
        with status.waiting("the results of the step") if is_wait else nullcontext():
            stats = StepStats.from_vector(batch.microbatches, total, lengths[0], norm, lengths[1])
        with self.undo_on_failure():
            self.world.context.collective_check.confirm(*stats.hashes)
            values.read(stats.values, tree.filled, self.world.data, is_planned=stats.are_values_planned)
            self.buffers.combine(stats.buffers, stats.control, tree, self.strategy, self.world.data)
        return stats

    def roots(self, loss: torch.Tensor, samples: int) -> Roots:
        """Return the tensor at which the backward of `loss / samples` begins, and its gradient.

        The division keeps gradients at the scale of a mean, which fp16 needs; the engine corrects the divisor later.
        """
        scaled = self.scaler.scale(loss)
        return [scaled], [torch.full_like(scaled, 1 / samples)]

    def require_gradients(self, names: Mapping[torch.nn.Parameter, str], microbatch: int | None = None) -> None:
        """Refuse parameters that received no gradient from the backward of a microbatch, or a sparse one.

        Raises:
            UnusedParameterError: some of `names` have no gradient.
            InputError: a gradient is sparse.
        """
        unused = []
        for parameter, name in names.items():
            if (gradient := parameter.grad) is None:
                unused.append(name)
            elif gradient.is_sparse:
                raise sparse_error(name)
        if unused:
            raise self._unused_error(unused, microbatch)
        self._used_in = microbatch

    def _unused_error(self, unused: Sequence[str], microbatch: int | None) -> UnusedParameterError:
        place, fix = "", "freeze them (requires_grad_(False), or model.freeze in a recipe), or use them"
        if microbatch is not None and self._used_in is not None:
            earlier = f"the loss of microbatch {self._used_in}" if self._used_in < microbatch else "an earlier step"
            place = f" of microbatch {microbatch}, but were part of {earlier}"
            fix = "find the branch of the forward that depends on the data; add the unused part with a factor of 0"
        return UnusedParameterError(
            f"{len(unused)} trained parameters are not part of the loss{place}: {', '.join(unused[:5])}",
            expected="every parameter that requires a gradient receives one from every microbatch"
            + (f"; microbatch {microbatch} gave none" if microbatch is not None else ""),
            fix=fix,
        )


class SequentialRunner(StepRunner):
    """Computes the microbatches of a rank one after another."""

    buffers: ForwardState

    def joins_check(self, batch: GlobalBatch, *, has_forward: bool) -> bool:
        tree, shares = MicrobatchTree(batch.microbatches, batch.size), self.world.data.shares
        communicates = self.strategy.forward_communicates and (tree.is_shared_equally(shares) or not has_forward)
        if self.world.size == 1 or communicates or self.world.mesh_shape.forward_communicates:
            return False  # an early message of a step could meet one of another operation
        return tree.is_shared_by_all(shares) and not may_have_one_value(batch, self.model)

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        strategy, total, stats = self.strategy, None, LocalStats()
        tree = MicrobatchTree(batch.microbatches, batch.size)
        microbatches = (*batch.local_microbatches, *batch.fillers)
        self.buffers.begin(batch.microbatches)
        # If ranks share errors, none communicates before all have computed. Fillers are not part of a reduction.
        is_equal = self.forward.function is None or tree.is_shared_equally(self.world.data.shares)
        strategy.defers_reduction = (is_shared := self.shares_errors(batch)) or not is_equal
        errors = one_value_errors(batch, self.world, is_shared=is_shared)
        with self.generators.preserved(), self.undo_on_failure(), errors:
            for microbatch in microbatches:
                last = microbatch is microbatches[-1]
                with strategy.microbatch(tree, microbatch.number, last=last), self._microbatch_context(microbatch):
                    if microbatch is not microbatches[0] or microbatch.is_filler:
                        self.buffers.restore()
                    loss = self._loss(microbatch, position)
                    if not microbatch.is_filler:
                        is_last = microbatch is batch.local_microbatches[-1]
                        stats.add(microbatch.number, loss, self.buffers.read(microbatch.number, last=is_last))
                    strategy.prepare_backward()
                    if last:
                        self.world.context.status.end_compute(len(batch.local_microbatches))
                        # Later in the first step: the ranks of a refused model have not sent different messages.
                        total = self.sum_stats(tree, stats, save) if self._is_checked and not is_shared else None
                    self._backward(microbatch, loss, batch.size)
                    if not strategy.defers_gradients:
                        self.require_gradients(self.names, microbatch.number)
                if last and strategy.defers_gradients:
                    self.require_gradients(self.names)
        self._is_checked = True
        return self.finish(tree, total or self.sum_stats(tree, stats, save))

    def shares_errors(self, batch: GlobalBatch) -> bool:
        """Return whether ranks exchange errors of norm layers before they communicate."""
        return may_have_one_value(batch, self.model) and not self.world.mesh_shape.forward_communicates

    def _microbatch_context(self, microbatch: Microbatch) -> AbstractContextManager[None]:
        """Return the context of forward and backward of a microbatch."""
        return nullcontext()

    def _loss(self, microbatch: Microbatch, position: int) -> Loss:
        for callback in (callbacks := () if microbatch.is_filler else self.callbacks):
            callback.begin_microbatch(microbatch)
        outputs, loss = self._outputs(microbatch, position)
        for callback in callbacks:
            callback.end_microbatch(self.forward.with_targets(microbatch), outputs, loss)
        return loss

    def _outputs(self, microbatch: Microbatch, position: int) -> tuple[Any, Loss]:
        return self.forward(self.strategy.module, microbatch, position)

    def _backward(self, microbatch: Microbatch, loss: Loss, samples: int) -> None:
        """Leave the gradient of a microbatch of a global batch of `samples` samples in `.grad`."""
        torch.autograd.backward(*self.roots(loss.sum, samples))

    def bad_gradients(self, batch: GlobalBatch, position: int) -> list[int] | None:
        """Compute the microbatches of this rank again, one at a time, and check each gradient."""
        if self.strategy.defers_gradients:
            return None
        bad = []
        with self.generators.preserved():
            for microbatch in batch.local_microbatches:
                self.buffers.restore()
                _, loss = self.forward(self.model, microbatch, position)
                if not has_finite_gradient([loss.sum], [None], self.names):
                    bad.append(microbatch.number)
        self.buffers.restore()
        return flagged_by_any(bad, batch, self.world)
