"""Loss of the whole global batch, for losses that compare samples (`step.gather: global`).

Every rank receives the outputs and targets of all microbatches, and computes the same loss and its gradient with
respect to the outputs. The backward of each microbatch continues with its own rows of this gradient, as in GradCache
(Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021), but the graphs of all
microbatches of a rank stay in memory, and no forward is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from samestep.data.batch import GlobalBatch, Microbatch, tensors_of
from samestep.distributed.rng import Purpose
from samestep.distributed.world import World
from samestep.engine.batch_norm_checks import may_have_one_value, one_value_errors
from samestep.engine.buffers import ForwardState
from samestep.engine.gather import GlobalOutputs, LocalOutputs, Roots, gather_outputs
from samestep.engine.loss import Loss
from samestep.engine.microbatch_forward import TRAINING, MicrobatchForward
from samestep.engine.non_finite import flagged_by_any, has_finite_gradient
from samestep.engine.step_runner import StepRunner
from samestep.engine.step_stats import LocalStats, StepStats
from samestep.reduce.tree import MicrobatchTree

NO_LOSS = Loss(torch.zeros(()), 0.0)  # of a microbatch: the loss is that of the whole batch


def part_of_loss(loss: Loss, microbatch: Microbatch, bounds: Mapping[int, tuple[int, int]]) -> Loss:
    """Return a microbatch's part of the loss of a batch: the first one with samples has all of it."""
    if bounds and microbatch.number == min(bounds):
        return loss
    return Loss(torch.zeros_like(loss.sum), 0.0)


class OutputGradients(NamedTuple):
    """Loss of a global batch, and its gradient with respect to the outputs at the scale of a mean over samples.

    `gradients` has one entry per tensor of the outputs: None if the tensor is not a part of the loss. It is empty if no
    sample of the batch is usable.
    """

    loss: Loss
    bounds: dict[int, tuple[int, int]]
    gradients: list[torch.Tensor | None]

    def loss_of(self, microbatch: Microbatch) -> Loss:
        """Return a microbatch's part of the loss."""
        return part_of_loss(self.loss, microbatch, self.bounds)

    def roots(self, computed: LocalOutputs) -> Roots:
        """Return the differentiable outputs of a microbatch and their gradients, with which its backward begins.

        The gradient of a tensor without dimensions belongs to the first microbatch. Gradients are zero elsewhere, and
        in microbatches without usable samples.
        """
        number, tensors = computed.microbatch.number, list(tensors_of(computed.outputs))
        is_counted = number in self.bounds and not computed.microbatch.is_filler
        roots: Roots = ([], [])
        for tensor, gradient in zip(tensors, self.gradients or tensors, strict=True):
            if gradient is None or not tensor.requires_grad:
                continue
            value = torch.zeros_like(tensor)
            if is_counted and tensor.dim():
                value = gradient[slice(*self.bounds[number])].clone()
            elif is_counted and number == min(self.bounds):
                value = gradient
            roots[0].append(tensor)
            roots[1].append(value.to(tensor.device))
        return roots


class GlobalLoss:
    """Computes the loss of a global batch from the outputs of its microbatches, the same on every rank.

    Args:
        forward: loss and configuration of the step.
        world: the ranks that share the data.
    """

    def __init__(self, forward: MicrobatchForward, world: World) -> None:
        self._forward, self._world = forward, world
        self._last = GlobalOutputs({}, None, None)

    def terms(
        self, computed: Sequence[LocalOutputs], batch: GlobalBatch, purpose: Purpose, position: int
    ) -> tuple[GlobalOutputs, list[Loss]]:
        """Return gathered outputs and the loss of each term; a collective. The random state is that of no microbatch.

        Raises:
            InputError: outputs or targets cannot be joined, or the loss function returned no loss; on every rank.
        """
        gathered = gather_outputs(computed, self._world)
        if not gathered.bounds:
            zero = Loss(torch.zeros((), device=self._world.device), 0.0)
            return gathered, [zero] * self._forward.loss.term_count
        with self._forward.context(purpose, position, batch.microbatches):
            return gathered, self._forward.loss.term_losses(gathered.outputs, gathered.targets, gathered.samples)

    def gradients(
        self, computed: Sequence[LocalOutputs], batch: GlobalBatch, position: int, scaler: torch.amp.GradScaler
    ) -> OutputGradients:
        """Return the loss of a training step after `position` steps, and its gradients; a collective."""
        gathered, terms = self.terms(computed, batch, TRAINING, position)
        self._last = gathered
        loss = self._forward.loss.combine_whole(terms, gathered.samples)
        gradients: list[torch.Tensor | None] = []
        if gathered.bounds:
            tensors = list(tensors_of(gathered.outputs))
            leaves = [tensor for tensor in tensors if tensor.requires_grad]
            scaled = scaler.scale(loss.sum)
            computed_gradients = iter(
                torch.autograd.grad(scaled, leaves, torch.full_like(scaled, 1 / batch.size), allow_unused=True)
            )
            gradients = [next(computed_gradients) if tensor.requires_grad else None for tensor in tensors]
        return OutputGradients(Loss(loss.sum.detach(), loss.count), gathered.bounds, gradients)

    def bad_microbatches(self) -> list[int]:
        """Return the microbatches of the last step with outputs that are not finite; all microbatches if none."""
        outputs = [t.detach() for t in tensors_of(self._last.outputs) if t.dim() and t.is_floating_point()]
        bounds = self._last.bounds.items()
        bad = [number for number, (start, stop) in bounds if not all(t[start:stop].isfinite().all() for t in outputs)]
        return bad or list(self._last.bounds)


class _BufferCopies:
    """Tensors of its own for each microbatch as buffers: the graphs of others may need the tensors that they used."""

    def __init__(self, model: torch.nn.Module) -> None:
        tables = [module._buffers for module in model.modules()]
        self._entries = [
            (table, key, tensor) for table in tables for key, tensor in table.items() if tensor is not None
        ]

    def renew(self) -> None:
        """Set the buffers to copies of their values at the beginning of the step; shared buffers stay so."""
        copies: dict[torch.Tensor, torch.Tensor] = {}
        for table, key, tensor in self._entries:
            table[key] = copies.setdefault(tensor, tensor.clone())

    def __enter__(self) -> _BufferCopies:
        return self

    def __exit__(self, *_: object) -> None:
        for table, key, tensor in self._entries:
            table[key] = tensor


class GlobalLossRunner(StepRunner):
    """Computes the forwards of all microbatches of a rank, then the loss of the whole batch, then the backwards."""

    buffers: ForwardState

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loss = GlobalLoss(self.forward, self.world.data)

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        strategy, total = self.strategy, None
        strategy.defers_reduction = True  # DDP prepares a reduction before the statistics are sent
        tree = MicrobatchTree(batch.microbatches, batch.size)
        self.buffers.begin(batch.microbatches)
        with self.generators.preserved(), self.undo_on_failure(), _BufferCopies(self.model) as copies:
            states: dict[int, torch.Tensor | None] = {}
            # Outputs are gathered after the block, in which no rank communicates.
            is_shared = may_have_one_value(batch, self.model) and not self.world.mesh_shape.forward_communicates
            with one_value_errors(batch, self.world, is_shared=is_shared):
                computed = self._forwards(batch, position, copies, states)
            result = self._loss.gradients(computed, batch, position, self.scaler)
            self.world.context.status.end_compute(len(batch.local_microbatches))
            stats = LocalStats()
            for microbatch in batch.local_microbatches:
                stats.add(microbatch.number, result.loss_of(microbatch), states[microbatch.number])
            # Later in the first step: the ranks of a refused model have not sent different messages.
            total = self.sum_stats(tree, stats, save) if self._is_checked else None
            while computed:
                entry = computed.pop(0)  # its graph ends with its backward
                self._begin_microbatch(copies)  # for forwards that activation checkpointing repeats
                with strategy.microbatch(tree, entry.microbatch.number, last=not computed):
                    torch.autograd.backward(*result.roots(entry))
                    if not strategy.defers_gradients:
                        self.require_gradients(self.names, entry.microbatch.number)
                if not computed and strategy.defers_gradients:
                    self.require_gradients(self.names)
        self._is_checked = True
        return self.finish(tree, total or self.sum_stats(tree, stats, save))

    def _forwards(
        self,
        batch: GlobalBatch,
        position: int,
        copies: _BufferCopies,
        states: dict[int, torch.Tensor | None] | None = None,
    ) -> list[LocalOutputs]:
        """Return the microbatches of this rank with outputs.

        Vectors of their buffers are added to `states`; without it, the forwards are not those of a step.
        """
        computed = []
        for microbatch in (*batch.local_microbatches, *batch.fillers):
            callbacks = () if microbatch.is_filler or states is None else self.callbacks
            self._begin_microbatch(copies)
            for callback in callbacks:
                callback.begin_microbatch(microbatch)
            computed.append(self.forward.outputs(self.model, microbatch, TRAINING, position))
            for callback in callbacks:
                callback.end_microbatch(self.forward.with_targets(microbatch), computed[-1].outputs, NO_LOSS)
            if not microbatch.is_filler and states is not None:
                is_last = microbatch is batch.local_microbatches[-1]
                states[microbatch.number] = self.buffers.read(microbatch.number, last=is_last)
        return computed

    def _begin_microbatch(self, copies: _BufferCopies) -> None:
        self.buffers.restore()
        copies.renew()

    def bad_losses(self, batch: GlobalBatch, stats: StepStats) -> list[int]:
        return self._loss.bad_microbatches()

    def bad_gradients(self, batch: GlobalBatch, position: int) -> list[int] | None:
        """Compute the step again, and check the gradient of each microbatch of this rank."""
        if self.strategy.defers_gradients:
            return None
        with self.generators.preserved(), _BufferCopies(self.model) as copies:
            computed = self._forwards(batch, position, copies)
            result = self._loss.gradients(computed, batch, position, self.scaler)
            bad = [c.microbatch.number for c in computed if not has_finite_gradient(*result.roots(c), self.names)]
        self.buffers.restore()
        return flagged_by_any(bad, batch, self.world)
