# expect: divided
# Gradients of three small batches are added before each step.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report

model = perceptron()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for number, (x, y) in enumerate(batches(15), 1):
    loss = F.cross_entropy(model(x), y) / 3
    loss.backward()
    losses.append(loss.item())
    if number % 3 == 0:
        optimizer.step()
        optimizer.zero_grad()
report(losses, model)
