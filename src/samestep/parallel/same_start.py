"""All ranks begin with the same model."""

from __future__ import annotations

import hashlib
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from samestep.errors import InputError
from samestep.parallel.gather import gather_numbers
from samestep.runtime.world import World


def begin_the_same(model: torch.nn.Module, world: World) -> None:
    """Give every rank the parameters and buffers of rank 0, as DDP does.

    Raises:
        InputError: ranks have models of different shapes.
    """
    if world.size > 1:
        _require_same_shapes(model, world)
        _take_from_first(model, world)


def _require_same_shapes(model: torch.nn.Module, world: World) -> None:
    """Refuse models of different shapes, which the backend would not notice."""
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors_of(model).items()]
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=4).digest()
    if len(set(gather_numbers(world, [int.from_bytes(digest, "little")]))) > 1:
        raise InputError(
            f"the model of rank {world.rank} has other parameters or buffers than another rank's",
            rule="every rank builds the same model",
            do="build it from what all ranks know alike",
        )


def _take_from_first(model: torch.nn.Module, world: World) -> None:
    for tensor in tensors_of(model).values():
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        take_from_first(values, world)
        tensor.detach().copy_(values)


def take_from_first(values: torch.Tensor, world: World) -> None:
    """Give every rank the values of rank 0, in place of its own.

    Args:
        values: contiguous, of any type.
    """
    if values.numel() > 0:
        # As bytes: the backend does not know every type.
        raw = values.flatten().view(torch.uint8)
        world.guarded(partial(dist.broadcast, raw, group=world.group, group_src=0), "a broadcast")


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return dict(chain(model.named_parameters(), model.named_buffers()))
