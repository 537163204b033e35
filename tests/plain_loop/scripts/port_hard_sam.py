# expect: divided
# Sharpness-aware minimisation: two backwards per step, at the parameters and next to them.
import torch
import torch.nn.functional as F
from common import classifier, images, report
from torch.utils.data import DataLoader

model = classifier()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


losses = []
for epoch in range(2):
    for x, y in DataLoader(images(120), 24, shuffle=True):
        loss = backward(x, y)
        norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in model.parameters()))
        moves = [parameter.grad * 0.05 / norm for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves):
                parameter.add_(move)
        backward(x, y)
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves):
                parameter.sub_(move)
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
