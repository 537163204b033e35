# expect: divided
# Encoder and decoder with a causal mask of the length of the batch: a square argument without rows.
import torch
from common import report
from torch import nn

model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for length in (9, 9, 7, 9, 11, 9, 9):
    source, target = torch.randn(9, 5, 8), torch.randn(9, length, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    loss = (model(source, target, tgt_mask=mask, tgt_is_causal=True) - target).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
