"""Sums of gradients that every rank has kept, some millions of elements at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from samestep.parallel.flat import taken_apart

_GROUP_ELEMENTS = 4 * 2**20


def sum_kept(
    parameters: Iterable[torch.nn.Parameter], summed: Callable[[list[torch.nn.Parameter]], torch.Tensor]
) -> None:
    """Set `.grad` of each parameter to its part of what `summed` makes, one flat tensor for some of them at a time."""
    for group in _groups(parameters):
        for parameter, value in zip(group, taken_apart(summed(group), group), strict=True):
            parameter.grad = value


def _groups(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters in order, by some millions of elements of one kind, so that no message is as large as the model."""
    group: list[torch.nn.Parameter] = []
    for parameter in parameters:
        full = sum(p.numel() for p in group) + parameter.numel() > _GROUP_ELEMENTS
        if group and (full or (parameter.dtype, parameter.device) != (group[0].dtype, group[0].device)):
            yield group
            group = []
        group.append(parameter)
    if group:
        yield group
