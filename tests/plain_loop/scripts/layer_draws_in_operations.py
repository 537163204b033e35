# expect: whole: draw
# Layers that draw inside one operation: randomized leaky ReLU, fractional pooling and alpha dropout.
import torch
from common import report, update
from torch import nn

model = nn.Sequential(
    nn.Conv2d(1, 4, 3),
    nn.RReLU(),
    nn.FractionalMaxPool2d(2, output_size=3),
    nn.AlphaDropout(0.2),
    nn.Flatten(),
    nn.Linear(36, 3),
)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(9, 1, 9, 9)), torch.randint(0, 3, (9,)))
    losses.append(update(optimizer, loss))
report([*losses, torch.rand(())], model)
