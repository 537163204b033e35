"""Models that are split between ranks: tensor parallelism, pipelines, and their products.

Ranks of one tensor axis or pipeline own the same rows of a batch. Between calls, parameters are
DTensors of a tensor axis; a parameter of another stage has the memory of one element. Whole calls,
trials and copies compute with gathered parameters.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from samestep.config.exclusions import excluded
from samestep.distributed.world import World, all_gather
from samestep.errors import InputError
from samestep.reduce.fast import FastReduction, Reduction
from samestep.strategies.divided_parameters import is_divided, split_of
from samestep.strategies.dtensor_operations import compute_whole
from samestep.strategies.dtensor_parameters import (
    FormerParameters,
    complete_arguments,
    count_writes,
    divide_loaded_state,
    full_in_places,
    keep_written,
)
from samestep.strategies.dtensors import (
    Division,
    as_divided,
    gathered,
    has_parts,
    local_part,
)
from samestep.strategies.gradient_norm import norm_of_ranks, share_norms
from samestep.strategies.local_parts import LocalHub, LocalParts
from samestep.strategies.pipeline.partition import require_single_uses
from samestep.strategies.pipeline.stage import Later, Stage, StageOperations
from samestep.strategies.replicated import HubStrategy
from samestep.strategies.stage_optimizer_trial import require_update_by_stages
from samestep.strategies.tensor import TensorParallel
from samestep.strategies.tensor_slices import Slicing, checked_forward
from samestep.view.crossings import crossing
from samestep.view.gradient_sums import Hub
from samestep.view.messages import Ranks
from samestep.view.module_tensors import Entry, replaced
from samestep.view.recomputation import recomputation_inside
from samestep.view.strategy import Call, CallParameters


class Split(HubStrategy):
    """A tensor axis, a pipeline axis, or both, and replicas of these groups of ranks.

    Args:
        world: all ranks.
        ranks: all ranks.
        reduction: sums over all ranks.
        before_reduction: as of every strategy.
        slices: slices of matrix products; 1 for the size of the tensor axis.
        plan: kinds of division by shell pattern of module names; empty for built-in plans.
        is_exact: as of every strategy.
    """

    splits_module = True
    exchanges_in_calls = True

    def __init__(
        self,
        world: World,
        ranks: Ranks,
        reduction: Reduction,
        before_reduction: Callable[[], None],
        *,
        slices: int = 1,
        plan: Mapping[str, str] = MappingProxyType({}),
        is_exact: bool,
    ) -> None:
        data = world.data
        # Ranks of one tensor axis or pipeline have the same rows: replicas alone share a batch.
        if data.size < world.size:
            ranks = Ranks(data)
            reduction = FastReduction(ranks)
        super().__init__(world, ranks, reduction, before_reduction, is_exact=is_exact)
        self._slices = slices
        self._plan = plan
        self._stage: Stage | None = None
        self._tensor: TensorParallel | None = None
        self._former: FormerParameters | None = None
        self._locals = LocalParts()
        self._process = os.getpid()
        self._tried: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.elsewhere: set[str] = set()  # keys of other stages, during `load_state_dict`

    def of_copy(self) -> Split:
        arguments = (self._world, self.ranks, self.reduction, self._before_reduction)
        return Split(*arguments, slices=self._slices, plan=self._plan, is_exact=self.is_exact)

    def prepare(self, module: nn.Module) -> None:
        """Divide the parameters, and drop those of other stages.

        Raises:
            InputError: the model has no plan of its products, or cannot be partitioned.
        """
        shape = self._world.mesh_shape
        if shape.tensor > 1 or self._slices > 1:
            self._divide_products(module)
        if shape.pipeline > 1:
            world = self._connected("pipeline")
            self.has_stages = True
            self._stage = Stage(module, self._world.strategy, world, self._before_reduction)
            if self.is_exact:
                require_single_uses(module, self._stage.partition)
            # A copy of a divided module has these hooks already.
            if _load_stages not in module._load_state_dict_pre_hooks.values():
                module.register_load_state_dict_pre_hook(_load_stages)
                module.register_load_state_dict_post_hook(_accept_stages)
            share_norms(self, module, Ranks(self._world))

    def _divide_products(self, module: nn.Module) -> None:
        mesh: DeviceMesh | None = None
        # One rank can divide products into slices, too: the number of slices decides the bits.
        world = World(0, 1, self._world.device, self._world.session)
        if self._world.mesh_shape.tensor > 1:
            assert self._world.mesh is not None
            compute_whole(is_exact=self.is_exact)
            world = self._connected("tensor")
            mesh = self._world.mesh["tensor"]
            self.hub_class = LocalHub
            # As FSDP does: a DTensor is on the device of its mesh.
            module.to(self._world.device)
            self._former = FormerParameters(module)
        slicing = Slicing(self._slice_count(), world)
        self._tensor = TensorParallel(module, slicing, self._plan, mesh)
        if self._former is not None:
            self._former.replace()

    def _connected(self, axis: str) -> World:
        assert self._world.mesh is not None
        world = self._world.subworld(self._world.mesh.get_group(axis))
        _ = world.sockets  # connects the ranks, a collective
        return world

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Require an optimizer of these parameters, which needs none of other stages.

        Raises:
            InputError: it was made before the division, or needs parameters of other stages.
        """
        super().before_step(optimizer)
        if self._former is not None:
            self._former.require_others(optimizer)
            divide_loaded_state(optimizer)
            count_writes(optimizer)
        if self._stage is None or optimizer in self._tried:
            return
        self._tried.add(optimizer)
        updated = {one for group in optimizer.param_groups for one in group["params"]}
        # Optimizers of other modules are not tried.
        if not updated.isdisjoint(self._stage.users):
            require_update_by_stages(optimizer)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts its gradient of a parameter in a norm over all ranks."""
        if not self._is_source(parameter):
            return False
        if self._tensor is None or has_parts(parameter):
            return True
        # All ranks of the tensor axis have the same gradient of a complete parameter.
        return self._tensor.slicing.rank == 0

    def norm_of_parts(
        self, parts: Sequence[torch.Tensor], order: float, ranks: Ranks
    ) -> torch.Tensor:
        """Return the norm of the gradients that all ranks count. A collective."""
        self._before_reduction()
        return norm_of_ranks(parts, order, ranks, self._world.data.size)

    def _slice_count(self) -> int:
        ranks = self._world.mesh_shape.tensor
        count = self._slices if self._slices > 1 else ranks
        if count % ranks:
            largest = max(size for size in range(1, ranks) if count % size == 0)
            raise InputError(
                f"{count} slices of matrix products, with a tensor axis of {ranks}",
                expected="a rank of the tensor axis computes complete slices, as many as every "
                "other rank",
                fix=f"--mesh tensor={largest}, or a multiple of {ranks} slices, with other results",
                code="E_STRATEGY",
            )
        return count

    # --- divided calls ---------------------------------------------------------------------------

    def parameters(self, call: Call) -> CallParameters:
        hub: Hub | None = None
        own: list[nn.Parameter] = []
        if torch.is_grad_enabled():
            own = [parameter for parameter in call.parameters() if self.has(parameter)]
            before = self._before_reduction
            if self._stage is not None:
                # Stages reach their sums one after another: the word is sent at the beginning.
                before = _nothing
            hub = self.hub(call, own, before)
            if isinstance(hub, LocalHub):
                hub.note_writes()
        operations: StageOperations | None = None
        if self._stage is not None:
            operations = StageOperations(call.operations)
        others: list[Entry] = []
        if self._former is not None:
            self._require_divided()
            others = self._locals.entries(call, own)
        return _SplitParameters(hub, others, self._stage, self._tensor, operations)

    def _require_divided(self) -> None:
        assert self._tensor is not None
        for place in self._tensor.parameters.values():
            own = place.module._parameters.get(place.key)
            if own is None or not is_divided(own):
                names = (place.key, type(place.module).__name__)
                raise excluded("a parameter that is not divided", *names)

    def arguments(self, arguments: Any) -> Any:
        return complete_arguments(arguments)

    def has(self, parameter: nn.Parameter) -> bool:
        return self._stage is None or self._stage.number in self._stage.users[parameter]

    def forward_of_trial(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        if self._stage is None:
            return forward
        return self._stage.in_order

    def share_buffers(self, buffers: Sequence[tuple[nn.Module, str]]) -> None:
        if self._stage is not None:
            self._stage.share_buffers(buffers)

    # --- complete parameters ---------------------------------------------------------------------

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Put gathered parameters into the module; own parts of gradients and values are kept."""
        if not self._has_parts:
            yield
            return
        again = recomputation_inside(lambda: self.whole(module))
        with full_in_places(module, self._full_in_graph, self._process) as mapping, again:
            yield
        keep_written({one: full for one, full in mapping.items() if self.has(one)})

    def complete(self, module: nn.Module) -> AbstractContextManager[Any]:
        def leaf(parameter: nn.Parameter) -> nn.Parameter | None:
            if not self._is_part(parameter):
                return None
            return nn.Parameter(self.full_tensor(parameter), parameter.requires_grad)

        if not self._has_parts:
            return nullcontext()
        return full_in_places(module, leaf, self._process)

    @property
    def _has_parts(self) -> bool:
        """Whether other ranks have parts; one rank can divide products into slices, too."""
        return self._stage is not None or self._former is not None

    def _is_part(self, parameter: nn.Parameter) -> bool:
        # Under a pipeline all of them, in one order: each is a broadcast between the stages.
        return self._stage is not None or is_divided(parameter)

    def _full_in_graph(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the full parameter; every rank has its whole gradient, and keeps the own part."""
        if not self._is_part(parameter):
            return None
        if self._stage is None:
            return gathered(parameter)

        def back(gradient: torch.Tensor) -> list[Any]:
            if not self.has(parameter):
                return [None]
            if is_divided(parameter):
                divided: Any = parameter
                return [as_divided(Division.of(divided), parameter.device, gradient)]
            return [gradient]

        return crossing([parameter], lambda _: [self.full_tensor(parameter)], back)[0]

    def full_tensor(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the full value of a parameter. A collective."""
        local = local_part(parameter.detach())
        return self._joined(parameter, local, is_part=is_divided(parameter))

    def full_values(
        self, parameters: Mapping[str, nn.Parameter], values: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[str, str, Any]]:
        """Yield name, slot and full value of parameters, gradients and state. A collective.

        Args:
            parameters: parameters by name.
            values: values that this rank has, by name and slot.
        """
        # A weight of several stages comes from the first of them.
        own = {name: slots for name, slots in values.items() if self._is_source(parameters[name])}
        # Dtype of tensors, whether they are DTensors, and the shape of the own part; other values
        # have no dtype.
        facts: dict[str, dict[str, list[Any]]] = {name: {} for name in own}
        for name, slots in own.items():
            for slot, value in slots.items():
                facts[name][slot] = [None, False, value]
                if isinstance(value, torch.Tensor):
                    dtype = str(value.dtype).removeprefix("torch.")
                    facts[name][slot] = [dtype, is_divided(value), list(local_part(value).shape)]
        # Ranks of other stages have no values of these parameters.
        every = all_gather(facts, self._world)
        facts = {name: slots for rank in every for name, slots in rank.items()}
        for name, parameter in parameters.items():
            for slot, (dtype, is_part, fact) in facts.get(name, {}).items():
                if dtype is None:
                    yield name, slot, fact
                    continue
                if name in own:
                    # Adam's number of steps is on the CPU; other ranks receive on their device.
                    local = local_part(own[name][slot].detach()).to(self._world.device)
                else:
                    kind = getattr(torch, dtype)
                    local = torch.empty(fact, dtype=kind, device=self._world.device)
                yield name, slot, self._joined(parameter, local, is_part=is_part)

    def _joined(
        self, parameter: nn.Parameter, local: torch.Tensor, *, is_part: bool
    ) -> torch.Tensor:
        if self._stage is not None:
            # Stages first: each rank of the tensor axis needs its own part before parts are joined.
            local = self._stage.full_tensor(local, self._stage.users[parameter][0])
        if is_part:
            divided: Any = parameter
            return Division.of(divided).full_tensor(local)
        return local

    def _is_source(self, parameter: nn.Parameter) -> bool:
        return self._stage is None or self._stage.users[parameter][0] == self._stage.number


class _SplitParameters(CallParameters):
    """Parameters of one call, and the forward of an own slice.

    Args:
        hub: hub of the own parameters; None without gradients.
        others: places of DTensors without a hub, and this rank's parts.
        stage: stage of this rank, if there is a pipeline.
        tensor: divided products, if there are any.
        operations: operations of all stages in calls of the kind, if there is a pipeline.
    """

    _is_inner = False

    def __init__(
        self,
        hub: Hub | None,
        others: list[Entry],
        stage: Stage | None,
        tensor: TensorParallel | None,
        operations: StageOperations | None,
    ) -> None:
        if hub is not None:
            self.anchors = hub.anchors
        self.placed: list[torch.Tensor] = []
        self._hub = hub
        self._others = others
        self._stage = stage
        self._tensor = tensor
        self._operations = operations
        self._shared: list[tuple[list[Entry], list[torch.Tensor]]] = []  # of the own slices
        self._finished = 0

    def begin_backward(self) -> None:
        if self._hub is not None:
            self._hub.begin_backward()

    def aliases(self, position: int) -> list[torch.Tensor]:
        if self._hub is None:
            return []
        return self._hub.aliases(position)

    @contextmanager
    def aliases_in_place(self, position: int) -> Iterator[None]:
        aliases: AbstractContextManager[None] = nullcontext()
        if self._hub is not None:
            aliases = self._hub.aliases_in_place(position)
        with aliases, self._others_in_place(position):
            yield

    @contextmanager
    def in_place(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        with self._leaves_in_place(leaves), self._others_in_place(len(self._shared)):
            yield

    @contextmanager
    def in_backward(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        with (
            self._leaves_in_place(leaves),
            replaced(self._others),
            self._divided_weights(),
        ):
            yield

    def _leaves_in_place(self, leaves: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        self._is_inner = True
        if self._hub is None:
            return nullcontext()
        return self._hub.in_place(leaves)

    @contextmanager
    def _others_in_place(self, position: int) -> Iterator[None]:
        if position == len(self._shared):
            shared: tuple[list[Entry], list[torch.Tensor]] = ([], [])
            if self._stage is not None and torch.is_grad_enabled():
                shared = self._stage.shared_weights()
                self.placed += shared[1]
            self._shared.append(shared)
        with (
            replaced(self._others),
            replaced(self._shared[position][0]),
            self._divided_weights(),
        ):
            yield

    def _divided_weights(self) -> AbstractContextManager[None]:
        if self._tensor is None:
            return nullcontext()
        return self._tensor.divided_weights()

    def forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        if self._stage is None or self._operations is None:
            return partial(checked_forward, forward)
        compute = partial(self._stage.forward, self._operations)
        if self._is_inner:  # one node of the graph, with the outputs
            return lambda *args, **kwargs: self.finish(compute(*args, **kwargs))
        return compute

    def finish(self, result: Any) -> Any:
        if isinstance(result, Later):
            assert self._stage is not None
            result.tokens += self._shared[self._finished][1]
            self._finished += 1
            return self._stage.outputs(result)
        return result


def _load_stages(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove the parameters of other stages from a state dict."""
    split = split_of(module)
    if split is None:  # of a copy of a module, with the hooks of the original
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = prefix + name
        if key in state_dict and not split.has(parameter):
            split.elsewhere.add(key)
            del state_dict[key]


def _accept_stages(module: nn.Module, incompatible: Any) -> None:
    """Remove the keys of other stages from those that a state dict does not have."""
    split = split_of(module)
    if split is not None:
        missing = incompatible.missing_keys
        # In place: torch reports this list after the hooks.
        missing[:] = [key for key in missing if key not in split.elsewhere]
        split.elsewhere.clear()


def _nothing() -> None:
    """Do nothing."""
