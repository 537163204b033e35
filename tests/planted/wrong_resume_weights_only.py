"""Only weights and steps are saved: the optimizer's momentum is lost, and the epoch starts again."""

import sys
from pathlib import Path

import torch
from parts import Net, Points, batches_of, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    file = Path(sys.argv[1]) / "weights.pt"
    if file.exists():
        engine.steps, state = torch.load(file, weights_only=True)
        model.load_state_dict(state)
    for batch in batches_of(world, Points()):
        engine.step(batch)
        if world.is_main:
            file.parent.mkdir(exist_ok=True)
            torch.save((engine.steps, model.state_dict()), file)
        world.barrier()
