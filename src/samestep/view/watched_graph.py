"""Graph of a watched call: tensors from elsewhere, and code of the script that its backward runs.

A trial runs this code, and so may change the objects that it reaches. These are compared before the
first backward, of the watched call, and after it.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from samestep.view.leaves import VALUES, TensorReference
from samestep.view.reachable import Reachable, changed, is_library
from samestep.view.trial_result import ComputedWhole

_ENTRIES = ("forward", "backward", "vjp")


@dataclass
class Captures:
    """Result of a walk of the graph of a call.

    Attributes:
        reason: why the call must be computed whole.
        has_checkpoint: whether parts are computed again in the backward.
        functions: nodes of functions that are written in Python.
    """

    reason: str | None = None
    has_checkpoint: bool = False
    functions: list[Any] = field(default_factory=list)


def captures(
    own: Iterable[Any],
    returned: Iterable[Any],
    made: Mapping[int, TensorReference],
    start: int,
) -> Captures:
    """Walk the graph of the outputs for tensors that are neither arguments nor parameters.

    Args:
        own: parameters and arguments.
        returned: outputs.
        made: tensors that the call made, by identity.
        start: number of its first node.
    """
    collected = Captures()
    tensors = [leaf for leaf in own if isinstance(leaf, torch.Tensor)]
    own_leaves = {id(tensor) for tensor in tensors}
    # Graphs of arguments belong to the script, so the walk ends there.
    seen = {None, *(tensor.grad_fn for tensor in tensors)}
    todo: list[Any] = [leaf.grad_fn for leaf in returned if isinstance(leaf, torch.Tensor)]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        if name == "AccumulateGrad":
            variable = node.variable
            reference = made.get(id(variable))
            is_made = reference is not None and reference() is variable
            if id(variable) not in own_leaves and not is_made:
                collected.reason = "uses a parameter that is not its own"
            continue
        if node._sequence_nr() < start:  # private; numbers grow with time
            collected.reason = "uses a tensor with a graph that is not an argument"
            continue
        if name == "CheckpointFunctionBackward":
            # The backward runs code of the module, as the forward of a trial does.
            collected.has_checkpoint = True
        elif isinstance(node, BackwardCFunction):
            collected.functions.append(node)
        todo.extend(next_node for next_node, _ in node.next_functions)
    return collected


class BackwardCode:
    """Code of the script that the backward of a watched call runs.

    Args:
        parts: the module and its submodules; a trial restores their state.
        nodes: nodes of functions that are written in Python.
    """

    def __init__(self, parts: Iterable[nn.Module], nodes: Iterable[Any]) -> None:
        roots: list[Any] = []
        self._waiting: set[int] = set()  # nodes that no backward has reached
        for node in nodes:
            functions = list(_functions_of(node))
            if functions:
                roots += [*functions, *_shared_values(node)]
                self._wait_for(node)
        self._reachable: Reachable | None = None
        if roots:
            self._reachable = Reachable(nn.Module(), roots, names=_ENTRIES, own=parts)
            self._before = self._reachable.digest()

    def _wait_for(self, node: Any) -> None:
        waiting = self._waiting  # the graph keeps this set, not the object
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
        if self._reachable is None:
            return
        if changed(self._before, self._reachable.digest()) is not None:
            raise ComputedWhole("has an autograd function whose backward keeps state")


def _functions_of(node: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a node's class, if the script defines it."""
    kind = getattr(type(node), "_forward_cls", None)  # private
    if kind is None:
        return
    if is_library(kind):
        for cell in getattr(getattr(kind, "backward", None), "__closure__", None) or ():
            # Private: the function that the script gave torch.library.register_autograd.
            registered = getattr(cell.cell_contents, "_backward_fn", None)
            if isinstance(registered, types.FunctionType) and not is_library(registered):
                yield registered
        return
    for base in kind.__mro__:
        if not is_library(base):
            for value in vars(base).values():
                function = getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    yield inspect.unwrap(function)  # of once_differentiable


def _shared_values(node: Any) -> list[Any]:
    """Return objects in the attributes of a context that something else holds too."""
    attributes = getattr(node, "__dict__", {})
    # Measured, since references of an expression depend on the version of Python.
    probe = {"": object()}
    alone = sys.getrefcount(probe[""])
    return [
        attributes[name]
        for name in attributes
        if sys.getrefcount(attributes[name]) > alone
        and not isinstance(attributes[name], (*VALUES, torch.Tensor))
    ]
