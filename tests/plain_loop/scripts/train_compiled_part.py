# expect: divided
# limit: 120
# One block of the model is compiled.
import torch.nn.functional as F
from common import report, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        return self.head(x + self.block(x))


model = Net()
model.block.compile(backend="aot_eager")
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
