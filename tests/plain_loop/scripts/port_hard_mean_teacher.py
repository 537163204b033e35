# expect: divided
# A mean teacher: a copy of the model that follows it.
import copy

import torch
import torch.nn.functional as F
from common import classifier, images, report
from torch.utils.data import DataLoader

model = classifier()
teacher = copy.deepcopy(model)
# + model = samestep.parallel(model)
# + teacher = samestep.parallel(teacher)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for x, y in DataLoader(images(120), 24, shuffle=True):
        out = model(x)
        target = teacher(x).softmax(1).detach()
        loss = F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), model.parameters()):
                own.lerp_(other, 0.1)
        losses.append(loss.item())
report(losses, model, teacher)
