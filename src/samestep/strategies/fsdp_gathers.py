"""Gathers of divided parameters in calls and backwards, for a unit of layers at a time.

The hooks of `fully_shard` are installed for the forward and the backward of a slice only. Private:
attributes of FSDP's states (torch 2.11 and 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from samestep.config.exclusions import excluded
from samestep.strategies.dtensor_parameters import outside_inference_mode
from samestep.view.crossings import CallExchange
from samestep.view.gradient_sums import Hub
from samestep.view.region import current_region
from samestep.view.strategy import Call, CallParameters

# Attributes of the modules of a unit, by which libraries take a script for one of several
# processes.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


class Gathers:
    """Gathers of the divided calls of a module, in order: a rank that fails takes part in the rest.

    Each has the number of sums inside of the call, as of batch norm, that precede it.

    Attributes:
        units: the units of the module, the root first; expected in this order in the first call.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self._known: dict[Hashable, list[tuple[Unit, int]]] = {}
        self._key: Hashable = None
        self._expected: list[tuple[Unit, int]] = []  # those of the latest known kind
        self._done: list[tuple[Unit, int]] = []

    def begin_call(self, key: Hashable) -> None:
        """Begin a call of a kind; the call before was complete."""
        if self._done:
            self._known[self._key] = self._done
        self._done = []
        self._key = key
        self._expected = self._known.get(key, self._expected)

    def add(self, unit: Unit) -> None:
        region = current_region()
        sums = 0
        if region is not None:
            sums = len(getattr(region.exchange, "sums", ()))
        self._done.append((unit, sums))

    def abandon_call(self) -> None:
        """Forget the gathers of a call that ended early."""
        self._done = []

    def leave(self, exchange: CallExchange, device: torch.device) -> None:
        """Take part in the remaining gathers of the call, and in the sums between them."""
        expected = self._expected or [(unit, 0) for unit in self.units]
        for unit, sums in expected[len(self._done) :]:
            exchange.leave(device, sums)
            unit.gather()
        exchange.leave(device)


class Unit:
    """Layers with parameters that are gathered together.

    Args:
        module: argument of `fully_shard`.
        own_class: its class before.
        gathers: notes those of forwards.
    """

    def __init__(self, module: Any, own_class: type[nn.Module], gathers: Gathers) -> None:
        self._module = module
        self._gathers = gathers
        self._state: Any = module._get_fsdp_state()
        # The state has the only strong reference to itself in the module.
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()
        # Newer versions of torch have a list of groups as well; without placements of its own, a
        # unit has at most one.
        group = self._state._fsdp_param_group
        self._groups: list[Any] = [] if group is None else [group]
        for group in self._groups:
            # Between calls, the divided parameters are in place.
            group._register_state_dict_hooks = _nothing
            for parameter in group.fsdp_params:
                parameter._post_load_hook_handle.remove()  # `use` does the same
                parameter._place = parameter.sharded_param._local_tensor.data_ptr()
        # By these, torch takes the module for a sharded one.
        for key in (STATE_KEY, REGISTRY_KEY):
            del module.__dict__[key]
        module.__class__ = own_class
        for part in module.modules():
            for name in _MARKS:
                part.__dict__.pop(name, None)

    @property
    def _fsdp_parameters(self) -> Iterator[Any]:
        return (parameter for group in self._groups for parameter in group.fsdp_params)

    def before(self, module: nn.Module, arguments: Any, options: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            # Not in a backward, in which checkpointing computes a forward again.
            self._gathers.add(self)
        # These are no operations of the script.
        with outside_inference_mode(), torch._C.DisableTorchFunction():
            return self._state._pre_forward(module, arguments, options)

    def after(self, module: nn.Module, arguments: Any, result: Any) -> Any:
        with torch._C.DisableTorchFunction():
            # An in-place change of a view would detach the hook that gathers parameters.
            result = tree_map_only(
                torch.Tensor, lambda one: one.clone() if one._is_view() else one, result
            )
            return self._state._post_forward(module, arguments, result)

    def install(self, stack: ExitStack) -> None:
        """Gather and free parameters around calls of the module until the stack ends."""
        # Around the script's own hooks, which may use the parameters.
        before = self._module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        after = self._module.register_forward_hook(self.after)
        stack.callback(before.remove)
        stack.callback(after.remove)

    def present(self) -> list[Any]:
        """Return the parameters that the module has in its places."""
        infos = [parameter._module_info for parameter in self._fsdp_parameters]
        return [info.module._parameters.get(info.param_name) for info in infos]

    def use(self, divided: Sequence[Any]) -> None:
        """Gather these parameters from now on, which a script may have assigned or moved.

        Raises:
            RunError: one of them is not divided.
        """
        has_other_types = False
        for parameter, own in zip(self._fsdp_parameters, divided, strict=True):
            if not isinstance(own, DTensor):
                info = parameter._module_info
                names = (info.param_name, type(info.module).__name__)
                raise excluded("a parameter that is not divided", *names)
            # FSDP notes the type in the first call. An empty part has no place.
            has_type = getattr(parameter, "orig_dtype", own.dtype) == own.dtype
            is_in_place = own._local_tensor.data_ptr() == parameter._place
            if own is parameter.sharded_param and is_in_place and has_type:
                continue
            self.free()  # gathered values are those of another parameter
            self.put(divided)
            _keep_padding(parameter, own._local_tensor)
            parameter.reset_sharded_param()  # reads the parameter of the module
            parameter._place = own._local_tensor.data_ptr()
            has_other_types |= not has_type
            complete = getattr(parameter, "_unsharded_param", None)
            if complete is not None and not has_type:
                # Nothing gathers it again, for the graphs that have saved it.
                torch._C._autograd._unsafe_set_version_counter((complete,), (2**31,))
                del parameter._unsharded_param
                parameter.all_gather_outputs = []
        if has_other_types:
            for group in self._groups:
                group._init_mp_dtypes()

    def put(self, divided: Sequence[Any]) -> None:
        """Put parameters into the places of the module."""
        for parameter, own in zip(self._fsdp_parameters, divided, strict=True):
            parameter._setattr_on_modules(own)

    def gathered_parameters(self) -> list[torch.Tensor | None]:
        """Return the parameters in the graphs of calls; None where no call has gathered one."""
        return [getattr(one, "_unsharded_param", None) for one in self._fsdp_parameters]

    def show(self) -> None:
        """Put the gathered parameters into the module, if they are in memory."""
        for group in self._groups:
            if group.is_unsharded:
                for parameter in group.fsdp_params:
                    parameter._setattr_on_modules(parameter._unsharded_param)

    def gather(self) -> None:
        with outside_inference_mode():
            for group in self._groups:
                group._to_sharded()
                # Freed before: otherwise `unshard` returns at once, and other ranks wait.
                group.unshard()
                group.wait_for_unshard()
                group._to_sharded()

    def free(self) -> None:
        """Free gathered parameters, which can have other values now."""
        for group in self._groups:
            group._to_sharded()

    def reset(self) -> None:
        """Forget a forward or backward that has failed."""
        if not self._state._is_root:
            return
        if hasattr(self._state, "_reset_iter_state"):
            self._state._reset_iter_state()
            return
        # Torch 2.11 has no such function.
        for state in self._state._state_ctx.all_states:
            state._modules_to_run_forward.clear()
            state._training_state = TrainingState.IDLE
            if group := state._fsdp_param_group:
                group.finalize_backward()
                group._training_state = TrainingState.IDLE
                group._partial_reduce_output = None
                group._to_sharded()
        communication = self._state._comm_ctx
        communication.all_gather_state = None
        communication.reduce_scatter_state = None
        communication.post_forward_order.clear()
        self._state._state_ctx.iter_forward_root = None
        self._state._state_ctx.post_backward_final_callback_queued = False


class ShardedParameters(CallParameters):
    """Divided parameters of a call, gathered for a unit at a time, and a hub of the complete ones.

    Args:
        call: the call.
        gathers: those of divided calls.
        hub: of parameters that are not divided; None without such parameters.
        before_reduction: called in each backward before the first sum.
    """

    needs_inner_graph = True

    def __init__(
        self,
        call: Call,
        gathers: Gathers,
        hub: Hub | None,
        before_reduction: Callable[[], None],
    ) -> None:
        self._module = call.module
        self._divided = [one for one in call.parameters() if isinstance(one, DTensor)]
        self._gathers = gathers
        self._hub = hub
        if hub is not None:
            self.anchors = hub.anchors
        self._before_reduction = before_reduction
        # A backward can follow calls with other parameters, as those of `functional_call`.
        self._used = [(unit, unit.present()) for unit in gathers.units]
        self._use()
        self._values = [_values(one) for _, used in self._used for one in used]
        self._kept: list[Any] = []
        parts: list[Any] = list(call.parts)
        self._recurrent = [part for part in parts if isinstance(part, nn.RNNBase)]

    def aliases(self, position: int) -> list[torch.Tensor]:
        if not torch.is_grad_enabled():
            return []
        own: list[torch.Tensor] = list(self._divided)
        if self._hub is None:
            return own
        return own + self._hub.aliases(position)

    def leaves(self, aliases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return new leaves, and the divided parameters, whose gradients FSDP writes."""
        count = len(self._divided)
        return [*aliases[:count], *super().leaves(aliases[count:])]

    @contextmanager
    def in_place(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        root, *others = self._gathers.units
        root.free()
        with self._installed(others, leaves):
            try:
                yield
            finally:
                # With gradients the root stays gathered for the backward.
                if not torch.is_grad_enabled():
                    root.free()
                root.put(self._used[0][1])

    @contextmanager
    def _installed(self, units: Sequence[Unit], leaves: Sequence[torch.Tensor]) -> Iterator[None]:
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
                # Recurrent layers have weak references to gathered weights, whose memory is free.
                for part in self._recurrent:
                    part._flat_weight_refs = [
                        one if one is None else weakref.ref(one) for one in part._flat_weights
                    ]

    @contextmanager
    def in_backward(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Surround a backward: FSDP writes sums of gradients into `.grad`, which is free here."""
        self._before_reduction()
        root, *others = self._gathers.units
        present = [unit.present() for unit in self._gathers.units]
        self._use()
        self._kept = [(one.grad, one._post_accumulate_grad_hooks) for one in self._divided]
        for one, (_, hooks) in zip(self._divided, self._kept, strict=True):
            one.grad = None
            if hooks is not None:  # FSDP would call them, and the script's graph does
                one._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        root.show()
        with self._changes_noted(), self._installed(others, leaves):
            try:
                yield
            except BaseException:
                root.reset()
                self._restore_gradients()
                raise
            finally:
                for unit, own in zip(self._gathers.units, present, strict=True):
                    unit.put(own)

    def _use(self) -> None:
        for unit, used in self._used:
            unit.use(used)

    @contextmanager
    def _changes_noted(self) -> Iterator[None]:
        """Let autograd see writes into the parameters since the forward, as of an optimizer.

        Gathers count no version: the backward of a graph from before a step would use the new
        values without an error.
        """
        divided = [one for _, used in self._used for one in used]
        complete = [one for unit, _ in self._used for one in unit.gathered_parameters()]
        changed = [
            one
            for one, own, before in zip(complete, divided, self._values, strict=True)
            if one is not None and _values(own) != before
        ]
        # Private, in torch 2.11 and 2.13.
        set_versions: Any = torch._C._autograd._unsafe_set_version_counter
        versions = [one._version for one in changed]
        for one, version in zip(changed, versions, strict=True):
            set_versions((one,), (version + 1,))
        try:
            yield
        finally:
            # Graphs of later calls have the versions of before.
            for one, version in zip(changed, versions, strict=True):
                set_versions((one,), (version,))

    def take_gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        count = len(self._divided)
        sums = [one.grad for one in self._divided]
        self._restore_gradients()
        return [*sums, *super().take_gradients(leaves[count:])]

    def _restore_gradients(self) -> None:
        for one, (gradient, hooks) in zip(self._divided, self._kept, strict=False):
            one.grad = gradient
            if hooks is not None:
                one._post_accumulate_grad_hooks = hooks
        self._kept = []

    def leave(self, exchange: CallExchange, device: torch.device) -> None:
        self._gathers.leave(exchange, device)

    def abandon(self) -> None:
        self._gathers.abandon_call()
        self._gathers.units[0].reset()

    def forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        root = self._gathers.units[0]

        def computed(*arguments: Any, **options: Any) -> Any:
            positional, named = root.before(self._module, arguments, options)
            return root.after(self._module, positional, forward(*positional, **named))

        return computed


def _keep_padding(parameter: Any, local: torch.Tensor) -> None:
    """Let FSDP keep the memory of a part that it has padded before.

    FSDP looks only whether it is the memory of the last parameter, and would move the part.
    """
    elements = parameter.padded_sharded_param_size.numel()
    if local.storage_offset() == 0 and local.untyped_storage().nbytes() == (
        elements * local.element_size()
    ):
        parameter._sharded_param_data = local.as_strided((elements,), (1,))


def _values(divided: Any) -> tuple[int, int]:
    """Return the place and the version of the own part of a divided parameter."""
    local = divided._local_tensor
    return local.data_ptr(), divided._version + local._version


def _nothing() -> None:
    """Stand for the hooks of FSDP that divide parameters before `state_dict`."""
