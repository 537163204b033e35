# expect: divided
# Vision transformer: class token, position table and windows have the size of the batch by coincidence.
import torch
from common import report, update
from torch import nn


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 2, stride=2)
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(10, 8))
        self.norm, self.attend = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, image):
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        y = self.norm(x)
        return self.head((x + self.attend(y, y, y)[0])[:, 0]), self.position @ self.position.T


model = Vit()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    logits, similar = model(torch.randn(10, 1, 6, 6))
    loss = nn.functional.cross_entropy(logits, torch.randint(0, 3, (10,))) + 0.01 * similar.pow(2).mean()
    losses.append(update(optimizer, loss))
report(losses, model)
