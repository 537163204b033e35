"""Batch norm under DDP normalizes by the local batch of a rank, so more ranks are another model.

Mistake: to assume that four ranks with a quarter of the batch compute the same as one process with the whole batch.
Rule: the group of batch norm is a setting that does not depend on the number of processes. `sync` is the whole global
batch (as torch's SyncBatchNorm, which refuses CPUs); `microbatch` is a fixed slice of the global batch, so four
microbatches on any number of processes compute the same as four GPUs without SyncBatchNorm.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import samestep


class Result(NamedTuple):
    """Gradient and running variance after one step."""

    gradient: list[float]
    variance: list[float]


def model_and_data() -> tuple[nn.Sequential, TensorDataset]:
    """Return a small network with batch norm, and one batch of 32 samples."""
    torch.manual_seed(0)
    inputs = torch.randn(32, 8, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double()
    return model, TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def result_of(model: nn.Sequential) -> Result:
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return Result(torch.cat(gradients).tolist(), model[1].running_var.tolist())


def one_process() -> Result:
    """Plain torch on the whole batch."""
    model, data = model_and_data()
    inputs, targets = data.tensors
    functional.cross_entropy(model(inputs), targets).backward()
    return result_of(model)


def usual_way(world: samestep.World) -> Result:
    """DDP with a quarter of the batch per rank; a checkpoint would contain the statistics of rank 0."""
    model, data = model_and_data()
    inputs, targets = (tensor.chunk(world.size)[world.rank] for tensor in data.tensors)
    wrapped = DistributedDataParallel(model)
    functional.cross_entropy(wrapped(inputs), targets).backward()
    return result_of(model)


def samestep_way(world: samestep.World, batch_norm: str) -> Result:
    """Samestep on the same batch in four microbatches."""
    model, data = model_and_data()
    config = samestep.StepConfig(batch_norm=batch_norm)
    optimizer = torch.optim.SGD(model.parameters())
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world, config=config)
    for batch in samestep.loader(data, batch_size=32, microbatches=4, world=world):
        engine.step(batch)
    return result_of(model)


def on_ranks() -> dict[str, Result]:
    """Return all results, computed in the same ranks."""
    with samestep.start(device="cpu") as world:
        return {"DDP": usual_way(world)} | {
            f"samestep {kind}": samestep_way(world, kind) for kind in ("sync", "microbatch")
        }


def main() -> dict[str, tuple[float, float]]:
    """Print and return the relative errors of each method."""
    whole = one_process()
    norms = [math.hypot(*values) for values in whole]
    print(f"{'one process':19}  norms: gradient {norms[0]:.6f}, running variance {norms[1]:.6f}")
    results = {f"{name} on 4": result for name, result in samestep.launch(on_ranks, processes=4).items()}
    results["samestep microbatch on 1"] = samestep.launch(on_ranks, processes=1)["samestep microbatch"]
    distances = {}
    for name, result in results.items():
        gradient, variance = (math.dist(*pair) / norm for *pair, norm in zip(result, whole, norms, strict=True))
        distances[name] = gradient, variance
        print(f"{name:19}  relative error: gradient {gradient:.2g}, running variance {variance:.2g}")
    return distances


if __name__ == "__main__":
    main()
