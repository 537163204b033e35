"""Only weights and the position are saved: the momentum of the optimizer is lost."""

import sys
from pathlib import Path

import torch
from parts import Net, Points, batches_of, seeded, sgd, step

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
batches = batches_of(Points())
optimizer = sgd(model)
file = Path(sys.argv[1]) / "weights.pt"
done = 0
if file.exists():
    done, state = torch.load(file, weights_only=True)
    model.load_state_dict(state)
for number, batch in enumerate(batches):
    if number < done:
        continue
    step(model, optimizer, batch)
    if world.is_main:
        file.parent.mkdir(exist_ok=True)
        torch.save((number + 1, model.state_dict()), file)
    world.barrier()
