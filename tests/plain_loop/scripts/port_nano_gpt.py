# expect: divided
# environment: hidden
# A small GPT as nanoGPT trains it: its own DDP branch, accumulation, clipping, schedule, estimated losses.
import math
import os

import torch
import torch.nn.functional as F
from common import report
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x):
        rows, length, width = x.shape
        parts = self.attention(x).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(out.transpose(1, 2).reshape(rows, length, width))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=20, block_size=12, width=16, heads=2, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, tokens, targets=None):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


ddp = int(os.environ.get("RANK", "-1")) != -1
if ddp:
    torch.distributed.init_process_group(backend="gloo")
data = torch.randint(0, 20, (500,)).cumsum(0) % 20
gradient_accumulation_steps = 2
batch_size = 6
block_size = 12


def get_batch():
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[start : start + block_size] for start in starts])
    y = torch.stack([data[start + 1 : start + 1 + block_size] for start in starts])
    return x, y


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = torch.zeros(3)
    for index in range(3):
        x, y = get_batch()
        _, loss = model(x, y)
        found[index] = loss.item()
    model.train()
    return found.mean()


def get_lr(step):
    if step < 3:
        return 1e-2 * (step + 1) / 4
    return 1e-3 + 0.5 * (1 + math.cos(math.pi * (step - 3) / 7)) * 9e-3


model = GPT()
# + model = samestep.parallel(model)
decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
)
scaler = torch.amp.GradScaler("cpu", enabled=False)
if ddp:
    model = nn.parallel.DistributedDataParallel(model)
losses = []
x, y = get_batch()
for step in range(8):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    if step % 4 == 0:
        losses.append(estimate_loss())
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(x, y)
        loss = loss / gradient_accumulation_steps
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
report(losses, model)
