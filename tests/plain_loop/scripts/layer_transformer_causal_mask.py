# expect: divided
# Encoder and decoder with dropout, padding, and a causal mask of the length of the batch: a square without rows.
import torch
from common import report, update
from torch import nn

model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
padding = torch.zeros(9, 5, dtype=torch.bool)
padding[2:5, 3:] = True
losses = []
for length in (9, 9, 7, 9, 11, 9, 9):
    source, target = torch.randn(9, 5, 8), torch.randn(9, length, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    out = model(
        source,
        target,
        tgt_mask=mask,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
        tgt_is_causal=True,
    )
    losses.append(update(optimizer, (out - target).abs().mean()))
report(losses, model)
