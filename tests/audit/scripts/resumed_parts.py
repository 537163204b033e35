"""A run that stops within an epoch, and a second run that resumes from its checkpoint."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts import dataset, end, is_main, replicated, sgd, sharded

FILE = "resumed.pt"
STOP = 3  # batches


def run(number: int, *, skips: bool = False) -> None:
    """Train up to a stop, or train the rest; the second run can skip the batches of the first one."""
    group = f"{os.environ['MASTER_PORT']}-{number}"
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{group}", world_size=size, rank=rank)
    torch.manual_seed(rank)
    net = replicated()
    optimizer, loader, begin = sgd(net), sharded(dataset()), 0
    if number:
        state = torch.load(FILE)
        net.module.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["batches"] if skips else 0
    for i, (inputs, targets) in enumerate(loader):
        if i < begin:
            continue
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 0 and i + 1 == STOP:
            break
    if number == 0 and is_main():
        state = {"net": net.module.state_dict(), "optimizer": optimizer.state_dict(), "batches": STOP}
        torch.save(state, f"{FILE}.new")
        os.replace(f"{FILE}.new", FILE)
    end()
