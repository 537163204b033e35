"""Pipeline stages of one rank: execution of their graphs, and of each stage under a schedule of torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage

from samestep.config import StrategyConfig
from samestep.distributed.world import World, all_gather
from samestep.errors import PeerLostError
from samestep.strategies.pipeline.messages import MessageFormat, ReceivedTensor, SentTensor
from samestep.strategies.pipeline.partition import Partition, bind_inputs, stage_error
from samestep.strategies.pipeline.schedule import Schedule, build_schedule
from samestep.strategies.pipeline.shared_weights import SharedWeights
from samestep.strategies.tensor_slices import checked_forward

Tensors = tuple[torch.Tensor, ...]


class Stage(PipelineStage):
    """A stage of this rank. Random states travel next to activations, in the same order on both ranks."""

    def __init__(
        self,
        stages: PipelineStages,
        weights: list[nn.Parameter],
        stage: int,
        count: int,
        metadata: tuple[Tensors, Tensors],
        *,
        training: bool,
    ) -> None:
        """Metadata are the inputs and outputs on the meta device."""
        inputs, outputs = metadata
        super().__init__(
            _StageModule(stages, weights, stage, is_last=stage == count - 1, training=training),
            stage,
            count,
            stages.world.device,
            input_args=inputs,
            output_args=outputs,
            group=stages.world.group,
        )
        self._stages, self._training = stages, training

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive operations of a forward."""
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        states = self._stages.receive_buffer(self.stage_index, fwd_chunk_id, training=self._training)
        return operations if states is None else [*operations, self._operation(dist.irecv, states, -1)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the send operations of a forward."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        states = self._stages.states_to_send(self.stage_index, fwd_chunk_id)
        return operations if states is None else [*operations, self._operation(dist.isend, states, 1)]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Compute the backward of a microbatch; without `full_backward`, the gradients of inputs alone."""
        if not self._training:  # some schedules call this method in an evaluation too
            return
        # Not in two halves: a rank that waits for a second half could block the first halves of others.
        full = full_backward or self._stages.sends_gradients(self.stage_index)
        if full:
            self._stages.begin_backward(self.stage_index, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full, last_backward=last_backward)
        if full:
            self._stages.end_backward(self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of weights, the second half of a backward."""
        if self._stages.sends_gradients(self.stage_index):
            return
        self._stages.begin_backward(self.stage_index, bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self._stages.end_backward(self.stage_index, bwd_chunk_id)

    def _operation(self, operation: Any, tensor: torch.Tensor, offset: int) -> dist.P2POp:
        peer = (self.stage_index + offset) % self.group_size
        return dist.P2POp(operation, tensor, group=self.group, group_peer=peer)


class _StageModule(nn.Module):
    """One stage as a module for torch's schedules, with the parameters that the stage uses."""

    def __init__(
        self, stages: PipelineStages, weights: list[nn.Parameter], stage: int, *, is_last: bool, training: bool
    ) -> None:
        super().__init__()
        self._stages, self._stage, self._is_last, self._is_training = stages, stage, is_last, training
        self.weights = nn.ParameterList(weights)

    def forward(self, *received: torch.Tensor, chunk: torch.Tensor) -> Tensors | torch.Tensor:
        outputs = self._stages.forward(self._stage, int(chunk), received, training=self._is_training)
        return outputs[0] if self._is_last else outputs


_MAX_SCHEDULES = 8  # each owns receive buffers; texts of many lengths would create many
_MAX_REPETITIONS = 2  # next to one per stage: a restored layout can change that of the stage before
_RECEIVED, _SENT = True, False


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


class StageWork(Protocol):
    """Microbatches of one run through the stages; a slot is the index of a microbatch in the run."""

    def begin(self) -> None:
        """Begin the computation of all microbatches, for the first time or again."""

    def inputs(self, slot: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model's forward."""

    def around(self, slot: int, stage: int) -> AbstractContextManager[None]:
        """Surround the forward of one stage: random state of the whole model's forward, precision."""

    def seed(self, slot: int) -> None:
        """Set the random state of the whole model's forward."""

    def end(self, slot: int, outputs: Any) -> torch.Tensor:
        """Return the scalar loss from the model's outputs; called on the rank of the last stage."""

    def end_backward(self, slot: int, stage: int) -> None:
        """Take the gradients of one stage from `.grad`."""


class PipelineStages:
    """Stages of one rank. Stage s is on rank s modulo the number of ranks of the pipeline.

    A slot is the index of a microbatch in a run, a chunk its position in the schedule.

    Attributes:
        world: ranks of one pipeline, the first stage's first.
        partition: of the model.
        own: indices of this rank's stages.
        shared: weights that several stages use.
    """

    shared: SharedWeights

    def __init__(self, model: nn.Module, partition: Partition, world: World, config: StrategyConfig) -> None:
        self.world, self.partition = world, partition
        self.own = tuple(range(world.rank, partition.count, world.size))
        self._model, self._schedule_name = model, config.schedule
        self._executors = {
            (training, stage): GraphExecutor(model, graphs[stage])
            for training, graphs in partition.graphs.items()
            for stage in self.own
        }
        self._schedules: dict[Hashable, Schedule] = {}
        self._metadata: dict[Hashable, list[Tensors]] = {}
        self._format = MessageFormat(world)
        self._work: StageWork | None = None
        self._slots: Sequence[int] = ()  # of the chunks of the schedule
        self._numbers: dict[Hashable, int] = {}  # of shapes
        self._shapes = 0  # number of the present shapes
        self._states: dict[tuple[bool, int, int], torch.Tensor] = {}  # by direction, stage and chunk
        self._failure: Exception | None = None

    def compile(self) -> None:
        """Compile each module that this rank's stages call."""
        for name, stage in self.partition.module_stages.items():
            if stage in self.own:
                self._model.get_submodule(name).compile(dynamic=False)

    def run(self, work: StageWork, groups: Mapping[Hashable, Sequence[int]], *, training: bool) -> None:
        """Compute forward, and in training backward, of microbatches through all stages.

        Args:
            work: inputs and losses of the microbatches.
            groups: microbatches by the shapes of their inputs; the same on every rank of the pipeline.
            training: includes backward.

        Raises:
            PeerLostError: another rank ended.
            InputError: the memory layouts at the ends of stages differ between microbatches.
        """
        for _ in range(self.partition.count + _MAX_REPETITIONS):
            work.begin()
            for shapes, slots in groups.items():
                self._run(work, slots, shapes, training=training)
            if not self._format.agree():
                return
        raise stage_error(
            "the memory layout of a tensor or gradient at the end of a stage differs between microbatches",
            expected="one layout, which selects the kernels of the next stage",
            fix="call contiguous() on the outputs of modules, or set other strategy.stages",
        )

    def _run(self, work: StageWork, slots: Sequence[int], shapes: Hashable, *, training: bool) -> None:
        bind_inputs(self._model, *work.inputs(slots[0]))  # raises an input error on every rank
        self._work, self._slots, self._failure = work, slots, None
        try:
            schedule = self._schedule(slots, shapes, training=training)
            chunks = torch.arange(len(slots))
            schedule.step(chunk=chunks, target=chunks)
        except RuntimeError as error:
            self._schedules.clear()  # their buffers belong to an unfinished run
            self._states.clear()
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure from failure.__cause__  # torch has replaced this error with its own
            if isinstance(error, dist.DistError):
                raise PeerLostError(f"rank {self.world.rank} lost its connection to another stage: {error}") from error
            raise
        finally:
            self._work = None

    def forward(self, stage: int, chunk: int, received: Tensors, *, training: bool) -> Tensors:
        """Return the outputs of a stage; of the last stage, the scalar loss."""
        assert self._work is not None
        try:
            return self._forward(self._work, stage, chunk, received, training=training)
        except Exception as error:
            self._failure = error
            raise

    def _forward(self, work: StageWork, stage: int, chunk: int, received: Tensors, *, training: bool) -> Tensors:
        executor, slot = self._executors[training, stage], self._slots[chunk]
        by_name = bind_inputs(self._model, *work.inputs(slot)) if executor.inputs else {}
        inputs = [self._receive(stage, number, tensor) for number, tensor in enumerate(received)]
        inputs += [by_name[name] for name in executor.inputs]
        with work.around(slot, stage):
            if (states := self._states.pop((_RECEIVED, stage, chunk), None)) is not None:
                self._format.set_states(stage - 1, states, training=training)
            values = checked_forward(executor, *inputs)
            if stage == self.partition.count - 1:
                # Not a view: schedules detach it in place. float32: torch before 2.13 needs the dtype in advance.
                return (torch.stack([work.end(slot, values)]).float(),)
            states = self._format.states(stage, partial(work.seed, slot), training=training)
            if states is not None:
                self._states[_SENT, stage, chunk] = states
        values = [self._require_tensor(stage, number, value) for number, value in enumerate(values)]
        if training:
            values = self.shared.attach(stage, slot, values)
        return tuple(self._send(stage, number, value, training=training) for number, value in enumerate(values))

    def _receive(self, stage: int, number: int, tensor: torch.Tensor) -> torch.Tensor:
        layout = self._format.layout(("activation", self._shapes, stage - 1, number))
        key = "gradient", self._shapes, stage - 1, number
        observe = partial(self._format.observe_layout, key)
        result: torch.Tensor = ReceivedTensor.apply(tensor, layout, observe)  # type: ignore[no-untyped-call]
        return result

    def _require_tensor(self, stage: int, number: int, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise stage_error(
                f"stage {stage + 1} of the pipeline sends a {type(value).__name__} to the next stage",
                expected="stages send tensors",
                fix="set other strategy.stages, or compute values that derive from shapes inside a module",
            )
        self._format.observe_layout(("activation", self._shapes, stage, number), value)
        return value

    def _send(self, stage: int, number: int, value: torch.Tensor, *, training: bool) -> torch.Tensor:
        """Return an output of a stage in a form that backend and schedule accept."""
        layout = self._format.layout(("gradient", self._shapes, stage, number))
        # Some schedules detach outputs in place, which is not possible for a view.
        needs_copy = value._is_view() or value.is_leaf or not value.is_contiguous() or layout is not None
        output: torch.Tensor = SentTensor.apply(value, layout) if needs_copy else value  # type: ignore[no-untyped-call]
        # The split backward of zero_bubble requires a gradient for every input of a stage: the next stage sends one
        # even if this stage does not need one.
        requires_grad = training and self._schedule_name == "zero_bubble" and output.is_floating_point()
        return output.requires_grad_() if requires_grad else output

    def receive_buffer(self, stage: int, chunk: int, *, training: bool) -> torch.Tensor | None:
        """Return memory for the random states that a stage receives with a microbatch; None for no states."""
        states = self._format.empty_states(stage - 1, training=training) if stage > 0 else None
        if states is not None:
            self._states[_RECEIVED, stage, chunk] = states
        return states

    def states_to_send(self, stage: int, chunk: int) -> torch.Tensor | None:
        """Return the random states that a stage sends after the forward of a microbatch; None for no states."""
        return self._states.pop((_SENT, stage, chunk), None)

    def sends_gradients(self, stage: int) -> bool:
        """Return whether an earlier stage needs the gradients of a stage for its own backward."""
        return self.shared.sends(stage)

    def begin_backward(self, stage: int, chunk: int) -> None:
        """Receive the gradients of shared weights from later stages; not for a backward of inputs alone."""
        self.shared.receive(stage, self._slots[chunk])

    def end_backward(self, stage: int, chunk: int) -> None:
        """Take the gradients of a microbatch."""
        assert self._work is not None
        try:
            self._work.end_backward(self._slots[chunk], stage)
        except Exception as error:
            self._failure = error
            raise

    def _schedule(self, slots: Sequence[int], shapes: Hashable, *, training: bool) -> Schedule:
        key = (shapes, len(slots), training)
        self._shapes = self._numbers.setdefault((shapes, training), len(self._numbers))
        if key not in self._schedules:
            if (shapes, training) not in self._metadata:
                with torch.set_grad_enabled(training):
                    self._metadata[shapes, training] = self._exchange_metadata(training=training)
            if len(self._schedules) >= _MAX_SCHEDULES:
                self._schedules.pop(next(iter(self._schedules)))
            stages = [self._stage(stage, self._metadata[shapes, training], training=training) for stage in self.own]
            self._schedules[key] = build_schedule(self._schedule_name, stages, len(slots), training=training)
        return self._schedules[key]

    def _exchange_metadata(self, *, training: bool) -> list[Tensors]:
        """Return the inputs of each stage as meta tensors, on every rank of the pipeline. A collective.

        The first microbatch is computed for this purpose: torch would infer the metadata from uninitialized values.
        """
        world, inputs = self.world, Tensors()
        metadata = [inputs]
        for stage in range(self.partition.count - 1):
            source = stage % world.size
            outputs = self.forward(stage, 0, inputs, training=training) if source == world.rank else ()
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
        self._states.clear()
        self._format.learn()
        return metadata

    def _stage(self, stage: int, metadata: list[Tensors], *, training: bool) -> Stage:
        is_last = stage == self.partition.count - 1
        users = self.partition.parameter_stages
        weights = [parameter for name, parameter in self._model.named_parameters() if stage in users[name]]
        outputs = (torch.empty(1, device="meta"),) if is_last else metadata[stage + 1]
        return Stage(self, weights, stage, self.partition.count, (metadata[stage], outputs), training=training)
