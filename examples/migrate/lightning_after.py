"""Training loop with a function for the step: `samestep run --processes 3 lightning_after.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import samestep

torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = random_split(data, [1400, 397])


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, inputs):
        return self.net(inputs)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


with samestep.start() as world:
    model = Digits()
    engine = samestep.Engine(model, model.configure_optimizers(), nn.functional.cross_entropy, world=world)
    batches = samestep.loader(train, batch_size=64, microbatches=8, world=world)
    for _ in range(3):
        for batch in batches:
            engine.step(batch)
    values = engine.evaluate(samestep.loader(test, batch_size=64, microbatches=8, world=world))
    if world.is_main:
        print(f"loss {values['loss']:.4f}")
