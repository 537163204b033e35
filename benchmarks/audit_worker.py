"""Training script of `audit.py`: each line of standard input is a number of steps, answered with its times.

A plain DDP loop of one process with loader, dropout, cross entropy, AdamW and a schedule. The script does not import
Samestep; with the variable SAMESTEP_AUDIT, it is observed.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LAYERS, WIDTH, LENGTH, VOCABULARY, SAMPLES = 8, 128, 32, 512, 10_000


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    net = DistributedDataParallel(Model())
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    loader = DataLoader(TensorDataset(tokens), int(sys.argv[2]), sampler=DistributedSampler(tokens))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)
    batches = iter(loader)
    for line in sys.stdin:
        began, began_wall = time.process_time(), time.perf_counter()
        for _ in range(int(line)):
            (inputs,) = next(batches)
            optimizer.zero_grad()
            F.cross_entropy(net(inputs).flatten(0, 1), inputs.flatten()).backward()
            optimizer.step()
            schedule.step()
        print(time.process_time() - began, time.perf_counter() - began_wall, flush=True)
    sys.stdout.flush()
    os._exit(0)  # without the events at the end of the process


if __name__ == "__main__":
    main()
