# expect: divided
# A new model for each of torch's optimizers.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, update

optimizers = [
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.NAdam(p, lr=0.01),
    lambda p: torch.optim.RAdam(p, lr=0.01),
    lambda p: torch.optim.Adamax(p, lr=0.01),
    lambda p: torch.optim.Adadelta(p, lr=1.0),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    lambda p: torch.optim.Rprop(p, lr=0.001),
    lambda p: torch.optim.ASGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
]
for make in optimizers:
    model = perceptron()
    # + model = samestep.parallel(model)
    optimizer = make(model.parameters())
    losses = []
    for x, y in batches(6):
        loss = F.cross_entropy(model(x), y)
        losses.append(update(optimizer, loss))
    report(losses, model)
