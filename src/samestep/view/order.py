"""Order of the nodes of a graph that threads have made in lock step, as if one thread had made them.

Autograd runs the newest node first, by numbers that each thread counts for itself. The bits of the
gradient of a tensor
with three uses depend on that order, so nodes of slices receive new numbers: first the nodes before
    the first join,
slice by slice, then the nodes of the join, and so on. The order within a slice is then that of a
slice alone.

Private: `_sequence_nr`, `_set_sequence_nr` and `_get_sequence_nr` of torch 2.11 and 2.13.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from samestep.view.lockstep import Part


def nodes_of(values: Any) -> set[Any]:
    """Return the nodes of the tensors among some values."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}


def order_nodes(parts: Sequence[Part], outputs: Sequence[Any], inputs: Iterable[Any]) -> None:
    """Give the nodes of slices new numbers, above those of this thread.

    Args:
        parts: the slices, which have run to their ends.
        outputs: results of each slice.
        inputs: nodes where the graphs of all slices begin.
    """
    joins = len(parts[0].marks)
    joined = [nodes_of([part.joined[number] for part in parts]) for number in range(joins)]
    stop = set(inputs).union(*joined)
    keyed: list[tuple[tuple[int, ...], Any]] = []
    for number, nodes in enumerate(joined):
        keyed += [((number, 1, 0, node._sequence_nr()), node) for node in nodes]
    for position, (part, output) in enumerate(zip(parts, outputs, strict=True)):
        for node in _walk(nodes_of([part.roots, output]), stop):
            number = node._sequence_nr()
            keyed.append(((bisect_right(part.marks, number), 0, position, number), node))
    keyed.sort(key=lambda pair: pair[0])
    start: int = torch._C._autograd._get_sequence_nr()
    for number, (_, node) in enumerate(keyed, start):
        node._set_sequence_nr(number)
    _advance(len(keyed))


def _walk(roots: set[Any], stop: set[Any]) -> list[Any]:
    """Return the nodes below some nodes, without those of `stop` and the nodes of leaves."""
    seen = set(stop)
    collected = []
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node is None or node in seen or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        collected.append(node)
        todo.extend(below for below, _ in node.next_functions)
    return collected


def _advance(count: int) -> None:
    """Let later nodes of this thread have numbers above the next `count` ones."""
    with torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        for _ in range(count):
            leaf.neg()
