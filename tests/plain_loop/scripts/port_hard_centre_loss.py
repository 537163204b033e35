# expect: divided
# A centre loss with parameters of its own, in the same optimizer.
import torch
import torch.nn.functional as F
from common import classifier, images, report
from torch import nn
from torch.utils.data import DataLoader


class CentreLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 5))

    def forward(self, features, y):
        return (features - self.centres[y]).square().sum(1).mean()


model = classifier()
centre_loss = CentreLoss()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer.add_param_group({"params": centre_loss.parameters()})
losses = []
for epoch in range(2):
    for x, y in DataLoader(images(120), 24, shuffle=True):
        out = model(x)
        loss = F.cross_entropy(out, y) + 0.1 * centre_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model, centre_loss)
