"""Random numbers of the own rows of a divided call, from those of the whole batch or by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.view.region import CallOperations, UnknownDraw

Shape = tuple[int, ...]


def follows_rows(operations: CallOperations) -> bool:
    """Return whether the next draw has own rows in its first dimension."""
    region = operations.region
    index = len(operations.draws)
    return (
        region is not None
        and index < len(region.draw_factors)
        and region.draw_factors[index] is not None
    )


@contextmanager
def default_generator(generator: torch.Generator | None) -> Iterator[None]:
    """Let the default generator of a device begin where a newly seeded `generator` does; put it back afterwards."""
    if generator is None:
        yield
        return
    default = torch.default_generator
    if is_accelerator(generator.device):
        default = accelerator_module().default_generators[generator.device.index]
    state = default.get_state()
    default.manual_seed(generator.initial_seed())
    try:
        yield
    finally:
        default.set_state(state)


def draw(
    operations: CallOperations,
    shape: Shape,
    compute: Callable[[Shape], Any],
    device: torch.device,
    received: bool = False,
) -> torch.Tensor:
    """Return the numbers of the own rows, which have `shape`; `compute` is asked for those of other shapes as well.

    It draws from the default generator, or from the generator of the script (`given`), for the
    whole batch.
    """
    region = operations.region
    if region is None:  # the whole call of a trial
        return torch.as_tensor(compute(shape))

    def make(asked: Shape, generator: torch.Generator | None) -> torch.Tensor:
        with default_generator(generator):
            return torch.as_tensor(compute(asked))

    if region.seed is not None and not received:
        return operations.draw(shape, make, device)
    operations.draws.append(shape)
    numbers = replace(region, seed=None).draw(len(operations.draws) - 1, shape, make, device)
    return numbers.clone()  # does not keep the numbers of other rows alive


def like(tensor: torch.Tensor, shape: Shape, *, exactly: bool = False) -> torch.Tensor:
    """Return the result of `empty_like` for the whole batch if `tensor` holds own rows of it.

    With `exactly` the strides are those of `tensor` even if it is not dense.
    """
    empty = torch.empty_like(tensor)
    strides = tensor.stride()
    if exactly and empty.stride() != strides:
        if strides[0] < max(strides):
            raise UnknownDraw(
                "draw into a part of a tensor whose rows are not in the first dimension"
            )
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    if shape == tuple(tensor.shape):
        return empty
    if (
        tensor.shape[0] == 1
    ):  # a dimension with the stride of the one row is outside of the rows in the whole batch
        strides = (strides[0], *(stride * (1 + (stride >= strides[0])) for stride in strides[1:]))
    whole = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
    return torch.empty_like(whole, device=tensor.device)


def with_rows(
    operations: CallOperations,
    shape: Shape,
    values: Sequence[Any],
    compute: Callable[[list[Any]], Any],
    fills: bool = False,
) -> Callable[[Shape], Any]:
    """Return a function of a shape that computes with `values`; tensors as long as the numbers of `shape` have rows.

    For the whole batch the own rows are put in their place among ones, for a microbatch its rows
    are taken. With `fills` the function fills the first of the values.
    """
    region = operations.region
    position = 0
    assert region is not None

    def rows_of(value: Any, asked: Shape, filled: bool) -> Any:
        if (
            not isinstance(value, torch.Tensor)
            or value.dim() != len(shape)
            or value.shape[0] != shape[0]
        ):
            return value
        if asked[0] <= shape[0]:
            return value[position : position + asked[0]]
        start = shape[0] * region.start // region.own
        whole = like(value, (asked[0], *value.shape[1:]), exactly=filled).fill_(1)
        whole[start : start + shape[0]] = value
        return whole

    def draw_shape(asked: Shape) -> Any:
        nonlocal position
        if asked == shape:
            return compute(list(values))
        chosen = [
            rows_of(value, asked, fills and not number) for number, value in enumerate(values)
        ]
        position += asked[0]
        return compute(chosen)

    return draw_shape
