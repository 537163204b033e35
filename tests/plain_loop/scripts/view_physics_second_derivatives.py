# expect: divided
# A physics-informed network: second derivatives of the output in the loss.
import torch
from common import perceptron, report, sgd

model = perceptron(1, 1)
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.01)
losses = []
for _ in range(10):
    x = torch.rand(10, 1, requires_grad=True)
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    boundary = (model(torch.zeros(4, 1)) - 1).square().mean()
    loss = (second + u).square().mean() + boundary
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
