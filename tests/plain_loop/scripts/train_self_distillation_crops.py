# expect: divided
# Large and small crops through one student, large ones through its moving average; a centre of the teacher's outputs.
import copy

import torch
import torch.nn.functional as F
from common import convolutions, report, update
from torch import nn

student = nn.Sequential(convolutions(1, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
# + student = samestep.parallel(student)
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
center = torch.zeros(5)
losses = []
for _ in range(8):
    image = torch.randn(9, 1, 10, 10)
    large, small = image[:, :, 1:, 1:], [image[:, :, :6, :6], image[:, :, 4:, 4:]]
    with torch.no_grad():
        target = teacher(large)
    sharp = ((target - center) / 0.1).softmax(1)
    loss = sum(-(sharp * F.log_softmax(student(crop), 1)).sum(1).mean() for crop in [large, *small])
    update(optimizer, loss)
    with torch.no_grad():
        center = 0.9 * center + 0.1 * target.mean(0)
        for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
            own.lerp_(other, 0.05)
    losses.append(loss.item())
report([*losses, *center], student, teacher)
