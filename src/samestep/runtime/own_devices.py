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
    first, there = world.device.index, torch.cuda.device_count()
    if wanted is None and world.size > 1:
        raise InputError(
            f"strategy {name} on {world.size} ranks without a number of devices",
            rule="ranks on one machine share its GPUs, each as many",
            do="set strategy.devices: 2",
        )
    count = there - first if wanted is None else wanted
    if first + count > there:
        raise InputError(
            f"strategy.devices is {count}, and rank {world.rank} begins with GPU {first} of {there}",
            rule="every device is a GPU that this rank has for itself",
            do=f"set strategy.devices: {there - first}",
        )
    return tuple(torch.device("cuda", first + number) for number in range(count))
