"""Forward and backward of microbatches: random state, precision, model, loss, gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from samestep.config import Precision, StepConfig
from samestep.data.batch import GlobalBatch, Microbatch, channels_last, move_next_to
from samestep.distributed.rng import Purpose, derive_seed, preserved_generators, seed_device, seed_generators
from samestep.distributed.world import World
from samestep.engine.buffers import MicrobatchBuffers
from samestep.engine.callbacks import Callback
from samestep.engine.loss import Loss, StepLoss
from samestep.engine.non_finite import flagged_by_any, has_finite_gradient
from samestep.engine.step_stats import StepStats, stats_vector, vector_length
from samestep.errors import UnusedParameterError
from samestep.strategies.reduction import MicrobatchTree
from samestep.strategies.strategy import Strategy

TRAINING: Purpose = "shard"  # these bytes are hashed into seeds
EVALUATION: Purpose = "evaluation"
Total = torch.futures.Future[torch.Tensor]  # the sum of the statistics vectors
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class MicrobatchForward:
    """Computes outputs and loss of a microbatch under the step configuration."""

    def __init__(self, loss: StepLoss, config: StepConfig, device: torch.device) -> None:
        self.loss, self.config, self.device = loss, config, device
        self._counts: list[float] = []
        self._sizes: list[int] = []  # nominal samples of each microbatch, with those that are left out
        self._is_loss_checked = False

    def begin_step(self, batch: GlobalBatch, world: World) -> None:
        """Sum the counts that the loss needs before the first forward; a collective."""
        self._counts = self.loss.global_counts(batch, world)
        self._sizes = [stop - start for start, stop in batch.bounds]

    def __call__(
        self, module: torch.nn.Module, microbatch: Microbatch, position: int, *, concurrent: bool = False
    ) -> tuple[Any, Loss]:
        """Return outputs and loss of a training step after `position` steps."""
        outputs, losses = self.term_losses(module, microbatch, TRAINING, position, concurrent=concurrent)
        return outputs, self.combine(microbatch, losses)

    def term_losses(
        self,
        module: torch.nn.Module,
        microbatch: Microbatch,
        purpose: Purpose,
        position: int,
        *,
        concurrent: bool = False,
    ) -> tuple[Any, list[Loss]]:
        """Return outputs and the loss of each term; the random state depends on purpose, seed, position and microbatch.

        If other microbatches are computed at the same time (`concurrent`), generators that they share are not seeded.

        Raises:
            TypeError: the batch is not a pair.
            InputError: the loss function returned no loss, or a sum in place of a mean.
        """
        inputs, _ = microbatch.pair
        seed = seed_device if concurrent else seed_generators
        seed(derive_seed(purpose, self.config.seed, position, microbatch.number), self.device)
        with autocast(self.config.precision, self.device):
            outputs = call_model(module, channels_last(inputs) if self.config.channels_last else inputs)
            return outputs, self.losses_of_outputs(microbatch, outputs)

    def losses_of_outputs(self, microbatch: Microbatch, outputs: Any) -> list[Loss]:
        """Return the loss of each term; zero for a filler, which takes part in the computation and adds nothing."""
        targets = move_next_to(microbatch.pair[1], outputs)
        losses = self.loss.term_losses(outputs, targets, microbatch.size)
        if not self._is_loss_checked and microbatch.number == 0 and microbatch.size:  # on one rank
            self._is_loss_checked = True
            self.loss.require_mean(outputs, targets, microbatch.size)
        return losses if microbatch.size else [Loss(loss.sum * 0.0, 0.0) for loss in losses]

    def combine(self, microbatch: Microbatch, losses: Sequence[Loss]) -> Loss:
        """Return the one loss of a training step from the losses of its terms."""
        return self.loss.combine(losses, self._counts, sum(self._sizes), self._sizes[microbatch.number])


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return the autocast context of a precision."""
    dtype = _AUTOCAST[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def call_model(module: torch.nn.Module, inputs: Any) -> Any:
    """Call `module`; a mapping or a tuple of inputs is unpacked into arguments."""
    positional, named = as_arguments(inputs)
    return module(*positional, **named)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as positional and named arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


@dataclass(eq=False, repr=False)
class StepRunner(ABC):
    """Computes the microbatches of a rank in one step.

    Attributes:
        model: the model before the strategy wraps it.
        names: the trained parameters that receive gradients in the backward, with their names in the model.
    """

    model: torch.nn.Module
    forward: MicrobatchForward
    strategy: Strategy
    buffers: MicrobatchBuffers
    scaler: torch.amp.GradScaler
    names: Mapping[torch.nn.Parameter, str]
    world: World
    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        self._used_in: int | None = None  # the last microbatch with all gradients

    @abstractmethod
    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> StepStats:
        """Leave the sum over microbatches of the gradient, divided by the number of samples, in `.grad`.

        Args:
            batch: the samples of the step.
            position: number of earlier steps; random states depend on it.
            save: this rank requests a checkpoint after the step.
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

    def vector(
        self, batch: GlobalBatch, microbatch: Microbatch, loss: Loss, buffers: torch.Tensor, save: bool
    ) -> torch.Tensor:
        """Return the statistics vector of a microbatch."""
        stop = self.world.stop_requested
        vector = stats_vector(batch.microbatches, microbatch.number, loss, buffers, stop=stop, save=save)
        return vector.to(self.world.device)

    def sum_vectors(self, batch: GlobalBatch, tree: MicrobatchTree, vectors: Mapping[int, torch.Tensor]) -> Total:
        """Start the sum of the statistics vectors of all microbatches."""
        return self.strategy.sum_vectors(tree, vectors, vector_length(batch.microbatches, self.buffers.length))

    def finish(self, batch: GlobalBatch, tree: MicrobatchTree, total: Total) -> StepStats:
        """Complete the gradients and return the statistics of the step."""
        self.strategy.finish(tree)
        return StepStats.from_vector(batch.microbatches, total.wait())

    def backward(self, loss: torch.Tensor, samples: int) -> None:
        """Backward of `loss / samples`.

        The division keeps gradients at the scale of a mean, which fp16 needs. The engine corrects the divisor to the
        global count after the last microbatch. Both divisors are equal on every rank.
        """
        scaled = self.scaler.scale(loss)
        torch.autograd.backward(scaled, torch.full_like(scaled, 1 / samples))

    def require_gradients(self, names: Mapping[torch.nn.Parameter, str], microbatch: int | None = None) -> None:
        """Raise `UnusedParameterError` if the backward of a microbatch left some of `names` without a gradient."""
        unused = [name for parameter, name in names.items() if parameter.grad is None]
        if not unused:
            self._used_in = microbatch
            return
        place, fix = "", "freeze them (requires_grad_(False), or model.freeze in a recipe), or use them"
        if microbatch is not None and self._used_in is not None:
            place = f" of microbatch {microbatch}, but were part of the loss of microbatch {self._used_in}"
            fix = "find the branch of the forward that depends on the data; add the unused part with a factor of 0"
        raise UnusedParameterError(
            f"{len(unused)} trained parameters are not part of the loss{place}: {', '.join(unused[:5])}",
            expected="every parameter that requires a gradient receives one from every microbatch"
            + (f"; microbatch {microbatch} gave none" if microbatch is not None else ""),
            fix=fix,
        )


class SequentialRunner(StepRunner):
    """Computes the microbatches of a rank one after another."""

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> StepStats:
        strategy, total = self.strategy, None
        tree = MicrobatchTree(batch.microbatches, batch.size)
        vectors: dict[int, torch.Tensor] = {}
        microbatches = (*batch.local_microbatches, *batch.fillers)
        self.buffers.begin()
        with preserved_generators(self.world.device), self.undo_on_failure():
            for microbatch in microbatches:
                last = microbatch is microbatches[-1]
                with strategy.microbatch(tree, microbatch.number, last=last):
                    if microbatch is not microbatches[0] or microbatch.is_filler:
                        self.buffers.restore()
                    loss = self._loss(microbatch, position)
                    if not microbatch.is_filler:
                        vectors[microbatch.number] = self.vector(batch, microbatch, loss, self.buffers.read(), save)
                    if last:
                        self.world.context.status.end_compute(len(batch.local_microbatches))
                        total = self.sum_vectors(batch, tree, vectors)
                    self.backward(loss.sum, batch.size)
                    if not strategy.defers_gradients:
                        self.require_gradients(self.names, microbatch.number)
                if last and strategy.defers_gradients:
                    self.require_gradients(self.names)
        return self.finish(batch, tree, total or self.sum_vectors(batch, tree, vectors))

    def _loss(self, microbatch: Microbatch, position: int) -> Loss:
        callbacks = () if microbatch.is_filler else self.callbacks
        for callback in callbacks:
            callback.begin_microbatch(microbatch)
        outputs, loss = self.forward(self.strategy.module, microbatch, position)
        for callback in callbacks:
            callback.end_microbatch(microbatch, outputs, loss)
        return loss

    def bad_gradients(self, batch: GlobalBatch, position: int) -> list[int] | None:
        """Compute the microbatches of this rank again, one at a time, and check each gradient."""
        if self.strategy.defers_gradients:
            return None
        bad = []
        with preserved_generators(self.world.device):
            for microbatch in batch.local_microbatches:
                self.buffers.restore()
                _, loss = self.forward(self.model, microbatch, position)
                if not has_finite_gradient(loss, self.names):
                    bad.append(microbatch.number)
        self.buffers.restore()
        return flagged_by_any(bad, batch, self.world)
