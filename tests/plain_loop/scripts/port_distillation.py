# expect: divided
# A frozen teacher in evaluation mode, and a student.
import torch
import torch.nn.functional as F
from common import convolutions, images, report
from torch import nn
from torch.utils.data import DataLoader


def network(width):
    return nn.Sequential(
        convolutions(1, width),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 5),
    )


student = network(4)
teacher = network(16).eval().requires_grad_(False)
# + student = samestep.parallel(student)
# + teacher = samestep.parallel(teacher)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for x, y in DataLoader(images(110), batch_size=22, shuffle=True):
        with torch.no_grad():
            target = teacher(x).softmax(1)
        out = student(x)
        loss = F.cross_entropy(out, y) + F.kl_div(out.log_softmax(1), target, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, student)
