"""The stages that this rank computes, and the schedule by which micro-batches go through all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from samestep.config import StrategyPart
from samestep.errors import PeerLostError
from samestep.parallel.divided import watched
from samestep.parallel.pipeline.compute import Computer
from samestep.parallel.pipeline.cut import Cut
from samestep.parallel.pipeline.handover import Arrived, Kind, Tensors, measured, sent
from samestep.parallel.pipeline.order import Schedule, schedule
from samestep.parallel.pipeline.trace import bound
from samestep.runtime.world import World

_KEPT = 8  # schedules, which hold what micro-batches receive; texts of many lengths would make many


class Work(Protocol):
    """What goes through the stages; a slot is the number of a micro-batch among those of one run."""

    def inputs(self, slot: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model's forward."""

    def around(self, slot: int, stage: int) -> AbstractContextManager[None]:
        """What stands around the forward of one stage: random state, precision."""

    def end(self, slot: int, outputs: Any) -> torch.Tensor:
        """What the model made of a micro-batch; the scalar from which backward begins. On the last stage's rank."""


class Line:
    """One rank's part of a pipeline.

    Stage s is on rank s modulo the ranks of the pipeline.

    Attributes:
        world: the ranks of one pipeline, the first stage's first.
        cut: the model in stages.
        own: the stages of this rank.

    Args:
        watches: products are divided too, and what is left divided is looked after.
    """

    def __init__(self, model: nn.Module, cut: Cut, world: World, part: StrategyPart, *, watches: bool) -> None:
        self.world, self.cut = world, cut
        self._call = watched if watches else _called
        self.own = tuple(range(world.rank, cut.count, world.size))
        self._model, self._name = model, part.schedule
        self._computers = {
            (training, stage): Computer(model, graphs[stage].graph)
            for training, graphs in cut.graphs.items()
            for stage in self.own
        }
        self._schedules: dict[Hashable, Schedule] = {}
        self._found: dict[Hashable, list[tuple[Kind, ...]]] = {}
        self._work: Work | None = None
        self._failure: Exception | None = None

    @property
    def has_end(self) -> bool:
        """Whether the model's outputs are on this rank."""
        return self.cut.count - 1 in self.own

    def weights(self, stage: int) -> list[nn.Parameter]:
        """The parameters that a stage of this rank uses."""
        return [p for name, p in self._model.named_parameters() if stage in self.cut.homes[name]]

    def compile(self) -> None:
        """Compile the modules that this rank's stages call, each by itself."""
        for name, stage in self.cut.modules.items():
            if stage in self.own:
                self._model.get_submodule(name).compile(dynamic=False)

    def run(self, work: Work, slots: Sequence[int], like: Hashable, *, training: bool) -> None:
        """Forward of some micro-batches through all stages, and backward if it is training.

        Args:
            slots: micro-batches whose inputs have the same shapes; the same ones on every rank of the pipeline.
            like: what says these shapes.

        Raises:
            PeerLostError: another rank went away.
        """
        bound(self._model, *work.inputs(slots[0]))  # what is wrong with them is said on every rank
        self._work, self._failure = work, None
        try:
            prepared = self._schedule(slots, like, training=training)
            numbers = torch.tensor(slots)
            prepared.step(slot=numbers, target=numbers)
        except (RuntimeError, dist.DistError) as error:
            self._schedules.clear()  # what they hold is of a run that was not finished
            self._raise(error)
        finally:
            self._work = None

    def forward(self, stage: int, slot: int, arriving: Tensors, *, training: bool) -> Tensors:
        """What a stage hands on; of the last one, the scalar from which backward begins."""
        assert self._work is not None
        try:
            return self._forward(self._work, stage, slot, arriving, training=training)
        except Exception as error:
            self._failure = error  # torch raises one of its own in its place
            raise

    def _forward(self, work: Work, stage: int, slot: int, arriving: Tensors, *, training: bool) -> Tensors:
        names = self.cut.graphs[training][stage].inputs
        given = bound(self._model, *work.inputs(slot)) if names else {}
        inputs = [given[name] for name in names]
        with work.around(slot, stage):
            values = self._call(self._computers[training, stage], *map(Arrived.apply, arriving), *inputs)
            if stage == self.cut.count - 1:
                # Not a view: schedules detach it in place. Of one type: torch before 2.13 wants to know it before.
                return (torch.stack([work.end(slot, values)]).float(),)
        # Backward in two halves finds nothing to do behind inputs that want no gradient.
        wants = training and self._name == "zero_bubble"
        return tuple(sent(value, stage, wants_gradient=wants) for value in values)

    def _schedule(self, slots: Sequence[int], like: Hashable, *, training: bool) -> Schedule:
        key = (like, len(slots), training)
        if key not in self._schedules:
            kinds = self._kinds(slots[0], like, training=training)
            if len(self._schedules) >= _KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            stages = [self._stage(stage, kinds, training=training) for stage in self.own]
            self._schedules[key] = schedule(self._name, stages, len(slots), training=training)
        return self._schedules[key]

    def _stage(self, stage: int, kinds: list[tuple[Kind, ...]], *, training: bool) -> PipelineStage:
        arriving = tuple(kind.empty("meta") for kind in kinds[stage])
        ends = stage == self.cut.count - 1
        leaving = (torch.empty(1, device="meta"),) if ends else tuple(kind.empty("meta") for kind in kinds[stage + 1])
        return PipelineStage(
            _Stage(self, stage, training=training),
            stage,
            self.cut.count,
            self.world.device,
            input_args=arriving,
            output_args=leaving,
            group=self.world.group,
        )

    def _kinds(self, slot: int, like: Hashable, *, training: bool) -> list[tuple[Kind, ...]]:
        """What arrives at each stage. Torch would find out too, but by values that nobody has computed."""
        if (like, training) not in self._found:
            with torch.set_grad_enabled(training):
                self._found[like, training] = measured(
                    lambda stage, arriving: self.forward(stage, slot, arriving, training=training),
                    self.cut.count,
                    self.world,
                )
        return self._found[like, training]

    def _raise(self, error: Exception) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if isinstance(error, dist.DistError):
            raise PeerLostError(f"rank {self.world.rank} lost its connection to another stage: {error}") from error
        raise error


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class _Stage(nn.Module):
    """One stage as torch's schedules want it."""

    def __init__(self, line: Line, stage: int, *, training: bool) -> None:
        super().__init__()
        self._line = [line]  # which is no part of this module
        self._stage, self._trains = stage, training
        self.weights = nn.ParameterList(line.weights(stage))

    def forward(self, *arriving: torch.Tensor, slot: torch.Tensor) -> Tensors | torch.Tensor:
        leaving = self._line[0].forward(self._stage, int(slot), arriving, training=self._trains)
        return leaving[0] if self._stage == self._line[0].cut.count - 1 else leaving
