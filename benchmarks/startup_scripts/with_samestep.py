"""Usage: `python with_samestep.py MARK PROCESSES`."""

import sys

from workload import BATCH_SIZE, build_dataset, build_net, build_optimizer, first_step_done

import samestep


def train(mark: str) -> None:
    with samestep.start() as world:
        model = build_net()
        engine = samestep.Engine(model, build_optimizer(model), samestep.cross_entropy, world=world)
        loader = samestep.loader(
            build_dataset(), batch_size=BATCH_SIZE, microbatches=world.size, shuffle=True, world=world
        )
        for batch in loader:
            engine.step(batch)
            if world.is_main:
                first_step_done(mark, world.size)
            break


if __name__ == "__main__":
    samestep.launch(train, sys.argv[1], processes=int(sys.argv[2]))
