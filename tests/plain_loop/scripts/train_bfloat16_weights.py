# expect: divided
# tolerance: permuted
# Weights and inputs in bfloat16, with copies of the weights in float32 for the optimizer.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report

model = perceptron().bfloat16()
# + model = samestep.parallel(model)
masters = [p.detach().float() for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.1)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x.bfloat16()).float(), y)
    model.zero_grad()
    loss.backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters(), strict=True):
            p.copy_(master)
    losses.append(loss.item())
report(losses, model)
