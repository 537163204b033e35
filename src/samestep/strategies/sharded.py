"""Fully sharded data parallel: torch's FSDP2 inside of divided calls (`fsdp`, and `hsdp` within groups of ranks).

Between calls the module is the script's own: its class, its hooks, and its parameters as DTensors.
The hooks of `fully_shard` are installed for the forward and the backward of a slice only. Whole
calls, trials and copies compute with gathered parameters. Private: attributes of FSDP's states
(torch 2.11 and 2.13).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from samestep.errors import InputError, RunError
from samestep.strategies.divided_parameters import divided_like, full_tensor, is_divided
from samestep.strategies.fsdp import shard_model, shard_remainder
from samestep.strategies.gathering import Differentiable, as_divided, gathered
from samestep.strategies.tensor_division import Division
from samestep.strategies.whole_operations import compute_whole
from samestep.view.crossings import CallExchange
from samestep.view.hub import Hub
from samestep.view.recomputation import recomputation_inside
from samestep.view.region import current_region
from samestep.view.slots import ParameterSlots
from samestep.view.strategy import Call, CallParameters, Strategy

# Attributes of the modules of a unit, by which libraries take a script for one of several
# processes.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


class Sharded(Strategy):
    """Parameters divided between ranks, gathered for a unit of layers at a time.

    Parameters without a dimension stay complete; a hub sums their gradients.
    """

    exchanges_in_calls = True

    def __init__(self, *arguments: Any, is_exact: bool = False) -> None:
        super().__init__(*arguments)
        self.is_exact = is_exact
        self._units: list[_Unit] = []
        self.gathers = _Gathers(())
        self._replaced: dict[int, weakref.ref[nn.Parameter]] = {}
        self._parameters: _ShardedParameters | None = None
        self._process = os.getpid()

    def prepare(self, module: nn.Module) -> None:
        """Divide the parameters."""
        compute_whole(is_exact=self.is_exact)
        classes = {part: type(part) for part in module.modules()}
        slots = ParameterSlots(module)
        places = [
            (part, name, one)
            for part in classes
            for name, one in part._parameters.items()
            if one is not None
        ]
        if any(map(is_divided, module.parameters())):
            shard_remainder(module, self._world)
        else:
            shard_model(module, self._world)
        mapping: dict[torch.Tensor, torch.Tensor] = {}
        for part, name, one in places:
            present = part._parameters[name]
            if present is not None and present is not one:
                mapping[one] = present
                self._replaced[id(one)] = weakref.ref(one)
                if present.requires_grad:
                    # Not a weak reference: the parameters of a module with weak ones cannot be
                    # moved.
                    present.register_hook(
                        partial(as_divided, Division.of(cast(DTensor, present)), present.device)
                    )
        for container, key, _, divided in slots.entries(
            mapping
        ):  # lists of parameters, as recurrent layers have
            container[key] = divided
        self._units = [
            _Unit(part, classes[part]) for part in classes if isinstance(part, FSDPModule)
        ]
        self.gathers = _Gathers(self._units)
        for unit in self._units:
            unit.gathers = self.gathers
        if _load_full not in module._load_state_dict_pre_hooks.values():
            module.register_load_state_dict_pre_hook(_load_full)

    def of_copy(self) -> Sharded:
        """Return a strategy for a copy of the module."""
        return type(self)(
            self._world, self.ranks, self.reduction, self._before_reduction, is_exact=self.is_exact
        )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide state that was loaded from a file, and require that no parameter is one from before the division."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                reference = self._replaced.get(id(parameter))
                if reference is not None and reference() is parameter:
                    raise InputError(
                        f"{type(optimizer).__name__} has parameters from before samestep.parallel divided them",
                        expected="an optimizer of the divided parameters",
                        fix="make the optimizer after samestep.parallel",
                        code="E_OPTIMIZER",
                    )
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, DTensor):
                continue
            for name, value in state.items():
                is_complete = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
                if is_complete and value.shape == parameter.shape:
                    state[name] = divided_like(parameter, value)

    def arguments(self, arguments: Any) -> Any:
        """Return the arguments of a call with complete tensors, as of `weight.new_zeros` outside of calls."""
        if not any(isinstance(leaf, DTensor) for leaf in tree_leaves(arguments)):
            return arguments  # the containers themselves, into which a forward may write
        with torch._C._DisableFuncTorch():
            return tree_map_only(DTensor, lambda one: gathered(one, None), arguments)

    def parameters(self, call: Call) -> CallParameters:
        """Return the parameters of a call, with hooks of FSDP."""
        for unit in self._units:
            unit.refresh()
        complete = [one for one in call.parameters() if not isinstance(one, DTensor)]
        divided = [one for one in call.parameters() if isinstance(one, DTensor)]
        known = self._parameters
        if known is None or not known.is_current(divided, complete):
            hub = None
            if complete:
                hub = Hub(call.module, complete, self.reduction, self._before_reduction)
            known = _ShardedParameters(self._units, call.module, divided, complete, hub, self)
            self._parameters = known
        self.gathers.begin_call((call.module.training, torch.is_grad_enabled()))
        return known

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Put gathered parameters into the module; each rank keeps its part of their whole gradients."""
        again = recomputation_inside(lambda: self.whole(module))
        with self._gathered(module, lambda parameter: gathered(parameter, None)) as mapping, again:
            yield
        for one, full in mapping.items():
            # Compared by value: `weight.data.mul_` counts no write. Embeddings with `max_norm`
            # write, too.
            own = divided_like(one, full)
            if not torch.equal(own._local_tensor, one._local_tensor):
                with torch.no_grad():
                    one.copy_(own)

    def complete(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Put gathered parameters into the module, as leaves."""
        return self._gathered(
            module,
            lambda parameter: nn.Parameter(
                full_tensor(parameter.detach()), requires_grad=parameter.requires_grad
            ),
        )

    @contextmanager
    def _gathered(
        self, module: nn.Module, full: Callable[[DTensor], torch.Tensor]
    ) -> Iterator[Mapping[DTensor, torch.Tensor]]:
        self._require_rank(module)
        mapping: dict[Any, torch.Tensor] = {}
        with _outside_inference_mode(), torch._C._DisableFuncTorch():
            for one in module.parameters():
                if isinstance(one, DTensor):
                    mapping[one] = full(one)
        with ParameterSlots(module).replaced(mapping):
            yield mapping

    def _require_rank(self, module: nn.Module) -> None:
        """Require that this process is a rank, and not a child, for which the other ranks would wait.

        Raises:
            RunError: it is a child.
        """
        if os.getpid() != self._process:
            raise RunError(
                f"{type(module).__name__} is called in a child process, such as a loader worker",
                expected="calls in the ranks, which gather the parts of its parameters",
                fix="num_workers=0, or strategy='ddp' for this model",
                code="E_INCOMPATIBLE",
            )

    def before_reduction(self) -> None:
        """Send a word before the sums of a backward."""
        self._before_reduction()


class _Gathers:
    """Gathers of the divided calls of a module, in order, so that a rank that fails can take part in the others.

    Each has the number of sums inside of the call, as of batch norm, that precede it.
    """

    def __init__(self, units: Sequence[_Unit]) -> None:
        self._known: dict[Hashable, list[tuple[_Unit, int]]] = {}
        self._expected = [(unit, 0) for unit in units]
        self._key: Hashable = None
        self._done: list[tuple[_Unit, int]] = []

    def begin_call(self, key: Hashable) -> None:
        """Begin a call of a kind; the call before was complete."""
        if self._done:
            self._known[self._key] = self._done
        self._done = []
        self._key = key
        self._expected = self._known.get(key, self._expected)

    def add(self, unit: _Unit) -> None:
        """Note a gather."""
        region = current_region()
        sums = 0 if region is None else len(getattr(region.exchange, "sums", ()))
        self._done.append((unit, sums))

    def abandon_call(self) -> None:
        """Forget the gathers of a call that ended early."""
        self._done = []

    def leave(self, exchange: CallExchange, device: torch.device) -> None:
        """Take part in the remaining gathers of the call, and in the sums between them."""
        for unit, sums in self._expected[len(self._done) :]:
            exchange.leave(device, sums)
            unit.gather()
        exchange.leave(device)


class _Unit:
    """Layers with parameters that are gathered together.

    Args:
        module: argument of `fully_shard`.
        own_class: its class before.
    """

    def __init__(self, module: Any, own_class: type[nn.Module]) -> None:
        self.gathers: _Gathers | None = None
        self._module = module
        self._state: Any = module._get_fsdp_state()
        # The state has the only strong reference to itself in the module.
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()
        # Newer versions of torch have a list of groups as well; without placements of its own, a
        # unit has at most one.
        group = self._state._fsdp_param_group
        self._groups: list[Any] = [] if group is None else [group]
        for group in self._groups:
            group._register_state_dict_hooks = (
                _nothing  # between calls, the divided parameters are in place
            )
            for parameter in group.fsdp_params:
                parameter._post_load_hook_handle.remove()  # `refresh` does the same
                parameter._place = parameter.sharded_param._local_tensor.data_ptr()
        for key in (STATE_KEY, REGISTRY_KEY):
            del module.__dict__[key]
        module.__class__ = own_class
        for part in module.modules():
            for name in _MARKS:
                part.__dict__.pop(name, None)

    def __repr__(self) -> str:
        return f"_Unit({type(self._module).__name__})"

    def before(self, module: nn.Module, arguments: Any, options: Any) -> Any:
        """Gather parameters."""
        if self.gathers is not None and torch._C._current_graph_task_id() == -1:
            self.gathers.add(self)
        with (
            _outside_inference_mode(),
            torch._C.DisableTorchFunction(),
        ):  # not operations of the script
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
        for group in self._groups:
            for parameter in group.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)

    def refresh(self) -> None:
        """Notice parameters that were assigned or moved since the last call.

        Raises:
            RunError: a parameter was assigned that is not divided.
        """
        for group in self._groups:
            for parameter in group.fsdp_params:
                info = parameter._module_info
                own = info.module._parameters.get(info.param_name)
                if (
                    own is parameter.sharded_param
                    and own._local_tensor.data_ptr() == parameter._place
                ):
                    continue
                if not isinstance(own, DTensor):
                    raise RunError(
                        f"the parameter {info.param_name} of {type(info.module).__name__} was replaced",
                        expected="the divided parameters of samestep.parallel, with new values at most",
                        fix="change the module before samestep.parallel, or copy values into the parameter",
                        code="E_INCOMPATIBLE",
                    )
                parameter.reset_sharded_param()
                parameter._place = parameter.sharded_param._local_tensor.data_ptr()

    def show(self) -> None:
        """Put the gathered parameters into the module, if they are in memory."""
        for group in self._groups:
            if group.is_unsharded:
                for parameter in group.fsdp_params:
                    parameter._setattr_on_modules(parameter._unsharded_param)

    def gather(self) -> None:
        """Gather and free parameters."""
        with _outside_inference_mode():
            for group in self._groups:
                group._to_sharded()
                group.unshard()
                group.wait_for_unshard()
                group._to_sharded()

    def free(self) -> None:
        """Free gathered parameters, which can have other values now."""
        for group in self._groups:
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
        self._recurrent: list[Any] = [
            part for part in module.modules() if isinstance(part, nn.RNNBase)
        ]
        if hub is not None:
            self.anchors = hub.anchors

    def is_current(self, divided: Sequence[torch.Tensor], complete: Sequence[nn.Parameter]) -> bool:
        """Whether these are the parameters."""
        if [id(one) for one in divided] != [id(one) for one in self._divided]:
            return False
        if self._hub is None:
            return not complete
        return self._hub.is_current(complete)

    @property
    def differentiable(self) -> CallParameters:
        """Gathered parameters."""
        return Differentiable(self._module, self._divided, self._hub, self._strategy)

    def aliases(self, position: int) -> list[torch.Tensor]:
        """Return the divided parameters, and aliases of the complete ones, if there are gradients."""
        if not torch.is_grad_enabled():
            return []
        own: list[torch.Tensor] = list(self._divided)
        if self._hub is None:
            return own
        return own + self._hub.aliases(position)

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
            try:
                yield
            except BaseException:  # no hook follows in the units that were being computed
                for unit in units:
                    unit.free()
                raise
            finally:
                for part in (
                    self._recurrent
                ):  # it has weak references to gathered weights, whose memory is free
                    part._flat_weight_refs = [
                        one if one is None else weakref.ref(one) for one in part._flat_weights
                    ]

    @contextmanager
    def in_backward(self, leaves: Sequence[torch.Tensor], position: int) -> Iterator[None]:
        """Surround a backward: FSDP sums gradients into `.grad` of the divided parameters, which is free here."""
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward = task
            self._strategy.before_reduction()
        self._kept = [(one.grad, one._post_accumulate_grad_hooks) for one in self._divided]
        for one, (_, hooks) in zip(self._divided, self._kept, strict=True):
            one.grad = None
            if hooks is not None:  # FSDP would call them, and the script's graph does
                one._post_accumulate_grad_hooks = None  # type: ignore[assignment]
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
        for one, (gradient, hooks) in zip(self._divided, self._kept, strict=False):
            one.grad = gradient
            if hooks is not None:
                one._post_accumulate_grad_hooks = hooks
        self._kept = []
        return [*sums, *super().take_gradients(leaves[count:])]

    def leave(self, exchange: CallExchange, device: torch.device) -> None:
        """Leave the call after a failure of the own rows."""
        self._strategy.gathers.leave(exchange, device)

    def abandon(self) -> None:
        """Forget the forward of the call; otherwise ranks would prefetch different parameters."""
        self._strategy.gathers.abandon_call()
        self._units[0].reset()

    def forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward with the hooks of FSDP on the module itself."""
        root = self._units[0]

        def computed(*arguments: Any, **options: Any) -> Any:
            positional, named = root.before(self._module, arguments, options)
            return root.after(self._module, positional, forward(*positional, **named))

        return computed


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Make tensors inside the block that count their versions, and can be written later."""
    has_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(has_gradients):
        yield


def _nothing() -> None:
    """Stand for the hooks of FSDP that divide parameters before `state_dict`."""


def _not_a_view(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value._is_view():
        return value.clone()
    return value


def _load_full(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Divide full tensors of a state dict, so that `load_state_dict` takes those of any layout."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if (
            isinstance(parameter, DTensor)
            and isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
        ):
            if value.shape != parameter.shape:  # torch reports the difference
                continue
            state_dict[prefix + name] = divided_like(parameter, value)
