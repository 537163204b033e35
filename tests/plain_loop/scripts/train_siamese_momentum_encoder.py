# expect: divided
# BYOL: an online network and a target network that follows it by `lerp_`, two calls of each per step.
import copy

import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

online = perceptron(outputs=6)
target = copy.deepcopy(online).requires_grad_(False)
predictor = perceptron(6, 6, 8)
# + online = samestep.parallel(online)
# + target = samestep.parallel(target)
# + predictor = samestep.parallel(predictor)
optimizer = sgd(online, predictor)
losses = []
for x, _ in batches():
    views = [x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)]
    with torch.no_grad():
        targets = [target(view) for view in views]
    predictions = [predictor(online(view)) for view in views]
    loss = (
        2
        - F.cosine_similarity(predictions[0], targets[1]).mean()
        - F.cosine_similarity(predictions[1], targets[0]).mean()
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    losses.append(loss.item())
report(losses, online, target, predictor)
