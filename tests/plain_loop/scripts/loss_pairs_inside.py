# expect: divided
# Losses of pairs and triplets inside the model: cosine, ranking, triplet with a distance of its own.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))
        self.cosine = nn.CosineEmbeddingLoss(margin=0.2)
        self.ranking = nn.MarginRankingLoss(margin=0.1)
        self.triplet = nn.TripletMarginLoss(margin=0.5, swap=True)
        self.own = nn.TripletMarginWithDistanceLoss(distance_function=lambda a, b: 1 - F.cosine_similarity(a, b))

    def forward(self, a, b, c, sign):
        a, b, c = self.embed(a), self.embed(b), self.embed(c)
        return (
            self.cosine(a, b, sign)
            + self.ranking(a.norm(dim=1), b.norm(dim=1), sign)
            + self.triplet(a, b, c)
            + self.own(a, b, c)
        )


model = Pairs()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    a = torch.randn(11, 6)
    b = a + 0.1 * torch.randn(11, 6)
    c = torch.randn(11, 6)
    sign = torch.randint(0, 2, (11,)).double() * 2 - 1
    loss = model(a, b, c, sign)
    losses.append(update(optimizer, loss))
report(losses, model)
