"""Shards as the micro-batches of a pipeline: steps and evaluation of a model whose layers are on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from samestep.config import StepRules
from samestep.data.batch import GlobalBatch, Shard
from samestep.data.tensors import map_tensors
from samestep.engine.buffers import ShardedBuffers
from samestep.engine.forward import Forward
from samestep.engine.gradients import ShardGradients
from samestep.engine.loss import Loss
from samestep.engine.stage_buffers import StageBuffers
from samestep.engine.tally import Tally, read_tally, tally_length, write_tally
from samestep.errors import InputError
from samestep.parallel.pieces import Pieces
from samestep.parallel.pipeline.line import Line
from samestep.parallel.pipeline.pieces import StagePieces
from samestep.parallel.pipeline.strategy import PipelineStrategy
from samestep.parallel.strategy import Strategy
from samestep.parallel.tree import ShardTree
from samestep.runtime.random_state import Purpose, preserved_generators
from samestep.runtime.world import World

Found = tuple[Any, list[Loss]]
Root = Callable[[Loss], torch.Tensor]


def require_stages(rules: StepRules, world: World) -> None:
    """Refuse what stages cannot do.

    Raises:
        InputError: the rules ask for it.
    """
    if rules.compile and world.strategy.schedule == "zero_bubble":
        raise InputError(
            "step.compile with strategy.schedule: zero_bubble",
            rule="zero_bubble computes backward in two halves, and a compiled module has one",
            do="set strategy.schedule: 1f1b, or leave step.compile out",
        )


def prepare_stages(pieces: Pieces, rules: StepRules) -> None:
    """Compile the modules of this rank's stages, if the rules say so: the model as a whole is never called."""
    if rules.compile and isinstance(pieces, StagePieces):
        pieces.line.compile()


class PipelineGradients(ShardGradients):
    """Lets all shards of this rank's data go through the stages; each stage adds up its gradients as they come."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert isinstance(self._strategy, PipelineStrategy)
        self._line_strategy = self._strategy
        self._line = self._strategy.line
        self._stage_buffers = StageBuffers(self._model, _stages_of(self._buffers, self._line), self._line.own)

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> Tally:
        tree = ShardTree(batch.shards, batch.size)
        self._buffers.begin()
        self._stage_buffers.begin()
        # Every rank's scaler counts, and it begins with the first number it is given.
        self._scaler.scale(torch.zeros((), device=self._world.device))
        work = _TrainingWork(batch.parts, self._forward, position, self._stage_buffers, self._scaled(batch.size))
        work.keeps_outputs = bool(self._observers)
        with preserved_generators(self._world.device), self._undone_on_failure():
            if batch.parts:
                with self._strategy.shard(tree, batch.parts[-1].number, last=True):
                    for like, slots in _alike(batch.parts).items():
                        self._line.run(work, slots, like, training=True)
                    self._stage_buffers.end()
                    self._world.pulse.arrive(len(batch.parts))
                    self._line_strategy.take_gradients()
                    self._require_used(self._names)
                self._tell(batch.parts, work.found)
        vectors = {part.number: self._stage_vector(batch, slot, work, save) for slot, part in enumerate(batch.parts)}
        total = self._strategy.sum_vectors(tree, vectors, tally_length(batch.shards, self._buffers.length))
        self._strategy.finish(tree)
        return read_tally(batch.shards, total.wait())

    def _scaled(self, samples: int) -> Root:
        # As in one process: at the scale of a mean, which the engine corrects by the count.
        return lambda loss: self._scaler.scale(loss.sum) * (1 / samples)

    def _tell(self, parts: Sequence[Shard], found: dict[int, Found]) -> None:
        for slot in sorted(found):
            for observer in self._observers:
                observer.begin_shard(parts[slot])
                observer.end_shard(parts[slot], found[slot][0], found[slot][1][0])

    def _stage_vector(self, batch: GlobalBatch, slot: int, work: _TrainingWork, save: bool) -> torch.Tensor:
        """What this rank's stages know of a shard."""
        nothing = Loss(torch.zeros((), device=self._world.device), 0.0)
        loss = work.found[slot][1][0] if slot in work.found else nothing
        stop = self._world.stop_requested
        buffers = work.buffers[slot]
        return write_tally(batch.shards, batch.parts[slot].number, loss.sum, loss.count, buffers, stop=stop, save=save)

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        try:
            with super()._undone_on_failure():
                yield
        finally:
            self._stage_buffers.end()


class PipelineOutputs:
    """Evaluation: outputs are on the last stage's rank, which counts them."""

    def __init__(self, line: Line, forward: Forward, world: World) -> None:
        self.counted, self._line, self._forward = world, line, forward
        # Ranks of a tensor axis have the same outputs: the first of them counts for all.
        self._counts = world.layout.place(world.rank)["tensor"] == 0

    def __call__(self, batch: GlobalBatch, position: int) -> Iterator[tuple[Shard, Any, list[Loss]]]:
        work = _Work(batch.parts, self._forward, "evaluation", position)
        for like, slots in _alike(batch.parts).items():
            self._line.run(work, slots, like, training=False)
        for slot in sorted(work.found) if self._counts else ():
            yield batch.parts[slot], *work.found[slot]


def outputs_of(strategy: Strategy, forward: Forward, world: World) -> PipelineOutputs | None:
    """What computes shards in evaluation where the model is in stages; None elsewhere."""
    return PipelineOutputs(strategy.line, forward, world) if isinstance(strategy, PipelineStrategy) else None


class _Work:
    """Some shards on their way through the stages of this rank; a slot is a place in `parts`.

    Attributes:
        found: outputs and losses of the shards that are through, where that is known: on the last stage's rank.
    """

    def __init__(self, parts: Sequence[Shard], forward: Forward, purpose: Purpose, position: int) -> None:
        self._parts, self._forward, self._purpose, self._position = parts, forward, purpose, position
        self.found: dict[int, Found] = {}

    def inputs(self, slot: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._forward.arguments(self._parts[slot])

    @contextmanager
    def around(self, slot: int, stage: int) -> Iterator[None]:
        with self._forward.stage(self._parts[slot], self._purpose, self._position, stage):
            yield

    def end(self, slot: int, outputs: Any) -> torch.Tensor:
        losses = self._forward.losses(self._parts[slot], outputs)
        self.found[slot] = (outputs, losses)
        return losses[0].sum


class _TrainingWork(_Work):
    """Shards of a step. What is found of them has the one loss that a step makes of its parts.

    Attributes:
        buffers: what the stages have made of their buffers, a vector a shard.
        keeps_outputs: somebody wants to see them.
    """

    keeps_outputs = False

    def __init__(
        self, parts: Sequence[Shard], forward: Forward, position: int, stage_buffers: StageBuffers, root: Root
    ) -> None:
        super().__init__(parts, forward, "shard", position)
        self._stage_buffers, self._root = stage_buffers, root
        self.buffers = [stage_buffers.empty() for _ in parts]

    @contextmanager
    def around(self, slot: int, stage: int) -> Iterator[None]:
        self._stage_buffers.renew(stage)
        with super().around(slot, stage):
            yield
        self._stage_buffers.read(stage, self.buffers[slot])

    def end(self, slot: int, outputs: Any) -> torch.Tensor:
        loss = self._forward.joined(self._parts[slot], self._forward.losses(self._parts[slot], outputs))
        # Without their graphs, which would stay until the end of the step.
        kept = map_tensors(outputs, torch.Tensor.detach) if self.keeps_outputs else None
        self.found[slot] = (kept, [Loss(loss.sum.detach(), loss.count)])
        return self._root(loss)


def _alike(parts: Sequence[Shard]) -> dict[Hashable, list[int]]:
    """The shards whose inputs have the same shapes, as they go through the stages in one run."""
    found: dict[Hashable, list[int]] = {}
    for slot, part in enumerate(parts):
        shapes: list[Hashable] = []

        def note(tensor: torch.Tensor, shapes: list[Hashable] = shapes) -> torch.Tensor:
            shapes.append((tuple(tensor.shape), tensor.dtype))
            return tensor

        map_tensors(part.data[0], note)
        found.setdefault(tuple(shapes), []).append(slot)
    return found


def _stages_of(buffers: ShardedBuffers, line: Line) -> list[int]:
    """The stage that changes each buffer: that of the module that is called, or around it; else the first."""
    found = []
    for name in buffers.names:
        paths = name.split(".")
        above = [".".join(paths[:depth]) for depth in range(len(paths), 0, -1)]
        found.append(next((line.cut.modules[path] for path in above if path in line.cut.modules), 0))
    return found
