"""Random numbers per rank: one seed gives all ranks the same numbers; one seed per rank makes results depend on ranks.

Mistake: `torch.manual_seed(seed)` gives the samples of all ranks the same dropout masks and the same augmentation, and
`torch.manual_seed(seed + rank)` gives them different ones on another number of ranks.
Rule: dropout is that of the whole batch, of which each rank keeps its rows; augmentation is a function of (seed, epoch,
sample).
"""

from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import samestep
from samestep.distributed.world import World

SAMPLES, WIDTH = 16, 32
Rows = list[list[float]]


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Rows of ones plus noise from torch's generator, like augmentation; the target is the index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(WIDTH) + torch.rand(()), index


def record(rows: torch.Tensor, outputs: torch.Tensor, indices: torch.Tensor) -> None:
    """Record the outputs of the model: mask and noise of each sample."""
    rows[indices] = outputs.detach()


def dropout() -> nn.Module:
    """Return dropout followed by a weight of 1; a step needs a parameter."""
    return nn.Sequential(nn.Dropout(0.5), nn.PReLU(init=1.0))


def usual_way(world: World, seed: int) -> Rows:
    """One batch of DistributedSampler and DataLoader after `torch.manual_seed`."""
    torch.manual_seed(seed)
    model, data, rows = dropout(), Noisy(), torch.zeros(SAMPLES, WIDTH)
    for inputs, indices in DataLoader(
        data, SAMPLES // world.size, sampler=DistributedSampler(data, shuffle=False)
    ):
        record(rows, model(inputs), indices)
    dist.all_reduce(rows)
    return rows.tolist()


def samestep_way() -> Rows:
    """Two epochs of the loop of one device: the first call of a kind is computed whole, the second is divided."""
    torch.manual_seed(0)
    model, rows = samestep.parallel(dropout(), strict=True), torch.zeros(SAMPLES, WIDTH)
    batches = samestep.loader(Noisy(), batch_size=SAMPLES)
    for _ in range(2):
        for inputs, indices in batches:
            record(rows, model(inputs), indices)
    return rows.tolist()


def on_ranks(address: str) -> dict[str, Rows]:
    """Return all results, computed in the same ranks; the usual way has a process group of its own."""
    world = samestep.init(device="cpu")
    ours = samestep_way()
    dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
    return {
        "one seed": usual_way(world, 0),
        "seed + rank": usual_way(world, world.rank),
        "samestep": ours,
    }


def counts(rows: Rows, alone: Rows) -> tuple[int, int, int]:
    """Return the numbers of masks, of augmentations, and of samples equal to those on one process."""
    masks = {tuple(value > 0 for value in row) for row in rows}
    noises = {max(row) for row in rows}
    return len(masks), len(noises), sum(row == same for row, same in zip(rows, alone, strict=True))


def main() -> dict[str, tuple[int, int, int]]:
    """Print and return the counts of each method."""
    with TemporaryDirectory() as folder:
        alone, together = (
            samestep.launch(on_ranks, f"file://{folder}/{size}", processes=size) for size in (1, 4)
        )
    result = {"samestep on 1": counts(alone["samestep"], alone["samestep"])}
    result |= {f"{name} on 4": counts(rows, alone[name]) for name, rows in together.items()}
    for name, (masks, noises, same) in result.items():
        print(
            f"{name:16}  {SAMPLES} samples: {masks:2} masks, {noises:2} augmentations, {same:2} as on one process"
        )
    return result


if __name__ == "__main__":
    main()
