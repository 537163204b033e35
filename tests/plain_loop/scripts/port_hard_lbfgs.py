# expect: divided
# LBFGS: the closure is called several times in a step.
import torch
import torch.nn.functional as F
from common import images, report
from torch import nn
from torch.utils.data import DataLoader

model = nn.Sequential(nn.Flatten(), nn.Linear(100, 8), nn.Tanh(), nn.Linear(8, 5))
# + model = samestep.parallel(model)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
losses = []
for x, y in DataLoader(images(48), 24, shuffle=True):

    def closure(x=x, y=y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses.append(optimizer.step(closure).item())
report(losses, model)
