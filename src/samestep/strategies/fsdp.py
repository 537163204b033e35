"""Fully sharded data parallel over all ranks (`fsdp`), or within groups of ranks (`hsdp`).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020);
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023).

Between calls the module is the script's own: its class, its hooks, and its parameters as DTensors.
`fsdp_gathers` gathers them during calls and backwards, and `GatheredHub` under `exact`. Whole
calls, trials and copies compute with gathered parameters.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.config import StrategyConfig
from samestep.config.exclusions import excluded
from samestep.distributed.devices import is_accelerator
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.reduce.fast import Reduction
from samestep.strategies.divided_parameters import is_divided
from samestep.strategies.dtensor_operations import compute_whole
from samestep.strategies.dtensor_parameters import (
    FormerParameters,
    complete_arguments,
    count_writes,
    divide_loaded_state,
    full_in_places,
    keep_written,
)
from samestep.strategies.dtensors import full_value, gathered, local_part
from samestep.strategies.fsdp_gathers import Gathers, ShardedParameters, Unit
from samestep.view.gradient_sums import Hub
from samestep.view.module_tensors import is_in_place
from samestep.view.recomputation import recomputation_inside
from samestep.view.strategy import Call, CallParameters, Strategy

_MAX_UNITS = 200  # each unit is one message in forward and one in backward


class Sharded(Strategy):
    """Parameters divided between ranks, gathered for a unit of layers at a time.

    Parameters without a dimension stay complete; a hub sums their gradients.
    """

    exchanges_in_calls = True

    def __init__(self, *arguments: Any, is_exact: bool) -> None:
        super().__init__(*arguments, is_exact=is_exact)
        self._gathers = Gathers()
        self._former: FormerParameters | None = None
        self._hub: Hub | None = None
        self._process = os.getpid()

    def prepare(self, module: nn.Module) -> None:
        compute_whole(is_exact=self.is_exact)
        # `fully_shard` gives modules other classes, which scripts would see.
        classes = {part: type(part) for part in module.modules()}
        self._former = FormerParameters(module)
        if any(map(is_divided, module.parameters())):
            shard_remainder(module, self._world)
        else:
            shard_model(module, self._world)
        self._former.replace()
        self._gathers.units += [
            Unit(part, own_class, self._gathers)
            for part, own_class in classes.items()
            if isinstance(part, FSDPModule)
        ]

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide state that was loaded from a file, and require that no parameter is undivided."""
        assert self._former is not None
        self._former.require_others(optimizer)
        divide_loaded_state(optimizer)
        count_writes(optimizer)

    def arguments(self, arguments: Any) -> Any:
        return complete_arguments(arguments)

    def parameters(self, call: Call) -> CallParameters:
        # Calls of one training mode gather the same units, in one order.
        self._gathers.begin_call((call.module.training, torch.is_grad_enabled()))
        return ShardedParameters(
            call, self._gathers, self._hub_of_complete(call), self._before_reduction
        )

    def _hub_of_complete(self, call: Call) -> Hub | None:
        complete = [one for one in call.parameters() if not isinstance(one, DTensor)]
        if not complete or not torch.is_grad_enabled():
            return None
        if self._hub is None or not self._hub.is_current(complete):
            self._hub = Hub(call.module, complete, self.reduction, self._before_reduction)
        return self._hub

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Put gathered parameters into the module; each rank keeps its part of their gradients."""

        def full(parameter: nn.Parameter) -> torch.Tensor | None:
            return gathered(parameter) if isinstance(parameter, DTensor) else None

        again = recomputation_inside(lambda: self.whole(module))
        with full_in_places(module, full, self._process) as mapping, again:
            yield
        keep_written(mapping)

    def complete(self, module: nn.Module) -> AbstractContextManager[Any]:
        def leaf(parameter: nn.Parameter) -> nn.Parameter | None:
            if not isinstance(parameter, DTensor):
                return None
            return nn.Parameter(full_value(parameter), parameter.requires_grad)

        return full_in_places(module, leaf, self._process)


class Gathered(Sharded):
    """Parameters divided between ranks, gathered together for a call, and again for a backward.

    Under `exact`, the slices of a rank are computed one after another with complete parameters, and
    a hub adds their gradients in the order of the reduction, as if every rank held all parameters;
    then each rank keeps its part of the sums. Ranks can have different numbers of slices, so layers
    cannot be gathered one by one for each slice.
    """

    _gathered: GatheredHub | None = None

    def parameters(self, call: Call) -> CallParameters:
        trained = call.parameters()
        frozen = [
            one
            for one in call.module.parameters()
            if isinstance(one, DTensor) and not one.requires_grad
        ]
        if self._gathered is None or not self._gathered.is_current([*trained, *frozen]):
            # The hub serves later calls, and this one may be without gradients.
            with torch.inference_mode(False), torch.enable_grad():
                self._gathered = GatheredHub(
                    call.module, trained, frozen, self.reduction, self._before_reduction
                )
        self._gathered.gather()
        return self._gathered


# --- complete parameters under `exact` ------------------------------------------------------------


class GatheredHub(Hub):
    """Hub of complete parameters, whose memory is freed after each call and backward.

    Args:
        module: the module.
        trained: its parameters that require gradients.
        frozen: its other divided parameters.
        reduction: sums over all slices.
        before_reduction: called once in each backward before the first sum.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: Sequence[nn.Parameter],
        frozen: Sequence[DTensor],
        reduction: Reduction,
        before_reduction: Callable[[], None],
    ) -> None:
        self._all = [(id(one), one.requires_grad, one.dtype) for one in (*trained, *frozen)]
        divided = [one for one in (*trained, *frozen) if isinstance(one, DTensor)]
        self._complete: dict[torch.Tensor, _Complete] = {one: _Complete(one) for one in divided}
        self._frozen: list[torch.Tensor] = list(frozen)
        self._backward = -1
        self._before_backward = before_reduction
        self._stays = False  # a graph of gradients needs the values at an unknown time
        super().__init__(module, trained, reduction, before_reduction)

    @staticmethod
    def memory_of(tensor: torch.Tensor) -> torch.Tensor:
        return local_part(tensor)

    def _in_graph(self, parameter: torch.Tensor) -> torch.Tensor:
        if isinstance(parameter, DTensor):
            return self._complete[parameter].full
        return parameter

    def _mapping(self, replacements: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        mapping = {one: self._complete[one].full for one in self._frozen}
        return {**mapping, **super()._mapping(replacements)}

    def is_current(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters, in the same places. Their values may be others."""
        present = [(id(one), one.requires_grad, one.dtype) for one in parameters]
        return present == self._all and is_in_place(self._entries[0])

    def gather(self) -> None:
        for one in self._complete.values():
            one.gather()

    def end_forward(self) -> None:
        if not self._stays:
            for one in self._complete.values():
                one.free()

    def begin_backward(self) -> None:
        self._stays |= torch.is_grad_enabled()  # with `create_graph`
        task = torch._C._current_graph_task_id()  # private, as the queue
        if task != self._backward:
            self._backward = task
            self._before_backward()
            self.gather()
            # At the end of the backward: all own slices need the values.
            torch.autograd.Variable._execution_engine.queue_callback(self.end_forward)


class _Complete:
    """A divided parameter and its full tensor, whose memory comes and goes.

    Attributes:
        parameter: the parameter.
        full: the full tensor; its gradient is divided and becomes that of the parameter.
    """

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter
        device = parameter.device_mesh.device_type
        self.full = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device
        )
        if parameter.requires_grad:
            empty = self.full
            self.full = gathered(parameter, lambda _: empty)
        self._storage = self.full.untyped_storage()
        self._bytes = self._storage.nbytes()
        # The own part, and its version when it was gathered.
        self._values: tuple[torch.Tensor, int] | None = None
        self.free()

    def gather(self) -> None:
        """Gather the values. A graph that has saved others raises torch's error in its backward."""
        full = full_value(self.parameter)
        self._storage.resize_(self._bytes)
        version = self.full._version
        with torch.no_grad():
            self.full.copy_(full)
        local = self.parameter._local_tensor
        values = local, self.parameter._version + local._version
        # The same values: tensors that a graph saved before they were freed are valid again.
        if self._values is not None and self._values[0] is local and self._values[1] == values[1]:
            torch._C._autograd._unsafe_set_version_counter((self.full,), (version,))  # private
        self._values = values

    def free(self) -> None:
        self._storage.resize_(0)


# --- division of a model -------------------------------------------------------------------------


def shard_model(model: nn.Module, world: World) -> None:
    """Shard the parameters of `model` among the ranks of the shard axis, in place.

    Parameters that FSDP cannot divide, which are scalars and those that are not contiguous, stay
    complete.
    """
    config = world.strategy
    if any(nn.parameter.is_lazy(one) for one in model.parameters()):
        names = (config.name, type(model).__name__)
        raise excluded("parameters without shapes", *names, error=InputError)
    ignored = {one for one in model.parameters() if not _is_divisible(one)}
    offload = OffloadPolicy()
    if config.offload:  # without a GPU, pinned memory cannot be allocated
        offload = CPUOffloadPolicy(pin_memory=is_accelerator(world.device))
    axes = _shard_axes(world)
    # The model last: its own unit has the parameters that no other unit has.
    for module, precision in _with_precision(shard_units(model), model, config):
        fully_shard(
            module, mesh=axes, mp_policy=precision, offload_policy=offload, ignored_params=ignored
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are those of the whole batch, and gloo has no reduction that divides.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def shard_remainder(model: nn.Module, world: World) -> None:
    """Shard the parameters of a model of which parts are sharded already, without units."""
    axes = _shard_axes(world)
    placements: list[Placement] = [Replicate()] * (axes.ndim - 1) + [Shard(0)]
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None and not is_divided(one) and _is_divisible(one):
                # No source: every rank has the values, so nothing is sent.
                divided = distribute_tensor(one.detach(), axes, placements, src_data_rank=None)
                module._parameters[name] = nn.Parameter(divided, requires_grad=one.requires_grad)


def _shard_axes(world: World) -> DeviceMesh:
    assert world.mesh is not None
    if world.mesh_shape.replicate > 1:
        return world.mesh["replicate", "shard"]
    return world.mesh["shard"]


def _is_divisible(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 0 and parameter.is_contiguous()


def shard_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters that are gathered together and released after use.

    These are the elements of module lists (blocks of a transformer), or the children of a model
    without lists. Small modules, and parameters that several units use, belong to the root and are
    gathered once per forward.
    """
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential)]
    elements = dict.fromkeys(element for elements in lists for element in elements)
    nested = {child for element in elements for child in element.modules() if child is not element}
    candidates = [element for element in elements if element not in nested]
    # Lists and dictionaries of modules are never called.
    units = [
        module
        for module in candidates or model.children()
        if not isinstance(module, nn.ModuleList | nn.ModuleDict)
    ]
    # A parameter of two units would be gathered and freed by each on its own.
    users = Counter(parameter for module in units for parameter in set(module.parameters()))
    min_size = sum(parameter.numel() for parameter in model.parameters()) / _MAX_UNITS
    return [
        module
        for module in units
        if sum(p.numel() for p in module.parameters()) > min_size
        and all(users[p] == 1 for p in module.parameters())
    ]


def _with_precision(
    units: list[nn.Module], model: nn.Module, config: StrategyConfig
) -> list[tuple[nn.Module, MixedPrecisionPolicy]]:
    """Return modules, the model last, with their policies; reductions are in float32."""
    if config.gather == "fp32":
        return [(module, MixedPrecisionPolicy()) for module in (*units, model)]
    full = torch.float32
    half = torch.bfloat16
    # Running statistics are float32, and torch's batch norm requires one dtype for all arguments.
    norms = [
        norm for norm in model.modules() if isinstance(norm, _BatchNorm) and list(norm.parameters())
    ]
    others = [module for module in units if module not in norms]
    return [
        *((norm, MixedPrecisionPolicy(full, full, output_dtype=half)) for norm in norms),
        *((module, MixedPrecisionPolicy(half, full)) for module in others),
        (model, MixedPrecisionPolicy(half, full, output_dtype=full)),
    ]
