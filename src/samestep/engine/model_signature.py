"""Numbers, functions and hooks that the forward of a model uses, and that a loop can change between steps."""

from __future__ import annotations

from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from samestep.engine.model_call import GLOBAL_HOOKS, HOOKS
from samestep.engine.outside_state import OutsideState

_COMPARED = frozenset(
    (bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType, MethodType)
)  # types whose comparison is cheap
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_MAX_CHANGES = 3


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
