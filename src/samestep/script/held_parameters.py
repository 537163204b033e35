"""Parameters that a script holds when a strategy divides them, at the first call of their module.

A script makes its optimizer and its lists of parameters before that call. Divided parameters are
other tensors (DTensors), and take the places of those before in all containers and objects. A use
of the former ones from anywhere else, as from a local variable, is an error: it would be silently
without effect.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Sequence
from types import CellType, FrameType
from typing import Any

import torch
from torch import nn

from samestep.config.exclusions import excluded
from samestep.distributed.collective_check import script_line

# To the storage of a tensor without aliases: the tensor, and the object that counts.
_OWN_REFERENCES = 2


class HeldParameters:
    """Parameters of a module before they are divided.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for part in module.modules():
            for name, one in part._parameters.items():
                if one is not None:
                    self._places.append((part, name, one))

    def replace(self) -> None:
        """Put the divided parameters of the module in the places of those before."""
        present = {id(before): part._parameters[name] for part, name, before in self._places}
        former = list({one for _, _, one in self._places if one is not present[id(one)]})
        self._places.clear()
        _replace_references(former, present)
        aliases = _aliases(former)
        for before in former:
            # Frees the memory, although frames may still hold the object.
            before.data = before.data.new_empty(0)
        classes: dict[type, type] = {}
        for tensor in (*former, *aliases):
            kind = type(tensor)
            if kind not in classes:
                classes[kind] = type(kind.__name__, (_Retired, kind), {})
            tensor.__class__ = classes[kind]


class _Retired(torch.Tensor):
    """Mixin of the class of a parameter from before the division, and of its aliases."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Refuse every operation.

        Raises:
            RunError: always.
        """
        file, line = script_line(sys._getframe(1))
        raise excluded("parameters from before the division", file, line)


def _replace_references(former: Sequence[nn.Parameter], divided: dict[int, Any]) -> None:
    # Not only the optimizer's groups: scripts keep lists of parameters for clipping or averages.
    for holder in gc.get_referrers(*former):
        # Frames and tuples cannot be changed: a use of what they hold is an error.
        if holder is former or isinstance(holder, FrameType | tuple):
            continue
        if isinstance(holder, CellType):
            holder.cell_contents = divided[id(holder.cell_contents)]
        elif isinstance(holder, dict):
            _replace_in_dictionary(holder, divided)
        elif isinstance(holder, list | deque):
            for number, item in enumerate(holder):
                holder[number] = divided.get(id(item), item)
        elif isinstance(holder, set):
            items = [divided.get(id(item), item) for item in holder]
            holder.clear()
            holder.update(items)
        elif hasattr(holder, "__dict__"):
            _replace_in_dictionary(vars(holder), divided)


def _replace_in_dictionary(holder: dict[Any, Any], divided: dict[int, Any]) -> None:
    if not any(id(one) in divided for pair in holder.items() for one in pair):
        return
    items = [tuple(divided.get(id(one), one) for one in pair) for pair in holder.items()]
    for key in [key for key in holder if id(key) in divided]:
        del holder[key]
    if len(holder) < len(items):
        holder.clear()  # the order stays
    holder.update(items)


def _aliases(former: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return the other tensors with the memory of parameters, as those of a state dict."""
    own = {id(one) for one in former}
    storages = set()
    for one in former:
        storage = one.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES:  # private
            storages.add(storage.data_ptr())
    if not storages:
        return []
    aliases = []
    for candidate in gc.get_objects():
        if type(candidate) not in (torch.Tensor, nn.Parameter) or id(candidate) in own:
            continue
        if candidate.layout is torch.strided and candidate.untyped_storage().data_ptr() in storages:
            aliases.append(candidate)
    return aliases
