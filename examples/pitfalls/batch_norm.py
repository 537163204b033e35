"""Batch norm under DDP normalises by the part of the batch that a rank has, so more ranks are another model.

The mistake: to take for granted that four ranks with a quarter of the batch compute what one computes of the whole.
The rule: the group that batch norm averages over is said, and no number of processes changes it. `sync` is the whole
global batch (torch's SyncBatchNorm means the same and refuses CPUs); `shard` is a fixed slice of it, so four shards on
any number of processes are what four GPUs compute without SyncBatchNorm.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import samestep


class Found(NamedTuple):
    """What one step leaves behind."""

    gradient: list[float]
    variance: list[float]


def model_and_data() -> tuple[nn.Sequential, TensorDataset]:
    """A small net with batch norm in its middle, and one batch of 32 samples."""
    torch.manual_seed(0)
    inputs = torch.randn(32, 8, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double()
    return model, TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def found_in(model: nn.Sequential) -> Found:
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return Found(torch.cat(gradients).tolist(), model[1].running_var.tolist())


def one_process() -> Found:
    """Plain torch, the whole batch at once."""
    model, data = model_and_data()
    inputs, targets = data.tensors
    functional.cross_entropy(model(inputs), targets).backward()
    return found_in(model)


def usual_way(world: samestep.World) -> Found:
    """A quarter of the batch each, and DDP; the statistics that a checkpoint would hold are rank 0's."""
    model, data = model_and_data()
    inputs, targets = (tensor.chunk(world.size)[world.rank] for tensor in data.tensors)
    wrapped = DistributedDataParallel(model)
    functional.cross_entropy(wrapped(inputs), targets).backward()
    return found_in(model)


def samestep_way(world: samestep.World, batch_norm: str) -> Found:
    """The same batch in four shards."""
    model, data = model_and_data()
    rules = samestep.StepRules(batch_norm=batch_norm)
    optimizer = torch.optim.SGD(model.parameters())
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world, rules=rules)
    for batch in samestep.loader(data, batch_size=32, shards=4, world=world):
        engine.step(batch)
    return found_in(model)


def on_ranks() -> dict[str, Found]:
    """All ways in the same ranks."""
    with samestep.start(device="cpu") as world:
        found = {"DDP": usual_way(world)}
        return found | {f"samestep {kind}": samestep_way(world, kind) for kind in ("sync", "shard")}


def main() -> dict[str, tuple[float, float]]:
    """Print how far each way is from the whole batch, and return it."""
    whole = one_process()
    norms = [math.hypot(*values) for values in whole]
    print(f"{'one process':19}  norms: gradient {norms[0]:.6f}, running variance {norms[1]:.6f}")
    found = {f"{name} on 4": way for name, way in samestep.launch(on_ranks, processes=4).items()}
    found["samestep shard on 1"] = samestep.launch(on_ranks, processes=1)["samestep shard"]
    distances = {}
    for name, way in found.items():
        gradient, variance = (math.dist(*pair) / norm for *pair, norm in zip(way, whole, norms, strict=True))
        distances[name] = gradient, variance
        print(f"{name:19}  relative error: gradient {gradient:.2g}, running variance {variance:.2g}")
    return distances


if __name__ == "__main__":
    main()
