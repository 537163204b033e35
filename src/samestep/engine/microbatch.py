"""Forward and backward of microbatches: random state, precision, model, loss, gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch, Microbatch, channels_last, move_next_to
from samestep.distributed.devices import is_accelerator
from samestep.distributed.rng import Purpose, SeededGenerators, derive_seed, microbatch_seed, seed_generators
from samestep.distributed.world import World, all_gather
from samestep.engine.batch_norm_checks import may_have_one_value, one_value_errors
from samestep.engine.buffer_values import MicrobatchBuffers
from samestep.engine.buffers import ForwardState
from samestep.engine.callbacks import Callback
from samestep.engine.gather import LocalOutputs, Roots
from samestep.engine.loss import ForwardResult, Loss, StepLoss, forward_result
from samestep.engine.model_call import autocast, call_model
from samestep.engine.non_finite import flagged_by_any, has_finite_gradient
from samestep.engine.outside_state import OutsideState
from samestep.engine.step_stats import LocalStats, StepStats, vector_length
from samestep.errors import UnusedParameterError
from samestep.metrics.counts import rounded_sum
from samestep.strategies.reduction import MicrobatchTree
from samestep.strategies.strategy import Strategy, Sum, sparse_error

TRAINING: Purpose = "shard"  # these bytes are hashed into seeds
EVALUATION: Purpose = "evaluation"
ForwardFunction = Callable[[Any, Any], Any]  # from model and data of a microbatch to a loss or a mapping
_ONE_TERM = StepLoss(torch.add)  # of a forward function, which computes the loss itself


class MicrobatchForward:
    """Computes outputs and loss of a microbatch under the step configuration.

    Attributes:
        gathers: the loss is that of the whole global batch, computed from the outputs of all microbatches.
    """

    def __init__(self, loss: StepLoss, config: StepConfig, device: torch.device) -> None:
        self.loss, self.config, self.device = loss, config, device
        self.gathers = config.gather == "global"
        self._counts: list[float] = []
        self._sizes: list[int] = []  # nominal samples of each microbatch, with those that are left out
        self._is_loss_checked = False
        self.engine_number, self.outside = 0, OutsideState()
        self.function: ForwardFunction | None = None
        self.needs_loss = True
        self.results: dict[int, ForwardResult] = {}  # of the forward function, by microbatch

    @property
    def seed(self) -> int:
        """Seed of random states; engines of one world draw different numbers."""
        seed, number = self.config.seed, self.engine_number
        return derive_seed("engine", seed, number) if number else seed

    @property
    def active_loss(self) -> StepLoss:
        """The loss whose terms `term_losses` returns."""
        return self.loss if self.function is None or self.gathers else _ONE_TERM

    def begin_step(self, batch: GlobalBatch, world: World) -> None:
        """Sum the counts that the loss needs before the first forward; a collective."""
        self._counts = [] if self.function is not None or self.gathers else self.loss.global_counts(batch, world)
        self._sizes, self.results = [stop - start for start, stop in batch.bounds], {}

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
            InputError: the batch is not a pair, or the loss function returned no loss, or a sum in place of a mean.
        """
        context = self.context(purpose, position, microbatch.number, concurrent=concurrent)
        with self.outside.unchanged(self.function), context:
            result = self._result(module, microbatch)
            if self.function is None:
                return result.outputs, self.losses_of_outputs(microbatch, result.outputs)
            losses = [] if result.loss is None else [result.loss]
        return result.outputs, losses if microbatch.size else _without_samples(losses)

    def outputs(self, module: torch.nn.Module, microbatch: Microbatch, purpose: Purpose, position: int) -> LocalOutputs:
        """Return a microbatch with outputs and targets; arguments as in `term_losses`.

        Raises:
            InputError: the batch is not a pair.
        """
        with self.outside.unchanged(self.function), self.context(purpose, position, microbatch.number):
            result = self._result(module, microbatch)
        # A loss in place of outputs is refused on every rank, when outputs are gathered.
        return LocalOutputs(microbatch, result.outputs if result.loss is None else result.loss, result.targets)

    def context(
        self, purpose: Purpose, position: int, microbatch: int, *, concurrent: bool = False
    ) -> AbstractContextManager[None]:
        """Seed the generators for a microbatch, and return the autocast context."""
        seed = microbatch_seed(purpose, self.seed, position, microbatch)
        seed_generators(seed, self.device, concurrent=concurrent)
        return autocast(self.config.precision, self.device)

    def _result(self, module: torch.nn.Module, microbatch: Microbatch) -> ForwardResult:
        inputs = microbatch.pair[0] if self.function is None else microbatch.data
        inputs = channels_last(inputs) if self.config.channels_last else inputs
        if self.function is None:
            return ForwardResult(None, call_model(module, inputs), microbatch.pair[1], {})
        needs_loss = self.needs_loss and not self.gathers
        result = forward_result(self.function(module, inputs), microbatch.size, needs_loss=needs_loss)
        if not microbatch.is_filler:
            values = {name: Loss(value.sum.detach(), value.count) for name, value in result.values.items()}
            self.results[microbatch.number] = ForwardResult(None, None, result.targets, values)  # without graphs
        return result

    def losses_of_outputs(self, microbatch: Microbatch, outputs: Any) -> list[Loss]:
        """Return the loss of each term; zero for a filler, which takes part in the computation and adds nothing."""
        targets = move_next_to(microbatch.pair[1], outputs)
        losses = self.loss.term_losses(outputs, targets, microbatch.size)
        if not self._is_loss_checked and microbatch.number == 0 and microbatch.size:  # on one rank
            self._is_loss_checked = True
            self.loss.require_mean(outputs, targets, microbatch.size)
        return losses if microbatch.size else _without_samples(losses)

    def with_targets(self, microbatch: Microbatch) -> Microbatch:
        """Return a computed microbatch with data `(inputs, targets)`, targets of the forward function if it has one."""
        if self.function is None:
            return microbatch
        return microbatch._replace(data=(microbatch.data, self.results[microbatch.number].targets))

    def means(self, world: World, names: Sequence[list[Any]], numbers: Sequence[float]) -> dict[str, float]:
        """Return the means of the values for logging; a collective if there is a forward function.

        Args:
            world: the ranks.
            names: microbatch and name of each value of this rank.
            numbers: sum and count of each value.
        """
        if self.function is None:
            return {}
        own = [[*name, *numbers[2 * i : 2 * i + 2]] for i, name in enumerate(names)]
        rows, means = list(chain(*all_gather(own, world))), {}
        for name in sorted({row[1] for row in rows}):
            total, count = (rounded_sum([row[column] for row in rows if row[1] == name]) for column in (2, 3))
            means[name] = total / count if count else math.nan
        return means

    def scalars(self) -> list[torch.Tensor]:
        """Return sums and counts of the values for logging of this rank since `begin_step`, on their devices."""
        values = chain.from_iterable(result.values.values() for result in self.results.values())
        return [torch.as_tensor(number, dtype=torch.float64) for value in values for number in (value.sum, value.count)]

    def value_names(self) -> list[list[Any]]:
        """Return microbatch and name of the values for logging of this rank, in the order of `scalars`."""
        return [[number, name] for number, result in self.results.items() for name in result.values]

    def combine(self, microbatch: Microbatch, losses: Sequence[Loss]) -> Loss:
        """Return the one loss of a training step from the losses of its terms."""
        if self.function is not None:
            return losses[0]
        return self.loss.combine(losses, self._counts, sum(self._sizes), self._sizes[microbatch.number])


def _without_samples(losses: Sequence[Loss]) -> list[Loss]:
    return [Loss(loss.sum * 0.0, 0.0) for loss in losses]


@dataclass(eq=False, repr=False)
class StepRunner(ABC):
    """Computes the microbatches of a rank in one step.

    Attributes:
        model: the model before the strategy wraps it.
        names: the trained parameters that receive gradients in the backward, with their names in the model.
        observe: surrounds forward and backward of each microbatch, for a witness.
        is_witnessed: a witness observes the present step.
        computes_together: whether the microbatches of a rank are computed together; None if this is not known yet.
        alone_reason: why they are computed one after another under `exact`.
        replays_graphs: whether they are replayed as CUDA graphs; None if not known yet. `graphs_reason`: why not.
    """

    model: torch.nn.Module
    forward: MicrobatchForward
    strategy: Strategy
    buffers: MicrobatchBuffers | ForwardState
    scaler: torch.amp.GradScaler
    names: Mapping[torch.nn.Parameter, str]
    world: World
    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        self._used_in: int | None = None  # the last microbatch with all gradients
        self._is_checked = False  # a step has been computed
        self.is_witnessed = False
        self.computes_together: bool | None = None
        self.alone_reason: str | None = None
        self.replays_graphs: bool | None = None
        self.graphs_reason: str | None = None
        self.separate_reason: str | None = None  # why `merge: auto` computes microbatches one after another
        self.generators = SeededGenerators(self.world.device)
        self.observe: Callable[[Microbatch], AbstractContextManager[None]] = lambda microbatch: nullcontext()

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

    def shares_moved(self) -> None:  # noqa: B027  # most runners have no decision to repeat
        """Repeat decisions that depend on the number of microbatches of this rank."""

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
            tree, cover, self.world.device, length, in_order=in_order, requests=requests, step_hash=step_hash
        )
        return self.strategy.sum_vectors(tree, vectors, vector_length(tree.microbatches, length))

    def finish(self, tree: MicrobatchTree, total: Sum) -> torch.Tensor:
        """Complete the gradients and return the sum of the statistics vectors."""
        self.strategy.finish(tree)
        return total()

    def read(self, batch: GlobalBatch, total: torch.Tensor, norm: torch.Tensor) -> StepStats:
        """Wait for the device, and return the statistics of the step; complete the state that the forward changed."""
        scalars, tree = self.forward.scalars(), MicrobatchTree(batch.microbatches, batch.size)
        status, is_wait = self.world.context.status, is_accelerator(self.world.device)
        with status.waiting("the results of the step") if is_wait else nullcontext():
            stats = StepStats.from_vector(batch.microbatches, total, self.buffers.control_length, norm, scalars)
        with self.undo_on_failure():
            self.world.context.collective_check.confirm(*stats.hashes)
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
                with strategy.microbatch(tree, microbatch.number, last=last), self.observe(microbatch):
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
