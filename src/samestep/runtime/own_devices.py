"""The devices of one rank, where it has several."""

from __future__ import annotations

import torch

from samestep.errors import InputError
from samestep.runtime.world import World


def own_devices(world: World) -> tuple[torch.device, ...]:
    """The devices that `strategy.devices` gives to this rank, in order; the first is the world's.

    On a CPU they are stand-ins, all of them the CPU: threads, or names for parts of a model.

    Raises:
        InputError: it is not said how many, or they are not there.
    """
    name, wanted = world.strategy.name, world.strategy.devices
    if world.device.type != "cuda":
        if wanted is None:
            raise InputError(
                f"strategy {name} on a CPU without a number of devices",
                rule="without GPUs devices are stand-ins, as many as are asked for",
                do="set strategy.devices: 2",
            )
        return (world.device,) * wanted
    if wanted is None and world.size > 1:
        raise InputError(
            f"strategy {name} on {world.size} ranks without a number of devices",
            rule="ranks on one machine share its GPUs, each as many",
            do="set strategy.devices: 2",
        )
    numbers = gpus_from(world.device.index, wanted, torch.cuda.device_count())
    return tuple(torch.device("cuda", number) for number in numbers)


def gpus_from(first: int, wanted: int | None, there: int) -> range:
    """The numbers of a rank's GPUs, of which the first is known.

    Args:
        wanted: how many; None for all that follow.
        there: how many this process sees.

    Raises:
        InputError: there are fewer.
    """
    if wanted is not None and first + wanted > there:
        raise InputError(
            f"strategy.devices is {wanted}, but torch sees {there - first} GPU{'s' if there - first > 1 else ''} here",
            rule="every device is a GPU that this rank has for itself",
            do=f"set strategy.devices: {there - first}",
        )
    return range(first, there if wanted is None else first + wanted)


def first_gpu(local_rank: int, width: int, there: int) -> int:
    """The number of a rank's first GPU: those of a machine go to its ranks in order, `width` to each.

    Raises:
        InputError: none are left for this one.
    """
    if (local_rank + 1) * width > there:
        raise InputError(
            f"this rank is number {local_rank} on its machine but torch sees {there} GPUs",
            rule="one GPU a rank" if width == 1 else f"{width} GPUs a rank, as strategy.devices has it",
            do=f"use --processes {there // width}, or --device cpu" if there >= width else "use --device cpu",
        )
    return local_rank * width
