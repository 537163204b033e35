# expect: divided
# Batch norm of vectors, sequences and volumes; cumulative averages, without affine, without running averages.
import torch
from common import report, update
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.volume = nn.Sequential(nn.Conv3d(1, 3, 2), nn.BatchNorm3d(3, momentum=None), nn.ReLU())
        self.sequence = nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4, affine=False), nn.ReLU())
        self.vector = nn.Sequential(nn.Flatten(), nn.Linear(104, 6), nn.BatchNorm1d(6, track_running_stats=False))

    def forward(self, x):
        x = self.volume(x).flatten(2)
        return self.vector(self.sequence(x))


model = Net()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for _ in range(8):
    loss = (model(torch.randn(11, 1, 4, 4, 4)) - 1).abs().pow(3).mean()
    losses.append(update(optimizer, loss))
model.eval()
with torch.no_grad():
    losses.append(model(torch.randn(11, 1, 4, 4, 4)).sum().item())
report(losses, model)
