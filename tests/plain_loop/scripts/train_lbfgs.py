# expect: divided
# L-BFGS with a line search calls the closure several times per step.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report

model = perceptron()
# + model = samestep.parallel(model)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
losses = []
for x, y in batches(4):

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)  # noqa: B023
        loss.backward()
        return loss

    losses.append(optimizer.step(closure).item())
report(losses, model)
