# expect: divided
# A GPT block by hand: causal scaled dot product attention with dropout, and the loss in the loop.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Gpt(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.embed, self.position = nn.Embedding(16, width), nn.Embedding(12, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        batch, length = tokens.shape
        x = self.embed(tokens) + self.position(torch.arange(length))
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.head(x + self.out(y.transpose(1, 2).reshape(batch, length, -1)))


model = Gpt()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    tokens = torch.randint(0, 16, (9, 9))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    losses.append(update(optimizer, loss))
report(losses, model)
