"""Models that are split between ranks: tensor parallelism, pipelines, and their products.

Ranks of one tensor axis or pipeline own the same rows of a batch. Between calls each rank has its
part of a divided parameter, in the same `nn.Parameter`; a parameter of another stage has the memory
of one element. Whole calls, trials and copies compute with gathered parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from samestep.distributed.world import World, all_gather
from samestep.errors import InputError
from samestep.reduce.fast import FastReduction, Reduction
from samestep.strategies.divided_parameters import split_of
from samestep.strategies.gradient_norm import norm_of_ranks, share_norms
from samestep.strategies.pipeline.partition import require_single_uses
from samestep.strategies.pipeline.stage import Later, Stage, StageOperations
from samestep.strategies.replicated import HubStrategy
from samestep.strategies.split_optimizer_trial import require_update_by_parts
from samestep.strategies.tensor import Place, TensorParallel
from samestep.strategies.tensor_slices import Slicing, checked_forward
from samestep.view.crossings import crossing
from samestep.view.gradient_sums import Hub
from samestep.view.messages import Ranks
from samestep.view.module_tensors import Entry, ParameterSlots, replaced
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
        is_exact: whether results have the bits of one process.
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
        is_exact: bool = False,
    ) -> None:
        data = world.data
        # Ranks of one tensor axis or pipeline have the same rows: replicas alone share a batch.
        if data.size < world.size:
            ranks = Ranks(data)
            reduction = FastReduction(ranks)
        super().__init__(world, ranks, reduction, before_reduction)
        self._slices = slices
        self._plan = plan
        self.is_exact = is_exact
        self._stage: Stage | None = None
        self._tensor: TensorParallel | None = None
        self._places: dict[nn.Parameter, Place] = {}
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
            # One rank can divide products into slices, too: the number of slices decides the bits.
            world = World(0, 1, self._world.device, self._world.session)
            if shape.tensor > 1:
                world = self._connected("tensor")
            self._tensor = TensorParallel(module, Slicing(self._slice_count(), world), self._plan)
            self._places = self._tensor.parameters
        if shape.pipeline > 1:
            world = self._connected("pipeline")
            self.has_stages = True
            self._stage = Stage(module, self._world.strategy, world, self._before_reduction)
            if self.is_exact:
                require_single_uses(module, self._stage.partition)
        # A copy of a divided module has these hooks already.
        if _load_parts not in module._load_state_dict_pre_hooks.values():
            module.register_load_state_dict_pre_hook(_load_parts)
            module.register_load_state_dict_post_hook(_accept_parts)
        if self._world.size > 1:
            share_norms(self, module, Ranks(self._world))

    def _connected(self, axis: str) -> World:
        assert self._world.mesh is not None
        world = self._world.subworld(self._world.mesh.get_group(axis))
        _ = world.sockets  # connects the ranks, a collective
        return world

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Require that the optimizer needs no parts of other ranks.

        Raises:
            InputError: the optimizer does.
        """
        if optimizer in self._tried:
            return
        self._tried.add(optimizer)
        divided: dict[torch.Tensor, int] = {}
        if self._world.mesh_shape.tensor > 1:
            divided = {parameter: place.dim for parameter, place in self._places.items()}
        updated = {one for group in optimizer.param_groups for one in group["params"]}
        # Optimizers of other modules are not tried.
        if self._stage is not None and not updated.isdisjoint(self._stage.users):
            require_update_by_parts(optimizer, divided, has_stages=True)
        elif not updated.isdisjoint(divided):
            require_update_by_parts(optimizer, divided, has_stages=False)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts its gradient of a parameter in a norm over all ranks."""
        if not self._is_source(parameter):
            return False
        mesh = self._world.mesh
        if parameter in self._places or mesh is None or self._world.mesh_shape.tensor == 1:
            return True
        # All ranks of the tensor axis have the same gradient of a complete parameter.
        return mesh.get_local_rank("tensor") == 0

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
        if torch.is_grad_enabled():
            own = [parameter for parameter in call.parameters() if self.has(parameter)]
            before = self._before_reduction
            if self._stage is not None:
                # Stages reach their sums one after another: the word is sent at the beginning.
                before = _nothing
            hub = self.hub(call, own, before)
        operations: StageOperations | None = None
        if self._stage is not None:
            operations = StageOperations(call.operations)
        return _SplitParameters(hub, self._stage, self._tensor, operations)

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
        again = recomputation_inside(lambda: self.whole(module))
        with self._gathered(module, self._full_in_graph) as mapping, again:
            yield
        for one, full in mapping.items():
            # Compared by value: `weight.data.mul_` counts no write. Embeddings with `max_norm`
            # write, too.
            if self.has(one) and not torch.equal(own := self.local_part(one, full.detach()), one):
                with torch.no_grad():
                    one.copy_(own)

    def complete(self, module: nn.Module) -> AbstractContextManager[Any]:
        def leaf(parameter: nn.Parameter) -> nn.Parameter:
            return nn.Parameter(self.full_tensor(parameter, parameter), parameter.requires_grad)

        return self._gathered(module, leaf)

    @contextmanager
    def _gathered(
        self, module: nn.Module, full: Callable[[nn.Parameter], torch.Tensor]
    ) -> Iterator[Mapping[Any, torch.Tensor]]:
        # Under a pipeline all of them, in one order: each is a broadcast between the stages.
        mapping: dict[Any, torch.Tensor] = {
            parameter: full(parameter)
            for parameter in module.parameters()
            if self._stage is not None or parameter in self._places
        }
        with replaced(ParameterSlots(module).entries(mapping)):
            yield mapping

    def _full_in_graph(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the full parameter; every rank has its whole gradient, and keeps the own part."""

        def back(gradient: torch.Tensor) -> list[Any]:
            if not self.has(parameter):
                return [None]
            return [self.local_part(parameter, gradient)]

        return crossing([parameter], lambda own: [self.full_tensor(parameter, own)], back)[0]

    def full_tensor(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a parameter, or of its optimizer state. A collective."""
        return self._joined(parameter, local.detach(), is_like=True)

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
        # Dtype and shape of tensors, with None for the shape of the parameter; other values have no
        # dtype.
        facts: dict[str, dict[str, list[Any]]] = {name: {} for name in own}
        for name, slots in own.items():
            for slot, value in slots.items():
                facts[name][slot] = [None, value]
                if isinstance(value, torch.Tensor):
                    is_like = value.shape == parameters[name].shape
                    shape = None if is_like else list(value.shape)
                    facts[name][slot] = [str(value.dtype).removeprefix("torch."), shape]
        if self._stage is not None:  # ranks of other stages have no values of these parameters
            every = all_gather(facts, self._world)
            facts = {name: slots for rank in every for name, slots in rank.items()}
        for name, parameter in parameters.items():
            for slot, (dtype, fact) in facts.get(name, {}).items():
                if dtype is None:
                    yield name, slot, fact
                    continue
                if name in own:
                    # Adam's number of steps is on the CPU; other ranks receive on their device.
                    local = own[name][slot].detach().to(self._world.device)
                else:
                    full_shape = parameter.shape if fact is None else fact
                    kind = getattr(torch, dtype)
                    local = torch.empty(full_shape, dtype=kind, device=self._world.device)
                yield name, slot, self._joined(parameter, local, is_like=fact is None)

    def _joined(
        self, parameter: nn.Parameter, local: torch.Tensor, *, is_like: bool
    ) -> torch.Tensor:
        if self._stage is not None:
            # Stages first: each rank of the tensor axis needs its own part before parts are joined.
            local = self._stage.full_tensor(local, self._stage.users[parameter][0])
        if is_like and self._tensor is not None and parameter in self._places:
            return self._tensor.full_tensor(self._places[parameter], local)
        return local

    def _is_source(self, parameter: nn.Parameter) -> bool:
        return self._stage is None or self._stage.users[parameter][0] == self._stage.number

    def local_part(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor of a parameter, as a view."""
        if self._tensor is not None and parameter in self._places:
            return self._tensor.local_part(self._places[parameter], full)
        return full


class _SplitParameters(CallParameters):
    """Parameters of one call, and the forward of an own slice.

    Args:
        hub: hub of the own parameters; None without gradients.
        stage: stage of this rank, if there is a pipeline.
        tensor: divided products, if there are any.
        operations: operations of all stages in calls of the kind, if there is a pipeline.
    """

    _is_inner = False

    def __init__(
        self,
        hub: Hub | None,
        stage: Stage | None,
        tensor: TensorParallel | None,
        operations: StageOperations | None,
    ) -> None:
        if hub is not None:
            self.anchors = hub.anchors
        self.placed: list[torch.Tensor] = []
        self._hub = hub
        self._stage = stage
        self._tensor = tensor
        self._operations = operations
        self._shared: list[tuple[list[Entry], list[torch.Tensor]]] = []  # of the own slices
        self._finished = 0

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
    def in_backward(self, leaves: Sequence[torch.Tensor], position: int) -> Iterator[None]:
        with self._leaves_in_place(leaves), self._divided_weights():
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
        with replaced(self._shared[position][0]), self._divided_weights():
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


def _load_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace full tensors of a state dict by own parts, and remove those of other stages."""
    split = split_of(module)
    if split is None:  # of a copy of a module, with the hooks of the original
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = prefix + name
        if key in state_dict and not split.has(parameter):
            split.elsewhere.add(key)
            del state_dict[key]
        elif key in state_dict and state_dict[key].shape != parameter.shape:
            # Of a plain module; parts from `state_dict` of a divided one stay as they are.
            state_dict[key] = split.local_part(parameter, state_dict[key])


def _accept_parts(module: nn.Module, incompatible: Any) -> None:
    """Remove the keys of other stages from those that a state dict does not have."""
    split = split_of(module)
    if split is not None:
        missing = incompatible.missing_keys
        # In place: torch reports this list after the hooks.
        missing[:] = [key for key in missing if key not in split.elsewhere]
        split.elsewhere.clear()


def _nothing() -> None:
    """Do nothing."""
