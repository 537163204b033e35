"""One stage of a pipeline on this rank: its parameters, and its part of the forward of a slice.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"
(2019), without a scheduler: all ranks run the slices of a batch in one order, and autograd runs the
backwards of a rank last slice first, so that messages pair up and stages overlap.

Decisions: docs/decisions/layouts.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from samestep.config import StrategyConfig
from samestep.distributed.device_reads import device_reads
from samestep.distributed.world import World
from samestep.strategies.divided_parameters import is_divided
from samestep.strategies.dtensors import local_part
from samestep.strategies.pipeline.partition import (
    Partition,
    bind_inputs,
    partition_model,
    stage_error,
)
from samestep.strategies.pipeline.stage_messages import (
    Links,
    Message,
    Outputs,
    Received,
    Sent,
    Shared,
)
from samestep.strategies.tensor_slices import checked_forward
from samestep.view.module_tensors import Entry, ParameterSlots
from samestep.view.operations import Operation, Operations

_MARK = "stage "


class GraphExecutor:
    """Execution of a stage's graph with the current modules and tensors of a model.

    Attributes:
        inputs: names of the inputs of the model that the graph needs.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        self.inputs = [name.removeprefix("input_") for name in names if name.startswith("input_")]
        self._model = model
        code = graph.python_code("self")
        self._names = dict(code.globals)
        # Not a `GraphModule`, which would compute with the parameters that the model has now.
        exec(code.src, self._names)

    def __call__(self, *args: Any) -> Any:
        """Return the output of the graph for the values of its placeholders, in order."""
        return self._names["forward"](self._model, *args)


@dataclass
class Later:
    """Result of the forward of a slice, which is sent after the forwards of all own slices.

    Attributes:
        tokens: scalars of the graph that stand for the results of other ranks.
        values: result, on the rank of the last stage.
        numbers: Python numbers that stages up to this one took out of tensors, as texts.
        operations: operations of this stage.
        has_failed: this stage or an earlier one failed.
        error: error of this stage.
    """

    tokens: list[torch.Tensor] = field(default_factory=list)
    values: Any = None
    numbers: list[str] = field(default_factory=list)
    operations: Operations | None = None
    has_failed: bool = False
    error: Exception | None = None

    def __new__(cls, *_: Any, **__: Any) -> Later:
        """Return a new object. A class with this method is one leaf of a result, not opened."""
        return object.__new__(cls)


class StageOperations:
    """Operations of each stage in a trial, after a mark of the stage, and the draws before each.

    Args:
        operations: those of the whole module, with the marks.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.by_stage: list[list[Operation]] = []
        self.draws: list[int] = []
        for operation in operations:
            if isinstance(operation, str) and operation.startswith(_MARK):
                self.by_stage.append([])
                self.draws.append(int(operation.split()[-1]))
            if self.by_stage:
                self.by_stage[-1].append(operation)


class Stage:
    """Stage of this rank.

    Args:
        module: the whole model; the parameters of other stages are released.
        config: stages, or none for balanced ones.
        world: ranks of the pipeline.
        begin: called by each slice in a backward; sends a word at the beginning of one.

    Raises:
        InputError: the model cannot be partitioned.
    """

    def __init__(
        self, module: nn.Module, config: StrategyConfig, world: World, begin: Callable[[], None]
    ) -> None:
        self.number = world.rank
        self.count = world.size
        self.partition: Partition = partition_model(module, config.stages, world.size)
        if self.partition.count != world.size:
            raise stage_error(
                f"{self.partition.count} stages on {world.size} ranks",
                expected="one stage on each rank of a pipeline",
                fix=f"--mesh pipeline={self.partition.count}, or name {world.size - 1} modules in "
                "strategy.stages",
            )
        self.links = Links(world)
        self._module = module
        self._begin = begin
        self._executors = {
            (training, stage): GraphExecutor(module, graph)
            for training, graphs in self.partition.graphs.items()
            for stage, graph in enumerate(graphs)
        }
        # Messages are in the graph by this scalar, also without own weights that need gradients.
        self._anchor = torch.zeros((), device=world.device, requires_grad=True)
        # Also their sequence numbers, so low that they run after the backwards of all slices.
        self._shared_nodes = 0
        self._slots = ParameterSlots(module)
        self.users: dict[nn.Parameter, tuple[int, ...]] = {}
        self._shared: list[tuple[nn.Parameter, tuple[int, ...]]] = []
        for name, parameter in module.named_parameters():
            users = self.partition.parameter_stages[name]
            self.users[parameter] = users
            if self.number not in users:
                self._release(parameter)
            elif parameter.requires_grad and len(users) > 1:
                self._shared.append((parameter, users))

    @staticmethod
    def _release(parameter: nn.Parameter) -> None:
        placeholder = _placeholder(local_part(parameter.detach()))
        if is_divided(parameter):
            divided: Any = parameter
            divided._local_tensor = placeholder
        else:
            parameter.data = placeholder

    # --- parameters of all stages ----------------------------------------------------------------

    def full_tensor(self, local: torch.Tensor, source: int) -> torch.Tensor:
        """Return a tensor that the stage `source` has, as a new one. A collective."""
        full = local.detach().clone(memory_format=torch.contiguous_format)
        self.links.world.broadcast(full, source)
        return full

    def share_buffers(self, buffers: Sequence[tuple[nn.Module, str]]) -> None:
        """Give buffers that a call has written to the other stages. A collective."""
        names = {module: name for name, module in self._module.named_modules()}
        world = self.links.world
        tensors = []
        own_versions = []
        for module, name in buffers:
            buffer = module._buffers[name]
            if buffer is not None:
                source = self._stage_of(names[module])
                tensors.append((buffer, source))
                # One rank has another number than zero: the sum is the version of the source.
                own_versions.append(buffer._version * (source == self.number))
        if not tensors:
            return
        versions = torch.tensor(own_versions, device=world.device)
        world.all_reduce(versions)
        for (buffer, source), version in zip(tensors, device_reads.values(versions), strict=True):
            values = self.full_tensor(buffer, source)
            if source != self.number:
                with torch.no_grad():
                    buffer.copy_(values)
                # Ranks compare numbers of writes; private, in torch 2.11 and 2.13.
                torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))

    def _stage_of(self, module: str) -> int:
        stages = self.partition.module_stages
        while module and module not in stages:
            module = module.rpartition(".")[0]  # the ancestor
        return stages.get(module, 0)

    # --- forward ---------------------------------------------------------------------------------

    def in_order(self, *args: Any, **kwargs: Any) -> Any:
        """Compute all stages on this rank, which has all parameters, and mark their operations."""
        by_name = bind_inputs(self._module, args, kwargs)
        mode = _operations()
        values: Any = ()
        for stage in range(self.count):
            if mode is not None:
                mode.functions.append(f"{_MARK}{stage} after draws: {len(mode.draws)}")
            executor = self._executors[self._module.training, stage]
            values = executor(*values, *[by_name[name] for name in executor.inputs])
        return values

    def forward(self, expected: StageOperations, *args: Any, **kwargs: Any) -> Later:
        """Compute this stage for one slice: receive, compute, and send."""
        later = Later(operations=_operations())
        received: Message | None = None
        if self.number > 0:
            with _hidden():
                received = self.links.receive(self.number - 1)
            later.has_failed = received.has_failed
            later.numbers = received.values or []
        if not later.has_failed:
            try:
                later.values = self._compute(expected, received, args, kwargs)
            except Exception as error:  # boundary: raised in `outputs`; others wait for a message
                later.has_failed = True
                later.error = error
        # Ranks compare numbers that a forward takes out of tensors; each stage sees its own.
        if later.operations is not None:
            later.numbers += map(repr, later.operations.numbers)
        if self.number < self.count - 1:
            with _hidden():
                self._send(later)
        return later

    def _compute(
        self, expected: StageOperations, received: Message | None, args: Any, kwargs: Any
    ) -> Any:
        by_name = bind_inputs(self._module, args, kwargs)
        executor = self._executors[self._module.training, self.number]
        tensors: Sequence[torch.Tensor] = ()
        if received is not None:
            tensors = received.tensors
            if torch.is_grad_enabled() and any(received.have_gradients):
                with _hidden():
                    tensors = Received.apply(  # type: ignore[no-untyped-call]
                        self.links, self.number - 1, received, self._anchor
                    )
        inputs = [by_name[name] for name in executor.inputs]
        with self._among_operations(expected):
            values = checked_forward(executor, *tensors, *inputs)
        is_last = self.number == self.count - 1
        if not is_last and not all(isinstance(value, torch.Tensor) for value in values):
            raise stage_error(
                f"stage {self.number + 1} of the pipeline sends other values than tensors to the "
                "next stage",
                expected="stages send tensors",
                fix="set other strategy.stages, or compute values that derive from shapes inside "
                "a module",
            )
        return values

    @contextmanager
    def _among_operations(self, expected: StageOperations) -> Iterator[None]:
        """Put the operations of this stage among those of the others, as in a trial."""
        mode = _operations()
        if mode is None or len(expected.by_stage) != self.count:
            yield
            return
        for operations in expected.by_stage[: self.number]:
            mode.functions += operations
        mode.functions.append(expected.by_stage[self.number][0])
        mode.draws += [()] * (expected.draws[self.number] - len(mode.draws))
        yield
        for operations in expected.by_stage[self.number + 1 :]:
            mode.functions += operations

    def shared_weights(self) -> tuple[list[Entry], list[torch.Tensor]]:
        """Return places for weights of several stages, and their tokens.

        Their gradients are summed over the stages, and each token needs a gradient in every
        backward. The sums run after the backwards of all slices: they wait for another stage, which
        waits for gradients of this one.
        """
        entries: list[Entry] = []
        tokens: list[torch.Tensor] = []
        aliases: dict[int, torch.Tensor] = {}
        for parameter, ranks in self._shared:
            for container, key, _, _ in self._slots.entries({parameter: self._anchor}):
                # The present value: the hub has put an alias of the parameter there.
                value = container[key]
                if not isinstance(value, torch.Tensor):
                    continue
                # Tied places of a weight share one alias, and so one sum.
                if id(value) not in aliases:
                    alias, token = Shared.apply(self.links, ranks, value)  # type: ignore[no-untyped-call]
                    # Those of later slices run first, in one order on all ranks.
                    self._shared_nodes += 1
                    token.grad_fn._set_sequence_nr(self._shared_nodes)
                    aliases[id(value)] = alias
                    tokens.append(token)
                entries.append((container, key, value, aliases[id(value)]))
        return entries, tokens

    def _send(self, later: Later) -> None:
        message = Message(has_failed=True)
        if not later.has_failed:
            values = later.values
            message = Message(values, [value.requires_grad for value in values], later.numbers)
        self.links.send(message, [self.number + 1])
        if any(message.have_gradients):
            sent = Sent.apply(self.links, self.number + 1, *message.tensors)  # type: ignore[no-untyped-call]
            later.tokens.append(sent)

    # --- outputs ---------------------------------------------------------------------------------

    def outputs(self, later: Later) -> Any:
        """Return the result of a slice on every rank. A collective of the pipeline.

        Raises:
            Exception: a stage failed.
        """
        last = self.count - 1
        # Every rank returns the result: the script's loss is computed on all of them.
        if self.number == last:
            message = _of_result(later)
            self.links.send(message, range(last))
        else:
            message = self.links.receive(last)
        if message.has_failed:
            raise later.error or RuntimeError("another stage of the pipeline has failed")
        others, text, numbers = message.values
        if later.operations is not None:  # which ranks compare
            later.operations.numbers = numbers
        tensors = message.tensors
        if torch.is_grad_enabled() and any(message.have_gradients):
            own = len(tensors) if self.number == last else 0
            # With the anchor every rank has this node, in the backward of which a word is sent:
            # stages reach their sums of gradients one after another.
            tokens = [*later.tokens, self._anchor]
            tensors = Outputs.apply(  # type: ignore[no-untyped-call]
                self._begin, message.have_gradients, own, *tensors, *tokens
            )
        remaining = iter(tensors)
        leaves = [next(remaining) if other is None else other[0] for other in others]
        return tree_unflatten(leaves, treespec_loads(text))


def _hidden() -> Any:
    """Hide operations that are not the module's from function modes during a block."""
    return torch._C.DisableTorchFunction()


def _operations() -> Operations | None:
    """Return the mode that observes the operations of a call."""
    modes = _get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, Operations)), None)


def _of_result(later: Later) -> Message:
    if later.has_failed:
        return Message(has_failed=True)
    leaves, spec = tree_flatten(later.values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [None if isinstance(leaf, torch.Tensor) else [leaf] for leaf in leaves]
    return Message(
        tensors,
        [tensor.requires_grad for tensor in tensors],
        [others, treespec_dumps(spec), later.numbers],
    )


def _placeholder(parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the shape of a parameter and the memory of one element."""
    # A use by mistake is seen in every result.
    value = float("nan") if parameter.is_floating_point() else 0
    one = torch.full((1,) * parameter.dim(), value, dtype=parameter.dtype, device=parameter.device)
    return one.expand(parameter.shape)
