# expect: divided
# The loop leaves each epoch early.
import torch.nn.functional as F
from common import inputs, labels, perceptron, report, sgd
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(inputs, labels)
loader = DataLoader(data, 22)
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(4):
    for number, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number == 1:
            break
report(losses, model)
