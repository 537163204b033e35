"""Random numbers per rank: one seed gives all ranks the same numbers; one seed per rank makes results depend on ranks.

Mistake: `torch.manual_seed(seed)` gives the samples of all ranks the same dropout masks and the same augmentation, and
`torch.manual_seed(seed + rank)` gives them different ones on another number of ranks.
Rule: dropout is a function of (seed, step, microbatch), augmentation of (seed, epoch, sample).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import samestep

SAMPLES, WIDTH = 16, 32
Rows = list[list[float]]


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Rows of ones plus noise from torch's generator, like augmentation; the target is the index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(WIDTH) + torch.rand(()), index


class Recorder:
    """Loss that records the outputs of the model: mask and noise of each sample."""

    def __init__(self) -> None:
        self._rows = torch.zeros(SAMPLES, WIDTH)

    def __call__(self, outputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        self._rows[indices] = outputs.detach()
        return outputs.mean()

    def rows(self) -> Rows:
        """Return one row per sample, from all ranks."""
        dist.all_reduce(self._rows)
        return self._rows.tolist()


def dropout() -> nn.Module:
    """Return dropout followed by a weight of 1; a step needs a parameter."""
    return nn.Sequential(nn.Dropout(0.5), nn.PReLU(init=1.0))


def usual_way(world: samestep.World, seed: int) -> Rows:
    """One batch of DistributedSampler and DataLoader after `torch.manual_seed`."""
    torch.manual_seed(seed)
    model, record, data = dropout(), Recorder(), Noisy()
    for inputs, indices in DataLoader(data, SAMPLES // world.size, sampler=DistributedSampler(data, shuffle=False)):
        record(model(inputs), indices)
    return record.rows()


def samestep_way(world: samestep.World) -> Rows:
    """One step on the same batch."""
    model, record = dropout(), Recorder()
    engine = samestep.Engine(model, torch.optim.SGD(model.parameters()), record, world=world)
    for batch in samestep.loader(Noisy(), batch_size=SAMPLES, microbatches=4, world=world):
        engine.step(batch)
    return record.rows()


def on_ranks() -> dict[str, Rows]:
    """Return all results, computed in the same ranks."""
    with samestep.start(device="cpu") as world:
        return {
            "one seed": usual_way(world, 0),
            "seed + rank": usual_way(world, world.rank),
            "samestep": samestep_way(world),
        }


def counts(rows: Rows, alone: Rows) -> tuple[int, int, int]:
    """Return the numbers of masks, of augmentations, and of samples equal to those on one process."""
    masks = {tuple(value > 0 for value in row) for row in rows}
    noises = {max(row) for row in rows}
    return len(masks), len(noises), sum(row == same for row, same in zip(rows, alone, strict=True))


def main() -> dict[str, tuple[int, int, int]]:
    """Print and return the counts of each method."""
    alone, together = (samestep.launch(on_ranks, processes=size) for size in (1, 4))
    result = {"samestep on 1": counts(alone["samestep"], alone["samestep"])}
    result |= {f"{name} on 4": counts(rows, alone[name]) for name, rows in together.items()}
    for name, (masks, noises, same) in result.items():
        print(f"{name:16}  {SAMPLES} samples: {masks:2} masks, {noises:2} augmentations, {same:2} as on one process")
    return result


if __name__ == "__main__":
    main()
