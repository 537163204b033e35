# expect: divided
# Attention with dropout inside of the fused function, and dropout after each part.
import torch
import torch.nn.functional as F
from common import report
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.rate = dropout
        self.dropout = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def attend(self, x):
        rows, length, width = x.shape
        parts = self.attention(x).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        rate = self.rate if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.dropout(self.projection(out.transpose(1, 2).reshape(rows, length, width)))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=20, block_size=12, width=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(Block(width, 2, 0.1), Block(width, 2, 0.1))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(x))


model = GPT()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(8):
    tokens = torch.randint(0, 20, (8, 13)).cumsum(1) % 20
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model.eval()
tokens = torch.zeros(6, 1, dtype=torch.long)
with torch.no_grad():
    for position in range(11):
        logits = model(tokens)[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(1), 1)], 1)
report([*losses, *tokens.sum(1).tolist()], model)
