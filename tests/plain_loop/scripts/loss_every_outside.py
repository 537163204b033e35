# expect: divided
# Every loss of torch for pairs of outputs and targets, computed in the loop.
import torch
from common import report, update
from torch import nn

criteria = [
    nn.MSELoss(),
    nn.L1Loss(reduction="sum"),
    nn.SmoothL1Loss(beta=0.5),
    nn.HuberLoss(delta=0.3),
    nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 0.5, 1.0])),
    nn.PoissonNLLLoss(full=True),
    nn.SoftMarginLoss(),
    nn.MultiLabelSoftMarginLoss(),
]
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for step in range(16):
    x = torch.randn(11, 6)
    y = (x[:, :4] + 0.3 * torch.randn(11, 4) > 0).double()
    loss = criteria[step % len(criteria)](model(x), y)
    losses.append(update(optimizer, loss))
report(losses, model)
