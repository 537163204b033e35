# expect: divided
# Each step takes the first batch of a new iterator of a shuffling loader.
import torch.nn.functional as F
from common import inputs, labels, perceptron, report, sgd
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(inputs, labels)
loader = DataLoader(data, 22, shuffle=True)
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step in range(10):
    x, y = next(iter(loader))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
