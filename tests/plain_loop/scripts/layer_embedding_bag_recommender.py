# expect: divided
# Recommender: bags of items with weights of samples, numbers, and the interaction of their vectors.
import torch
from common import report
from torch import nn


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(15, 6)
        self.items = nn.EmbeddingBag(30, 6, mode="sum", padding_idx=0)
        self.numbers = nn.Linear(4, 6)
        self.head = nn.Linear(9, 1)

    def forward(self, user, items, weights, numbers):
        x = torch.stack([self.user(user), self.items(items, per_sample_weights=weights), self.numbers(numbers)], 1)
        return self.head((x @ x.transpose(1, 2)).flatten(1)).squeeze(1)


model = Recommender()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
losses = []
for _ in range(8):
    click = model(torch.randint(0, 15, (11,)), torch.randint(0, 30, (11, 5)), torch.rand(11, 5), torch.randn(11, 4))
    loss = nn.functional.binary_cross_entropy_with_logits(click, torch.randint(0, 2, (11,)).double())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
