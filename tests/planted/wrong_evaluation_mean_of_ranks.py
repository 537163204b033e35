"""Each rank evaluates its part of the samples, and the accuracy is the mean of those of the ranks."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Points()))
points = Points(27, noise=0.0)
model.eval()
with torch.no_grad():
    outputs = model(points.inputs[world.rank :: world.size])
right = outputs.argmax(1) == points.targets[world.rank :: world.size]
accuracies = samestep.all_gather(float(right.float().mean()))
print(f"accuracy {sum(accuracies) / world.size:.6f}")
