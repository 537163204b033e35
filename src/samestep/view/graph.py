"""Graph of a watched call: tensors from elsewhere, and functions of the script in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction


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


def sequence_number() -> int:
    """Return the number of the next node of a graph in this thread."""
    number: int = torch._C._autograd._get_sequence_nr()  # private
    return number


def captures(
    own: Iterable[Any],
    returned: Iterable[Any],
    made: Mapping[int, weakref.ref[torch.Tensor]],
    start: int,
) -> Captures:
    """Walk the graph of the outputs for tensors that the call took from elsewhere than arguments and parameters.

    Args:
        own: parameters and arguments.
        returned: outputs.
        made: tensors that the call made, by identity.
        start: number of its first node.
    """
    collected = Captures()
    tensors = [leaf for leaf in own if isinstance(leaf, torch.Tensor)]
    own_leaves = {id(tensor) for tensor in tensors}
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
            if id(variable) not in own_leaves and (
                reference is None or reference() is not variable
            ):
                collected.reason = "uses a parameter that is not its own"
            continue
        if node._sequence_nr() < start:  # private; numbers grow with time
            collected.reason = "uses a tensor with a graph that is not an argument"
            continue
        if name == "CheckpointFunctionBackward":
            collected.has_checkpoint = True
        elif isinstance(node, BackwardCFunction):
            collected.functions.append(node)
        todo.extend(next_node for next_node, _ in node.next_functions)
    return collected
