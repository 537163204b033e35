# expect: divided
# Losses of the batch in the loop: contrasts, hard triplets and examples, weights of classes, statistics of two views.
import torch
from common import batches, perceptron, report, sgd, update
from torch.nn import functional as F


def contrast(out, y):
    z = F.normalize(out, dim=1)
    others = ~torch.eye(len(z), dtype=torch.bool)
    positive = (y[:, None] == y) & others
    logits = z @ z.T / 0.3
    log_p = logits - torch.logsumexp(logits.masked_fill(~others, float("-inf")), dim=1, keepdim=True)
    return -((log_p * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


def hard_triplets(out, y):
    distance = torch.cdist(out, out)
    same = y[:, None] == y
    hardest_positive = (distance * same).max(1).values
    hardest_negative = distance.masked_fill(same, float("inf")).min(1).values
    return F.relu(hardest_positive - hardest_negative + 0.5).mean()


def hard_examples(out, y):
    each = F.cross_entropy(out, y, reduction="none")
    return each.topk(4).values.mean() + each.median()


def weighted_classes(out, y):
    weight = len(y) / (4 * torch.bincount(y, minlength=4).clamp(min=1))
    return F.cross_entropy(out, y, weight=weight)


def cross_correlation(out, y):
    first, second = ((part - part.mean(0)) / part.std(0) for part in (out[:5], out[5:10]))
    return (first.T @ second / 5 - torch.eye(4)).pow(2).sum()


def distance_of_distributions(out, y):
    target = torch.randn(len(out), 4)
    pairs = ((out, out), (out, target), (target, target))
    same, between, aims = (torch.exp(-torch.cdist(a, b).pow(2) / 8).mean() for a, b in pairs)
    return same - 2 * between + aims


model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.05)
losses = []
for loss in (contrast, hard_triplets, hard_examples, weighted_classes, cross_correlation, distance_of_distributions):
    for x, y in batches(4):
        losses.append(update(optimizer, loss(model(x), y)))
report(losses, model)
