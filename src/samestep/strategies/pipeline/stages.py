"""Pipeline stages of one rank: execution of their graphs under a schedule of torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage

from samestep.config import StrategyConfig
from samestep.distributed.world import World, all_gather
from samestep.errors import PeerLostError
from samestep.strategies.dtensor_rng import checked_forward
from samestep.strategies.pipeline.partition import Partition, bind_inputs, stage_error
from samestep.strategies.pipeline.schedule import Schedule, build_schedule

Tensors = tuple[torch.Tensor, ...]

_MAX_SCHEDULES = 8  # each owns receive buffers; texts of many lengths would create many


class GraphExecutor(fx.Interpreter):
    """Execution of a stage's graph with the current modules and tensors of a model.

    Attributes:
        inputs: names of the inputs of the model that the graph needs.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph=graph)
        names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        self.inputs = [name.removeprefix("input_") for name in names if name.startswith("input_")]

    def __call__(self, *args: Any) -> Any:
        """Return the output of the graph for the values of its placeholders, in order."""
        # Not `run`, which starts a thread of tqdm, changes the messages of errors and keeps inputs and outputs alive.
        self.env, self.args_iter = {}, iter(args)
        try:
            for node in self.graph.nodes:
                output = self.env[node] = self.run_node(node)
                for used in self.user_to_last_uses.get(node, ()):
                    del self.env[used]
            return output
        finally:
            self.env, self.args_iter = {}, iter(())


class ReceivedTensor(torch.autograd.Function):
    """Copy of a received tensor, which the stage may change in place; its gradient is contiguous for the backend."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


class StageWork(Protocol):
    """Microbatches of one run through the stages; a slot is the index of a microbatch in the run."""

    def inputs(self, slot: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model's forward."""

    def around(self, slot: int, stage: int) -> AbstractContextManager[None]:
        """Surround the forward of one stage: random state, precision."""

    def end(self, slot: int, outputs: Any) -> torch.Tensor:
        """Return the scalar loss from the model's outputs; called on the rank of the last stage."""


class PipelineStages:
    """Stages of one rank. Stage s is on rank s modulo the number of ranks of the pipeline.

    Attributes:
        world: ranks of one pipeline, the first stage's first.
        partition: of the model.
        own: indices of this rank's stages.

    `checks_divided` checks the use of divided tensors, for models with a tensor axis.
    """

    def __init__(
        self, model: nn.Module, partition: Partition, world: World, config: StrategyConfig, *, checks_divided: bool
    ) -> None:
        self.world, self.partition = world, partition
        self.own = tuple(range(world.rank, partition.count, world.size))
        self._model, self._schedule_name, self._checks_divided = model, config.schedule, checks_divided
        self._executors = {
            (training, stage): GraphExecutor(model, graphs[stage])
            for training, graphs in partition.graphs.items()
            for stage in self.own
        }
        self._schedules: dict[Hashable, Schedule] = {}
        self._metadata: dict[Hashable, list[Tensors]] = {}
        self._work: StageWork | None = None
        self._failure: Exception | None = None

    def compile(self) -> None:
        """Compile each module that this rank's stages call."""
        for name, stage in self.partition.module_stages.items():
            if stage in self.own:
                self._model.get_submodule(name).compile(dynamic=False)

    def run(self, work: StageWork, slots: Sequence[int], shapes: Hashable, *, training: bool) -> None:
        """Compute forward, and in training backward, of microbatches through all stages.

        Args:
            work: inputs and losses of the microbatches.
            slots: microbatches with inputs of equal shapes; the same on every rank of the pipeline.
            shapes: key of these shapes.
            training: includes backward.

        Raises:
            PeerLostError: another rank ended.
        """
        bind_inputs(self._model, *work.inputs(slots[0]))  # raises an input error on every rank
        self._work, self._failure = work, None
        try:
            schedule = self._schedule(slots, shapes, training=training)
            numbers = torch.tensor(slots)
            schedule.step(slot=numbers, target=numbers)
        except RuntimeError as error:
            self._schedules.clear()  # their buffers belong to an unfinished run
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure from failure.__cause__  # torch has replaced this error with its own
            if isinstance(error, dist.DistError):
                raise PeerLostError(f"rank {self.world.rank} lost its connection to another stage: {error}") from error
            raise
        finally:
            self._work = None

    def forward(self, stage: int, slot: int, received: Tensors, *, training: bool) -> Tensors:
        """Return the outputs of a stage; of the last stage, the scalar loss."""
        assert self._work is not None
        try:
            return self._forward(self._work, stage, slot, received, training=training)
        except Exception as error:
            self._failure = error
            raise

    def _forward(self, work: StageWork, stage: int, slot: int, received: Tensors, *, training: bool) -> Tensors:
        executor = self._executors[training, stage]
        by_name = bind_inputs(self._model, *work.inputs(slot)) if executor.inputs else {}
        inputs = [*map(ReceivedTensor.apply, received), *(by_name[name] for name in executor.inputs)]
        with work.around(slot, stage):
            values = checked_forward(executor, *inputs) if self._checks_divided else executor(*inputs)
            if stage == self.partition.count - 1:
                # Not a view: schedules detach it in place. float32: torch before 2.13 needs the dtype in advance.
                return (torch.stack([work.end(slot, values)]).float(),)
        # The split backward of zero_bubble requires a gradient for every input of a stage.
        requires_grad = training and self._schedule_name == "zero_bubble"
        return tuple(_prepare_output(value, stage, requires_grad=requires_grad) for value in values)

    def _schedule(self, slots: Sequence[int], shapes: Hashable, *, training: bool) -> Schedule:
        key = (shapes, len(slots), training)
        if key not in self._schedules:
            if (shapes, training) not in self._metadata:
                with torch.set_grad_enabled(training):
                    self._metadata[shapes, training] = self._exchange_metadata(slots[0], training=training)
            if len(self._schedules) >= _MAX_SCHEDULES:
                self._schedules.pop(next(iter(self._schedules)))
            stages = [self._stage(stage, self._metadata[shapes, training], training=training) for stage in self.own]
            self._schedules[key] = build_schedule(self._schedule_name, stages, len(slots), training=training)
        return self._schedules[key]

    def _exchange_metadata(self, slot: int, *, training: bool) -> list[Tensors]:
        """Return the inputs of each stage as meta tensors, on every rank of the pipeline. A collective.

        One microbatch is computed for this purpose: torch would infer the metadata from uninitialized values.
        """
        world, inputs = self.world, Tensors()
        metadata = [inputs]
        for stage in range(self.partition.count - 1):
            source = stage % world.size
            outputs = self.forward(stage, slot, inputs, training=training) if source == world.rank else ()
            rows = all_gather(
                [[list(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad] for t in outputs], world
            )[source]
            metadata.append(
                tuple(
                    torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=requires_grad)
                    for shape, dtype, requires_grad in rows
                )
            )
            inputs = Tensors()
            for number, entry in enumerate(metadata[-1]):
                is_source = source == world.rank
                tensor = outputs[number].detach().clone() if is_source else torch.empty_like(entry, device=world.device)
                world.broadcast(tensor, source)
                inputs += (tensor.requires_grad_(entry.requires_grad),)
        return metadata

    def _stage(self, stage: int, metadata: list[Tensors], *, training: bool) -> PipelineStage:
        is_last = stage == self.partition.count - 1
        return PipelineStage(
            _StageModule(self, self._model, stage, training=training),
            stage,
            self.partition.count,
            self.world.device,
            input_args=metadata[stage],
            output_args=(torch.empty(1, device="meta"),) if is_last else metadata[stage + 1],
            group=self.world.group,
        )


class _StageModule(nn.Module):
    """One stage as a module for torch's schedules, with the parameters that the stage uses."""

    def __init__(self, stages: PipelineStages, model: nn.Module, stage: int, *, training: bool) -> None:
        super().__init__()
        self._stages, self._stage, self._is_training = stages, stage, training
        users = stages.partition.parameter_stages
        self.weights = nn.ParameterList(p for name, p in model.named_parameters() if stage in users[name])

    def forward(self, *received: torch.Tensor, slot: torch.Tensor) -> Tensors | torch.Tensor:
        outputs = self._stages.forward(self._stage, int(slot), received, training=self._is_training)
        return outputs[0] if self._stage == self._stages.partition.count - 1 else outputs


def _prepare_output(value: Any, stage: int, *, requires_grad: bool) -> torch.Tensor:
    """Return an output of a stage in a form that backend and schedule accept."""
    if not isinstance(value, torch.Tensor):
        raise stage_error(
            f"stage {stage + 1} of the pipeline sends a {type(value).__name__} to the next stage",
            expected="stages send tensors",
            fix="set other strategy.stages, or compute values that derive from shapes inside a module",
        )
    # Some schedules detach outputs in place, which is not possible for a view.
    needs_copy = value._is_view() or value.is_leaf or not value.is_contiguous()
    output = value.clone(memory_format=torch.contiguous_format) if needs_copy else value
    # With `requires_grad`, the next stage sends a gradient even if this stage does not need one.
    return output.requires_grad_() if requires_grad and output.is_floating_point() else output
