"""Code of a script that runs in the backward of a call: functions of its own, and hooks of saved tensors.

A trial runs this code, and so may change the objects that it reaches. These are compared before the
first backward, of the watched call, and after it.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from samestep.view.division import ComputedWhole
from samestep.view.leaves import VALUES
from samestep.view.reachable import Reachable, changed, is_library

_ENTRIES = ("forward", "backward", "vjp")


class BackwardCode:
    """Code of the script that the backward of a watched call runs.

    Args:
        parts: the module and its submodules; a trial restores their state.
        nodes: nodes of functions that are written in Python.
        hooks: functions that pack or unpack saved tensors.
        outputs: outputs of the call.
    """

    def __init__(
        self,
        parts: Iterable[nn.Module],
        nodes: Iterable[Any],
        hooks: Iterable[Callable[..., Any]],
        outputs: Iterable[Any],
    ) -> None:
        roots: list[Any] = [hook for hook in hooks if not is_library(hook)]
        self._words = "has a hook of saved tensors that keeps state"
        self._waiting: set[int] = set()  # nodes that no backward has reached
        ends: list[Any] = []
        if roots:
            ends = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor)]
        for node in nodes:
            functions = list(_functions_of(node))
            if functions:
                roots += [*functions, *_shared_values(node)]
                ends.append(node)
                self._words = "has an autograd function whose backward keeps state"
        self._reachable: Reachable | None = None
        if roots:
            self._reachable = Reachable(nn.Module(), roots, names=_ENTRIES, own=parts)
            self._before = self._reachable.digest()
            for end in set(ends) - {None}:
                self._wait_for(end)

    def _wait_for(self, node: Any) -> None:
        waiting = self._waiting  # the graph keeps no more than that
        number = id(node)
        waiting.add(number)
        node.register_hook(lambda *gradients: waiting.discard(number))

    @property
    def has_run(self) -> bool:
        """Whether a backward has run the code, if there is any."""
        return not self._waiting

    def require_unchanged(self) -> None:
        """Require that the values within reach of the code have not changed since the watched call.

        Raises:
            ComputedWhole: one has, and so a trial would change it too.
        """
        if (
            self._reachable is not None
            and changed(self._before, self._reachable.digest()) is not None
        ):
            raise ComputedWhole(self._words)


def _functions_of(node: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a node's class, if the script defines it."""
    kind = getattr(
        type(node), "_forward_cls", None
    )  # private; the class of a function that is written in Python
    if kind is None:
        return
    if is_library(kind):
        for cell in getattr(getattr(kind, "backward", None), "__closure__", None) or ():
            registered = getattr(
                cell.cell_contents, "_backward_fn", None
            )  # private; torch.library.register_autograd
            if isinstance(registered, types.FunctionType) and not is_library(registered):
                yield registered
        return
    for base in kind.__mro__:
        if not is_library(base):
            for value in vars(base).values():
                function = getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    yield inspect.unwrap(function)  # of once_differentiable


def _shared_values(node: Any) -> Sequence[Any]:
    """Return objects in the attributes of a context that something else holds too."""
    attributes = getattr(node, "__dict__", {})
    probe = {"": object()}
    alone = sys.getrefcount(probe[""])
    return [
        attributes[name]
        for name in attributes
        if sys.getrefcount(attributes[name]) > alone
        and not isinstance(attributes[name], (*VALUES, torch.Tensor))
    ]
