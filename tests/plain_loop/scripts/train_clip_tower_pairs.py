# expect: divided
# Two towers and a queue of keys outside of the models; the logits are between all rows of the batch and the queue.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

image, text = perceptron(8, 5), perceptron(4, 5)
# + image = samestep.parallel(image)
# + text = samestep.parallel(text)
optimizer = sgd(image, text)
queue = F.normalize(torch.randn(22, 5), dim=1)
losses = []
for x, _ in batches():
    a = F.normalize(image(x[:, :8]), dim=1)
    b = F.normalize(text(x[:, 8:]), dim=1)
    target = torch.arange(len(x))
    logits = torch.cat([a @ b.T, a @ queue.T], 1) / 0.2
    loss = F.cross_entropy(logits, target) + F.cross_entropy(b @ a.T / 0.2, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    queue = torch.cat([queue[len(x) :], b.detach()])
    losses.append(loss.item())
report([*losses, *queue[:, 0]], image, text)
