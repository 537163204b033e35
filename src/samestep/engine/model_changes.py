"""Changes of a model by the script between steps: parameters, optimizer groups, hooks, numbers and functions."""

from __future__ import annotations

from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _of_all_modules
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.config import StepConfig
from samestep.distributed.world import World
from samestep.engine.side_effects import OutsideState
from samestep.errors import InputError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(getattr(_of_all_modules, f"_global{table}") for table in HOOKS)
_COMPARED = frozenset(
    (bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType, MethodType)
)  # types whose comparison is cheap
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_MAX_CHANGES = 3


def hooked_part(model: torch.nn.Module) -> str | None:
    """Return the name of a module or a parameter with hooks as a reason; None if there is none."""
    if any(GLOBAL_HOOKS):
        return "all modules have hooks"
    for name, module in model.named_modules():
        if any(getattr(module, table) for table in HOOKS):
            return f"the module {name!r} has hooks"
    parameter = hooked_parameter(model)
    return None if parameter is None else f"the parameter {parameter} has hooks"


def hooked_parameter(model: torch.nn.Module) -> str | None:
    """Return the name of a parameter with hooks for its gradient; None if there is none."""
    named = model.named_parameters()
    return next((name for name, p in named if p._backward_hooks or p._post_accumulate_grad_hooks), None)


class ModelState:
    """Parameters and norm layers for which components were built, to detect changes by the script.

    Attributes:
        sync_batch_norm: norm layers use statistics of the global batch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: StepConfig,
        sync_batch_norm: bool,
        *,
        is_divided: bool,
    ) -> None:
        self.sync_batch_norm = sync_batch_norm
        self._optimizer, self._is_divided = optimizer, is_divided
        modules = list(model.modules())
        # The present values of these tables are all modules and parameters, as long as no value changes.
        self._modules = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        is_watched = config.batch_norm == "sync" and not sync_batch_norm
        self._norms = [module for module in modules if is_watched and isinstance(module, _BatchNorm)]
        self._objects, self._attributes = self._read()

    def is_current(self) -> bool:
        """Return whether parameters, the optimizer's groups and the use of batch statistics are unchanged."""
        objects, attributes = self._read()
        is_same = len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
        return is_same and attributes == self._attributes

    def require_whole_model(self, world: World) -> None:
        """Refuse a change of parameters that are divided among ranks or devices.

        Raises:
            InputError: they are.
        """
        if self._is_divided or world.strategy.name == "device_map":
            raise InputError(
                "trained parameters, the optimizer's groups or the use of batch statistics changed after the engine "
                "was made",
                expected=f"under {world.mesh_shape.name}, they stay as they were when the engine was made",
                fix="change them before samestep.Engine(...), or use --strategy ddp",
                code="E_PARAMETER",
            )

    def _read(self) -> tuple[list[object], list[object]]:
        parameters = [p for table in self._parameters for p in table.values() if p is not None]
        optimized = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        modules = chain.from_iterable(table.values() for table in self._modules)
        uses_batch = any(norm.training for norm in self._norms)
        if self._is_divided:  # FSDP exchanges the parameters themselves
            return [*modules, *optimized], [uses_batch, *(p.requires_grad for p in parameters)]
        attributes = [(p.requires_grad, p.dtype, p.shape) for p in parameters]
        return [*modules, *parameters, *optimized], [uses_batch, *attributes]


class ModelSignature:
    """Reads and compares values of a model that are constants of a decision about its forward.

    Covered are the `forward` of modules, plain values and functions in attributes of modules, missing buffers, hooks,
    and numbers outside of the model. Contents of collections and tensors are not. The modules and parameters are those
    at the construction: the engine makes a new runner if they change.

    Each step reads the signature. So the keys of attributes are listed once, and again if their number has changed.
    """

    def __init__(self, model: nn.Module, outside: OutsideState) -> None:
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._buffers = [module._buffers for module in self._modules]
        self._hooks = [*GLOBAL_HOOKS, *(getattr(module, table) for module in self._modules for table in HOOKS)]
        self._tables = [vars(module) for module in self._modules]
        self._outside = outside
        self._last: object = None
        self._changes = 0
        self._list_attributes()

    @property
    def changes_often(self) -> bool:
        """Whether the model has changed so often that a further decision is not worthwhile."""
        return self._changes >= _MAX_CHANGES

    def has_changed(self) -> bool:
        """Return whether the signature differs from that of the last call; False in the first call."""
        last, self._last = self._last, self.read()
        is_changed = last is not None and last != self._last
        self._changes += is_changed
        return is_changed

    def read(self) -> object:
        """Return the signature."""
        if self._sizes != list(map(len, self._tables)):
            self._list_attributes()
        return (
            [value for value in self.attributes() if type(value) in _COMPARED],
            [module.forward for module in self._modules],
            [buffer is None for table in self._buffers for buffer in table.values()],
            list(chain.from_iterable(self._hooks)),  # each hook has its own key
            [
                (*(p._backward_hooks or ()), *(p._post_accumulate_grad_hooks or ()))
                for p in self._parameters
                if p._backward_hooks or p._post_accumulate_grad_hooks
            ],
            self._outside.numbers(),
        )

    def attributes(self) -> list[Any]:
        """Return the attributes of modules, apart from those of every module."""
        return list(map(dict.get, self._owners, self._keys))

    def _list_attributes(self) -> None:
        self._sizes = list(map(len, self._tables))
        places = [(table, key) for table in self._tables for key in table if key not in _OF_EVERY_MODULE]
        self._owners, self._keys = [table for table, _ in places], [key for _, key in places]
