"""DistributedSampler repeats the order of the first epoch without `set_epoch`.

Mistake: `sampler.set_epoch(epoch)` is missing, so every epoch has the order of the first, without a warning.
Rule: the order is a function of (seed, epoch), and the loader counts epochs.
"""

from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset

import samestep

EPOCHS = 3
Orders = list[list[int]]  # first samples of each epoch

DATA = TensorDataset(torch.arange(100), torch.zeros(100))


def usual_way() -> Orders:
    """Return the first sample of each rank in three epochs."""
    sampler = DistributedSampler(DATA, shuffle=True, seed=0)
    orders = []
    for _ in range(EPOCHS):
        first = torch.tensor(next(iter(sampler)))
        gathered = [torch.zeros_like(first) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, first)
        orders.append([int(index) for index in gathered])
    return orders


def samestep_way() -> Orders:
    """Return the first samples of the first batch in three epochs."""
    batches = samestep.loader(DATA, batch_size=20, shuffle=True)
    orders = []
    for _ in range(EPOCHS):
        samples, _ = next(iter(batches))
        orders.append([int(sample) for sample in samples[:4]])
    return orders


def on_ranks(address: str) -> tuple[Orders, Orders]:
    """Return both results, computed in the same ranks; the usual way has a process group of its own."""
    world = samestep.init(device="cpu")
    ours = samestep_way()
    dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
    return usual_way(), ours


def main() -> tuple[Orders, Orders, Orders]:
    """Print and return the first samples of three epochs."""
    with TemporaryDirectory() as folder:
        _, alone = samestep.launch(on_ranks, f"file://{folder}/one", processes=1)
        usual, ours = samestep.launch(on_ranks, f"file://{folder}/four", processes=4)
    names = ("samestep on 1", "no set_epoch, on 4", "samestep on 4")
    for name, orders in zip(names, (alone, usual, ours), strict=True):
        shown = "   ".join(" ".join(f"{index:2}" for index in order) for order in orders)
        print(f"{name:18}  epochs 0, 1, 2 begin with {shown}")
    return alone, usual, ours


if __name__ == "__main__":
    main()
