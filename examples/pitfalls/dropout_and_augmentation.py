"""Random numbers by rank: with one seed all ranks draw the same, with a seed a rank results know the ranks.

The mistake: `torch.manual_seed(seed)` gives the samples of all ranks the same dropout masks and the same augmentation,
and `torch.manual_seed(seed + rank)` gives them others on another number of ranks.
The rule: dropout is drawn by (seed, step, shard), augmentation by (seed, epoch, sample).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import samestep

SAMPLES, WIDTH = 16, 32
Rows = list[list[float]]


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Rows of ones with noise from torch's generator, as augmentation is drawn; the target is the index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(WIDTH) + torch.rand(()), index


class Recorder:
    """Keeps the rows that came out of the model, so masks and noise of each sample, in the place of a loss."""

    def __init__(self) -> None:
        self._rows = torch.zeros(SAMPLES, WIDTH)

    def __call__(self, outputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        self._rows[indices] = outputs.detach()
        return outputs.mean()

    def rows(self) -> Rows:
        """One row a sample, from all ranks."""
        dist.all_reduce(self._rows)
        return self._rows.tolist()


def dropout() -> nn.Module:
    """Dropout, and a weight of 1 after it: there is no step without one."""
    return nn.Sequential(nn.Dropout(0.5), nn.PReLU(init=1.0))


def usual_way(world: samestep.World, seed: int) -> Rows:
    """One batch by DistributedSampler and DataLoader after `torch.manual_seed`."""
    torch.manual_seed(seed)
    model, record, data = dropout(), Recorder(), Noisy()
    for inputs, indices in DataLoader(data, SAMPLES // world.size, sampler=DistributedSampler(data, shuffle=False)):
        record(model(inputs), indices)
    return record.rows()


def samestep_way(world: samestep.World) -> Rows:
    """One step over the same batch."""
    model, record = dropout(), Recorder()
    engine = samestep.Engine(model, torch.optim.SGD(model.parameters()), record, world=world)
    for batch in samestep.loader(Noisy(), batch_size=SAMPLES, shards=4, world=world):
        engine.step(batch)
    return record.rows()


def on_ranks() -> dict[str, Rows]:
    """All ways in the same ranks."""
    with samestep.start(device="cpu") as world:
        return {
            "one seed": usual_way(world, 0),
            "seed + rank": usual_way(world, world.rank),
            "samestep": samestep_way(world),
        }


def counts(rows: Rows, alone: Rows) -> tuple[int, int, int]:
    """Different dropout masks, different augmentations, and samples that have both as on one process."""
    masks = {tuple(value > 0 for value in row) for row in rows}
    noises = {max(row) for row in rows}
    return len(masks), len(noises), sum(row == same for row, same in zip(rows, alone, strict=True))


def main() -> dict[str, tuple[int, int, int]]:
    """Print these counts of each way, and return them."""
    alone, together = (samestep.launch(on_ranks, processes=size) for size in (1, 4))
    found = {"samestep on 1": counts(alone["samestep"], alone["samestep"])}
    found |= {f"{name} on 4": counts(rows, alone[name]) for name, rows in together.items()}
    for name, (masks, noises, same) in found.items():
        print(f"{name:16}  {SAMPLES} samples: {masks:2} masks, {noises:2} augmentations, {same:2} as on one process")
    return found


if __name__ == "__main__":
    main()
