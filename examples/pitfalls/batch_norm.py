"""Batch norm under DDP normalizes by the local batch of a rank, so more ranks are another model.

Mistake: to assume that four ranks with a quarter of the batch compute the same as one process with the whole batch.
Rule: batch norm uses the statistics of the whole batch on any number of processes, as torch's SyncBatchNorm, which
refuses CPUs.
"""

import math
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import samestep
from samestep.distributed.world import World


class Result(NamedTuple):
    """Gradient and running variance after one step."""

    gradient: list[float]
    variance: list[float]


def model_and_data() -> tuple[nn.Sequential, TensorDataset]:
    """Return a small network with batch norm, and one batch of 32 samples."""
    torch.manual_seed(0)
    inputs = torch.randn(32, 8, dtype=torch.float64)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    ).double()
    return model, TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def result_of(model: nn.Sequential) -> Result:
    gradients = [
        parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None
    ]
    return Result(torch.cat(gradients).tolist(), model[1].running_var.tolist())


def one_process() -> Result:
    """Plain torch on the whole batch."""
    model, data = model_and_data()
    inputs, targets = data.tensors
    functional.cross_entropy(model(inputs), targets).backward()
    return result_of(model)


def usual_way(world: World) -> Result:
    """DDP with a quarter of the batch per rank; a checkpoint would contain the statistics of rank 0."""
    model, data = model_and_data()
    inputs, targets = (tensor.chunk(world.size)[world.rank] for tensor in data.tensors)
    wrapped = DistributedDataParallel(model)
    functional.cross_entropy(wrapped(inputs), targets).backward()
    return result_of(model)


def samestep_way() -> Result:
    """The loop of one device. The first call of a kind is computed whole; the second is divided."""
    model, data = model_and_data()
    model = samestep.parallel(model, strict=True)
    inputs, targets = data.tensors
    model(inputs)
    model[1].reset_running_stats()
    functional.cross_entropy(model(inputs), targets).backward()
    return result_of(model)


def on_ranks(address: str) -> tuple[Result, Result]:
    """Return both results, computed in the same ranks; the usual way has a process group of its own."""
    world = samestep.init(device="cpu")
    ours = samestep_way()
    dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
    return usual_way(world), ours


def main() -> dict[str, tuple[float, float]]:
    """Print and return the relative errors of each method."""
    whole = one_process()
    norms = [math.hypot(*values) for values in whole]
    print(f"one process    norms: gradient {norms[0]:.6f}, running variance {norms[1]:.6f}")
    with TemporaryDirectory() as folder:
        results = samestep.launch(on_ranks, f"file://{folder}/group", processes=4)
    distances = {}
    for name, result in zip(("DDP on 4", "samestep on 4"), results, strict=True):
        gradient, variance = (
            math.dist(*pair) / norm for *pair, norm in zip(result, whole, norms, strict=True)
        )
        distances[name] = gradient, variance
        print(
            f"{name:13}  relative error: gradient {gradient:.2g}, running variance {variance:.2g}"
        )
    return distances


if __name__ == "__main__":
    main()
