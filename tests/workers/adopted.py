"""Steps in a process group that exists already; run as a script, one process per rank, which prints a hash."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

import samestep
from helpers.batches import random_batch
from helpers.models import Normed, digest, seeded
from samestep.distributed.world import gather_numbers

MICROBATCHES, SIZE, STEPS = 8, 19, 4


def trained(world: samestep.World) -> str:
    """Return the hash of a model after some steps."""
    model = nn.Sequential(seeded(0, Normed), nn.Dropout(0.25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world)
    for _ in range(STEPS):
        engine.step(random_batch(world, SIZE, MICROBATCHES))
    return digest(model)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", action="store_true", help="create a process group first")
    parser.add_argument("--init", action="store_true", help="samestep.init() in place of samestep.start()")
    parser.add_argument("--destroy", action="store_true", help="destroy the group before the end of the process")
    arguments = parser.parse_args()
    if arguments.group:
        dist.init_process_group("gloo")
    torch.set_num_threads(2)  # as a library may do
    if arguments.init:
        print(trained(samestep.init(device="cpu", adopt=True)))
    else:
        for _ in range(2):  # one group serves several worlds, one after another
            with samestep.start(device="cpu", adopt=True) as world:
                result = trained(world)
                threads = torch.get_num_threads()
        assert threads == 1
        assert dist.is_initialized() == arguments.group
        if arguments.group:  # and its owner still can communicate
            assert gather_numbers(world, [world.rank]) == [(rank,) for rank in range(world.size)]
        print(result)
    time.sleep(0.1)  # a process that exits while threads of gloo release objects of a collective can abort
    if arguments.destroy:
        dist.destroy_process_group()


if __name__ == "__main__":
    _main()
