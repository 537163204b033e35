# expect: divided
# A frozen teacher in evaluation mode, a student with dropout.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd
from torch import nn

teacher = perceptron(hidden=32).eval().requires_grad_(False)
student = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))
# + teacher = samestep.parallel(teacher)
# + student = samestep.parallel(student)
optimizer = sgd(student)
losses = []
for x, y in batches():
    with torch.no_grad():
        target = F.softmax(teacher(x) / 2, dim=1)
    logits = student(x)
    loss = F.cross_entropy(logits, y)
    loss = loss + 4 * F.kl_div(F.log_softmax(logits / 2, dim=1), target, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, student)
