# expect: divided
# Federated averaging: three copies of the model train on data of their own, and their weights are averaged.
import copy

import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
losses = []
for _ in range(3):
    clients = []
    for client in range(3):
        own = copy.deepcopy(model)
        optimizer = sgd(own)
        for x, y in batches()[3 * client : 3 * client + 3]:
            loss = F.cross_entropy(own(x), y)
            update(optimizer, loss)
        losses.append(loss.item())
        clients.append(own.state_dict())
    model.load_state_dict({name: torch.stack([c[name] for c in clients]).mean(0) for name in clients[0]})
report(losses, model)
