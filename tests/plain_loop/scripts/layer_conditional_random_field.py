# expect: divided
# Tagging with a conditional random field: a recursion over positions with a mask, and the best path.
import torch
from common import report
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True, bidirectional=True)
        self.out = nn.Linear(12, 4)
        self.steps = nn.Parameter(torch.randn(4, 4))

    def forward(self, x, tags, mask):
        scores = self.out(self.lstm(x)[0])
        alpha = scores[:, 0]
        path = scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for at in range(1, x.shape[1]):
            following = torch.logsumexp(alpha[:, :, None] + self.steps, 1) + scores[:, at]
            alpha = torch.where(mask[:, at, None], following, alpha)
            step = self.steps[tags[:, at - 1], tags[:, at]]
            path = path + mask[:, at] * (step + scores[:, at].gather(1, tags[:, at : at + 1]).squeeze(1))
        return (torch.logsumexp(alpha, 1) - path).mean()


model = Tagger()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
losses = []
for _ in range(8):
    x = torch.randn(9, 6, 5)
    mask = torch.arange(6) < torch.randint(2, 7, (9, 1))
    loss = model(x, (x[:, :, 0] > 0).long() + 2 * (x[:, :, 1] > 0).long(), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
