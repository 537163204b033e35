"""Steps and evaluation of a model whose layers are divided into pipeline stages."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from samestep.data.batch import GlobalBatch, Microbatch, channels_last, map_tensors, tensors_of
from samestep.distributed.rng import Purpose
from samestep.distributed.world import World
from samestep.engine.batch_norm_checks import one_value_errors
from samestep.engine.buffers import AveragedBuffers
from samestep.engine.evaluation import EvaluationOutputs, EvaluationState
from samestep.engine.loss import Loss
from samestep.engine.microbatch_forward import EVALUATION, TRAINING, MicrobatchForward, as_arguments
from samestep.engine.step_runner import StepRunner
from samestep.engine.step_stats import LocalStats
from samestep.reduce.tree import MicrobatchTree
from samestep.strategies.pipeline.stages import PipelineStages
from samestep.strategies.pipeline.strategy import PipelineStrategy

StageResult = tuple[Any, list[Loss]]


class PipelineRunner(StepRunner):
    """Computes all microbatches of this rank's data in the stages; the gradients of each are added in tree order."""

    strategy: PipelineStrategy
    buffers: AveragedBuffers

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stages = self.strategy.stages
        self.stage_buffers = StageBuffers(self.model, self.buffers.names, self._stages)

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        microbatches, buffers = batch.local_microbatches, self.stage_buffers
        tree = MicrobatchTree(batch.microbatches, batch.size)
        self.buffers.begin()
        buffers.begin()
        # The scaler of each rank counts steps, and starts at its first call of `scale`.
        self.scaler.scale(torch.zeros((), device=self.world.device))
        work = _TrainingWork(self, batch, position, tree)
        errors = one_value_errors(batch, self.world, is_shared=False)
        with self.generators.preserved(), self.undo_on_failure(), errors, closing(buffers):
            if microbatches:
                self._stages.run(work, _by_shape(microbatches), training=True)
                buffers.close()
                self.world.context.status.end_compute(len(microbatches))
            for slot, (outputs, losses) in sorted(work.results.items(), key=itemgetter(0)):
                for callback in self.callbacks:
                    callback.begin_microbatch(microbatches[slot])
                    callback.end_microbatch(microbatches[slot], outputs, losses[0])
        # The rank of the last stage adds the loss, and each rank the buffers of its stages.
        no_loss = [Loss(torch.zeros((), device=self.world.device), 0.0)]
        stats = LocalStats()
        for slot, microbatch in enumerate(microbatches):
            _, losses = work.results.get(slot, (None, no_loss))
            stats.add(microbatch.number, losses[0], work.buffers[slot])
        return self.finish(tree, self.sum_stats(tree, stats, save))


class PipelineOutputs(EvaluationOutputs):
    """Outputs of an evaluation, available on the rank of the last stage."""

    def __init__(
        self, model: torch.nn.Module, forward: MicrobatchForward, world: World, stages: PipelineStages
    ) -> None:
        super().__init__(model, forward, world)
        self._stages = stages
        # Ranks of a tensor axis have the same outputs, so only the first of them returns outputs.
        self._has_outputs = world.mesh_shape.coordinates(world.rank)["tensor"] == 0

    def __call__(
        self, batch: GlobalBatch, position: int, state: EvaluationState
    ) -> Iterator[tuple[Microbatch, Any, list[Loss]]]:
        work = _Work(batch, self.forward, EVALUATION, position)
        self._stages.run(work, _by_shape(batch.local_microbatches), training=False)
        state.restore()
        for slot in sorted(work.results) if self._has_outputs else ():
            yield batch.local_microbatches[slot], *work.results[slot]


class _Work:
    """Microbatches in the stages of this rank; a slot is an index into `microbatches`.

    Attributes:
        results: outputs and losses of finished microbatches, on the rank of the last stage.
    """

    def __init__(self, batch: GlobalBatch, forward: MicrobatchForward, purpose: Purpose, position: int) -> None:
        self._microbatches, self._forward, self._config = batch.local_microbatches, forward, forward.config
        self._purpose, self._position = purpose, position
        self.results: dict[int, StageResult] = {}

    def begin(self) -> None:
        """Begin the computation of all microbatches."""

    def inputs(self, slot: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs, _ = self._microbatches[slot].pair
        return as_arguments(channels_last(inputs) if self._config.channels_last else inputs)

    def seed(self, slot: int) -> None:
        self._context(slot)

    @contextmanager
    def around(self, slot: int, stage: int) -> Iterator[None]:
        with self._context(slot):
            yield

    def _context(self, slot: int) -> AbstractContextManager[None]:
        return self._forward.context(self._purpose, self._position, self._microbatches[slot].number)

    def end(self, slot: int, outputs: Any) -> torch.Tensor:
        losses = self._forward.losses_of_outputs(self._microbatches[slot], outputs)
        self.results[slot] = (outputs, losses)
        return losses[0].sum

    def end_backward(self, slot: int, stage: int) -> None:
        """Take the gradients of one stage; an evaluation has none."""


class _TrainingWork(_Work):
    """Microbatches of a step; each result has the one combined loss.

    Attributes:
        buffers: one vector of the stages' buffers per microbatch.
    """

    def __init__(self, runner: PipelineRunner, batch: GlobalBatch, position: int, tree: MicrobatchTree) -> None:
        super().__init__(batch, runner.forward, TRAINING, position)
        self._runner, self._tree = runner, tree
        self.buffers = [runner.stage_buffers.empty() for _ in batch.local_microbatches]

    def begin(self) -> None:
        self._runner.strategy.abandon()

    @contextmanager
    def around(self, slot: int, stage: int) -> Iterator[None]:
        self._runner.stage_buffers.renew(stage)
        with super().around(slot, stage):
            yield
        self._runner.stage_buffers.read(stage, self.buffers[slot])

    def end(self, slot: int, outputs: Any) -> torch.Tensor:
        microbatch = self._microbatches[slot]
        loss = self._forward.combine(microbatch, self._forward.losses_of_outputs(microbatch, outputs))
        # Detached, because the graphs would stay in memory until the end of the step.
        detached = map_tensors(outputs, torch.Tensor.detach) if self._runner.callbacks else None
        self.results[slot] = (detached, [Loss(loss.sum.detach(), loss.count)])
        # At the scale of a mean, as in `StepRunner.backward`; the engine corrects the divisor to the count.
        return self._runner.scaler.scale(loss.sum) * (1 / self._tree.samples)

    def end_backward(self, slot: int, stage: int) -> None:
        number, strategy = self._microbatches[slot].number, self._runner.strategy
        self._runner.require_gradients(strategy.stage_names[stage], number)
        strategy.end_backward(self._tree, number, slot, stage)


class StageBuffers:
    """The averaged buffers of this rank's stages; each microbatch starts with the values at the beginning of the step.

    Args:
        model: the whole model.
        names: the averaged buffers of the model.
        stages: the stages of this rank.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str], stages: PipelineStages) -> None:
        self._device = next((buffer.device for buffer in model.buffers()), None)
        self._locations: dict[int, list[tuple[torch.nn.Module, str, slice]]] = {stage: [] for stage in stages.own}
        self._length = 0
        for full_name in names:
            path, _, name = full_name.rpartition(".")
            module = model.get_submodule(path)
            elements = slice(self._length, self._length + getattr(module, name).numel())
            self._length = elements.stop
            stage = _stage_of(full_name, stages.partition.module_stages)
            if stage in self._locations:
                self._locations[stage].append((module, name, elements))
        self._start: dict[tuple[torch.nn.Module, str], torch.Tensor] = {}

    def begin(self) -> None:
        """Store the buffers at the beginning of a step."""
        locations = chain.from_iterable(self._locations.values())
        self._start = {(module, name): getattr(module, name) for module, name, _ in locations}

    def empty(self) -> torch.Tensor:
        """Return a zero vector with one element per element of the averaged buffers of all stages."""
        return torch.zeros(self._length, dtype=torch.float64, device=self._device)

    def renew(self, stage: int) -> None:
        """Set the buffers of a stage to clones of the initial ones: graphs of other microbatches may need the old."""
        for module, name, _ in self._locations[stage]:
            setattr(module, name, self._start[module, name].clone())

    def read(self, stage: int, vector: torch.Tensor) -> None:
        """Write the buffers of a stage to their elements of a vector."""
        for module, name, elements in self._locations[stage]:
            vector[elements] = getattr(module, name).detach().reshape(-1)

    def close(self) -> None:
        """Restore the initial tensors with their values."""
        for (module, name), tensor in self._start.items():
            setattr(module, name, tensor)
        self._start = {}


def _by_shape(microbatches: Sequence[Microbatch]) -> dict[Hashable, list[int]]:
    """Group slots by the shapes of the inputs: one run of the stages has equal shapes."""
    groups: dict[Hashable, list[int]] = {}
    for slot, microbatch in enumerate(microbatches):
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(microbatch.data[0]))
        groups.setdefault(shapes, []).append(slot)
    return groups


def _stage_of(buffer: str, module_stages: Mapping[str, int]) -> int:
    """Return the stage that changes a buffer: the stage of the called module that contains the buffer, else 0."""
    parts = buffer.split(".")
    ancestors = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    return next((module_stages[path] for path in ancestors if path in module_stages), 0)
