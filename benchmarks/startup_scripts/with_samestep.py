"""Usage: `python with_samestep.py MARK PROCESSES`."""

import sys

from torch.nn.functional import cross_entropy
from workload import BATCH_SIZE, build_dataset, build_net, build_optimizer, first_step_done

import samestep


def train(mark: str) -> None:
    world = samestep.init()
    model = samestep.parallel(build_net())
    optimizer = build_optimizer(model)
    for inputs, targets in samestep.loader(build_dataset(), batch_size=BATCH_SIZE, shuffle=True):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if world.is_main:
            first_step_done(mark, world.size)
        break


if __name__ == "__main__":
    samestep.launch(train, sys.argv[1], processes=int(sys.argv[2]))
