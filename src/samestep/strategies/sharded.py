"""Fully sharded data parallel: torch's FSDP2 inside of divided calls (`fsdp`, and `hsdp` within groups of ranks).

Between calls the module is the script's own: its class, its hooks, and its parameters as DTensors. The hooks of
`fully_shard` are installed for the forward and the backward of a slice only. Whole calls, trials and copies compute
with gathered parameters. Private: attributes of FSDP's states (torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from samestep.errors import InputError
from samestep.reduce.reduction import Reduction
from samestep.strategies.fsdp import shard_model
from samestep.strategies.local_parameters import Division
from samestep.view.call import Call
from samestep.view.crossings import crossing, leave
from samestep.view.hub import Hub
from samestep.view.slots import ParameterSlots, replaced
from samestep.view.strategy import CallParameters, Strategy


class Sharded(Strategy):
    """Parameters divided between ranks, gathered for a unit of layers at a time.

    Parameters without a dimension stay complete; a hub sums their gradients.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._units: list[_Unit] = []
        self._parameters: _ShardedParameters | None = None

    def prepare(self, module: nn.Module) -> None:
        """Divide the parameters."""
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise InputError(
                f"a module of the class {type(module).__name__} whose parameters are divided already",
                expected="a module that was divided once, with all its parts",
                fix="give the whole model to samestep.parallel, not its parts",
                code="E_INCOMPATIBLE",
            )
        classes = {part: type(part) for part in module.modules()}
        shard_model(module, self._world, is_exact=False, is_engine=False)
        self._units = [_Unit(part, classes[part]) for part in classes if isinstance(part, FSDPModule)]
        if _load_full not in module._load_state_dict_pre_hooks.values():
            module.register_load_state_dict_pre_hook(_load_full)

    def parameters(self, call: Call) -> CallParameters:
        """Return the parameters of a call, with hooks of FSDP."""
        complete = [one for one in call.parameters() if not isinstance(one, DTensor)]
        divided = [one for one in call.parameters() if isinstance(one, DTensor)]
        known = self._parameters
        if known is None or not known.is_current(divided, complete):
            hub = None
            if complete:
                hub = Hub(call.module, complete, self.reduction, self._before_reduction)
            known = _ShardedParameters(self._units, call.module, divided, complete, hub, self)
            self._parameters = known
        return known

    def whole(self, module: nn.Module) -> AbstractContextManager[None]:
        """Put gathered parameters into the module; each rank keeps its part of their whole gradients."""
        return self._gathered(module, lambda parameter: _gathered(parameter, None))

    def complete(self, module: nn.Module) -> AbstractContextManager[None]:
        """Put gathered parameters into the module, as leaves."""
        return self._gathered(
            module,
            lambda parameter: nn.Parameter(_full(parameter), requires_grad=parameter.requires_grad),
        )

    @contextmanager
    def _gathered(self, module: nn.Module, full: Callable[[DTensor], torch.Tensor]) -> Iterator[None]:
        self.hide()
        mapping: dict[torch.Tensor, torch.Tensor] = {
            one: full(one) for one in module.parameters() if isinstance(one, DTensor)
        }
        with ParameterSlots(module).replaced(mapping):
            yield

    def hide(self) -> None:
        """Give the module its divided parameters."""
        for unit in self._units:
            unit.hide()

    def before_reduction(self) -> None:
        """Send a word before the sums of a backward."""
        self._before_reduction()


class _Unit:
    """Layers whose parameters are gathered together.

    Args:
        module: module that was given to `fully_shard`.
        own_class: its class before.
    """

    def __init__(self, module: Any, own_class: type[nn.Module]) -> None:
        self._module = module
        self._state: Any = module._get_fsdp_state()
        # The state has the only strong reference to itself in the module.
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()
        for key in (STATE_KEY, REGISTRY_KEY):
            del module.__dict__[key]
        module.__class__ = own_class

    def __repr__(self) -> str:
        return f"_Unit({type(self._module).__name__})"

    def before(self, module: nn.Module, arguments: Any, options: Any) -> Any:
        """Gather parameters."""
        with torch._C.DisableTorchFunction():  # not operations of the script
            return self._state._pre_forward(module, arguments, options)

    def after(self, module: nn.Module, arguments: Any, result: Any) -> Any:
        """Free gathered parameters."""
        with torch._C.DisableTorchFunction():
            # An in-place change of a view would detach the hook that gathers parameters.
            return self._state._post_forward(module, arguments, tree_map(_not_a_view, result))

    def install(self, stack: ExitStack) -> None:
        """Gather and free parameters around calls of the module until the stack ends."""
        before = self._module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        after = self._module.register_forward_hook(self.after)
        stack.callback(before.remove)
        stack.callback(after.remove)

    def hide(self) -> None:
        """Put the divided parameters into the module. Gathered ones stay in memory if a backward may follow."""
        for group in self._state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)

    def show(self) -> None:
        """Put the gathered parameters into the module, if they are in memory."""
        for group in self._state._fsdp_param_groups:
            if group.is_unsharded:
                for parameter in group.fsdp_params:
                    parameter._setattr_on_modules(parameter._unsharded_param)

    def free(self) -> None:
        """Free gathered parameters, which can have other values now."""
        for group in self._state._fsdp_param_groups:
            group._to_sharded()

    def reset(self) -> None:
        """Forget a forward or backward that has failed."""
        if self._state._is_root:
            self._state._reset_iter_state()


class _ShardedParameters(CallParameters):
    """Divided parameters, and a hub of the complete ones."""

    needs_inner_graph = True

    def __init__(
        self,
        units: Sequence[_Unit],
        module: nn.Module,
        divided: Sequence[DTensor],
        complete: Sequence[nn.Parameter],
        hub: Hub | None,
        strategy: Sharded,
    ) -> None:
        self._units = units
        self._module = module
        self._divided = list(divided)
        self._complete = list(complete)
        self._hub = hub
        self._strategy = strategy
        self._kept: list[Any] = []
        self._backward = -1
        if hub is not None:
            self.anchors = hub.anchors

    def is_current(self, divided: Sequence[torch.Tensor], complete: Sequence[nn.Parameter]) -> bool:
        """Whether these are the parameters."""
        if [id(one) for one in divided] != [id(one) for one in self._divided]:
            return False
        return not complete if self._hub is None else self._hub.is_current(complete)

    @property
    def differentiable(self) -> CallParameters:
        """Gathered parameters."""
        return _Differentiable(self._module, self._divided, self._hub, self._strategy)

    def aliases(self, position: int) -> list[torch.Tensor]:
        """Return the divided parameters, and aliases of the complete ones, if there are gradients."""
        if not torch.is_grad_enabled():
            return []
        own: list[torch.Tensor] = list(self._divided)
        return own if self._hub is None else own + self._hub.aliases(position)

    def leaves(self, aliases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the divided parameters themselves: FSDP writes their gradients. The other leaves are new."""
        count = len(self._divided)
        return [*aliases[:count], *super().leaves(aliases[count:])]

    @contextmanager
    def in_place(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Surround a forward: hooks of FSDP gather parameters."""
        root, *others = self._units
        root.free()
        with self._installed(others, leaves):
            try:
                yield
            except BaseException:
                root.reset()
                raise
            finally:
                if not torch.is_grad_enabled():
                    root.free()
                root.hide()

    @contextmanager
    def _installed(self, units: Sequence[_Unit], leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        with ExitStack() as stack:
            if self._hub is not None and leaves:
                stack.enter_context(self._hub.in_place(leaves[len(self._divided) :]))
            for unit in units:
                unit.install(stack)
            yield

    @contextmanager
    def in_backward(self, leaves: Sequence[torch.Tensor], position: int) -> Iterator[None]:
        """Surround a backward: FSDP sums gradients into `.grad` of the divided parameters, which is free here."""
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward = task
            self._strategy.before_reduction()
        self._kept = [one.grad for one in self._divided]
        for one in self._divided:
            one.grad = None
        root, *others = self._units
        root.show()
        with self._installed(others, leaves):
            try:
                yield
            except BaseException:
                root.reset()
                raise
            finally:
                root.hide()

    def take_gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the sums over ranks for divided parameters, and own gradients of the others for the hub."""
        count = len(self._divided)
        sums = [one.grad for one in self._divided]
        for one, kept in zip(self._divided, self._kept, strict=False):
            one.grad = kept
        self._kept = []
        return [*sums, *super().take_gradients(leaves[count:])]

    def forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward with the hooks of FSDP on the module itself."""
        root = self._units[0]

        def computed(*arguments: Any, **options: Any) -> Any:
            given, named = root.before(self._module, arguments, options)
            return root.after(self._module, given, forward(*given, **named))

        return computed


class _Differentiable(CallParameters):
    """Gathered parameters whose gradients are summed over ranks and can be differentiated."""

    def __init__(self, module: nn.Module, divided: Sequence[DTensor], hub: Hub | None, strategy: Sharded) -> None:
        self._slots = ParameterSlots(module)
        self._divided = divided
        self._hub = hub
        self._strategy = strategy

    def aliases(self, position: int) -> list[torch.Tensor]:
        """Return the divided parameters."""
        return list(self._divided)

    @contextmanager
    def in_place(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Surround a forward with gathered parameters."""
        count = len(self._divided)
        mapping: dict[torch.Tensor, torch.Tensor] = {
            one: _gathered(leaf, self._strategy.reduction) for one, leaf in zip(self._divided, leaves, strict=False)
        }
        with ExitStack() as stack:
            if self._hub is not None:
                stack.enter_context(self._hub.in_place(leaves[count:]))
            stack.enter_context(replaced(self._slots.entries(mapping)))
            yield


def _full(parameter: torch.Tensor) -> torch.Tensor:
    """Return the full value of a divided parameter. A collective."""
    assert isinstance(parameter, DTensor)
    local: torch.Tensor = parameter._local_tensor  # private; `to_local` would belong to the graph
    return Division.of(parameter).full_tensor(local.detach())


def _gathered(parameter: torch.Tensor, reduction: Reduction | None) -> torch.Tensor:
    """Return the full value of a divided parameter; its gradient becomes divided. Differentiable.

    Args:
        parameter: the parameter, or a tensor that is divided like it.
        reduction: sums the gradients over ranks; None if they are equal on all ranks.
    """

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        if reduction is not None:
            gradient = leave([gradient], reduction)
        return [_divided(gradient, division, reduction)]

    assert isinstance(parameter, DTensor)
    division = Division.of(parameter)
    return crossing([parameter], lambda value: [_full(value)], back)[0]


def _divided(full: torch.Tensor, division: Division, reduction: Reduction | None) -> torch.Tensor:
    """Return the own part of a full tensor, as a DTensor; its gradient becomes full. Differentiable."""

    def part(full: torch.Tensor) -> list[torch.Tensor]:
        local = division.local_part(full.detach()).clone(memory_format=torch.contiguous_format)
        placed = DTensor.from_local(
            local, division.mesh, division.placements, run_check=False, shape=division.shape, stride=division.stride
        )
        return [placed]

    return crossing([full], part, lambda gradient: [_gathered(gradient, reduction)])[0]


def _not_a_view(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value._is_view() else value


def _load_full(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Divide full tensors of a state dict, so that `load_state_dict` takes those of any layout."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            if value.shape != parameter.shape:  # torch reports the difference
                continue
            state_dict[prefix + name] = _divided(value.to(parameter.device), Division.of(parameter), None)
