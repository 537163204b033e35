# expect: divided
# Accuracy, confusion matrix, mean reciprocal rank and area under a curve over all samples of the evaluation.
import torch
import torch.nn.functional as F
from common import batches, inputs, labels, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for _ in range(3):
    model.train()
    for x, y in batches(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    confusion, ranks, scores = torch.zeros(4, 4), [], []
    with torch.inference_mode():
        for x, y in zip(inputs.split(25), labels.split(25), strict=True):
            logits = model(x)
            confusion.index_put_((y, logits.argmax(1)), torch.tensor(1.0), accumulate=True)
            ranks.append((logits >= logits.gather(1, y[:, None])).sum(1))
            scores.append(logits[:, 0])
    order = torch.cat(scores).argsort()
    positive = (labels[order] == 0).double()
    area = (positive * (1 - positive).cumsum(0)).sum() / (positive.sum() * (1 - positive).sum())
    losses += [*confusion.flatten().tolist(), (1 / torch.cat(ranks)).mean().item(), area.item()]
report(losses, model)
