"""Order of nodes that threads have made: gradients have the bits of one thread."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from samestep.view.lockstep import AllHere, Part, run_in_lockstep
from samestep.view.order import nodes_of, order_nodes


def dense(x: torch.Tensor, weights: list[torch.Tensor], part: Part | None) -> torch.Tensor:
    """Compute layers that see all results before; a join follows each."""
    seen = [x]
    for weight in weights:
        inputs = sum(seen[1:], seen[0])
        result = torch.tanh(inputs @ weight)
        total = result.sum(0)
        if part is not None:
            total = part.total(total)
        seen.append(result + 0.1 * total)
    return sum(seen[1:], seen[0])


def of_slices(count: int) -> tuple[list[int], list[Any]]:
    """Return the numbers of the nodes of the first slice, in the order of a walk, and the gradients of its weights."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(6, 6, generator=generator) / 3 for _ in range(6)]
    slices = [torch.randn(4, 6, generator=generator) for _ in range(4)][:count]
    own = [[weight.clone().requires_grad_() for weight in weights] for _ in slices]
    inputs = [x.clone().requires_grad_() for x in slices]
    parts = [Part(partial(dense, x, one), nullcontext) for x, one in zip(inputs, own, strict=True)]
    before = torch._C._autograd._get_sequence_nr()
    outputs = run_in_lockstep(parts, AllHere())
    order_nodes(parts, outputs, nodes_of(inputs))
    numbers = []
    todo = [outputs[0].grad_fn]
    while todo:
        node = todo.pop(0)
        if node is not None and "AccumulateGrad" not in node.name():
            numbers.append(node._sequence_nr())
            todo += [below for below, _ in node.next_functions]
    assert min(numbers) >= before
    assert max(numbers) < torch._C._autograd._get_sequence_nr()
    return numbers, outputs


def test_a_node_is_above_all_that_it_uses() -> None:
    _, outputs = of_slices(3)
    seen = set()
    todo = [output.grad_fn for output in outputs]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for below, _ in node.next_functions:
            if below is not None and "AccumulateGrad" not in below.name():
                assert below._sequence_nr() < node._sequence_nr()
                todo.append(below)
    assert len({node._sequence_nr() for node in seen}) == len(seen)


def test_the_order_within_a_slice_does_not_depend_on_the_number_of_slices() -> None:
    orders = []
    for count in (1, 2, 4):
        numbers, _ = of_slices(count)
        # A walk of several slices meets nodes of the others too, at joins: the first nodes are those of one slice.
        own = numbers[:20]
        orders.append(sorted(range(len(own)), key=own.__getitem__))
    assert orders[1:] == orders[:1] * 2
