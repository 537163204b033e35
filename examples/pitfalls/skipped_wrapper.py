"""DDP sums gradients only for calls of the wrapper: `model.module(...)` trains each replica alone.

Mistake: the training step calls the inner module, as code for checkpoints and evaluation does. There is no warning, and
rank 0 saves a model that has seen its own quarter of the data.
Rule: `samestep.parallel` returns the module itself, so there is no second way to call it.
"""

import math
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import samestep

STEPS, BATCH = 20, 32


def model_and_data() -> tuple[nn.Module, torch.Tensor]:
    """Return a linear model and the inputs of all steps."""
    torch.manual_seed(0)
    return nn.Linear(8, 3).double(), torch.randn(STEPS, BATCH, 8, dtype=torch.float64)


def train(model: nn.Module, called: nn.Module, batches: torch.Tensor) -> list[float]:
    """Train with calls of `called`, and return the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs in batches:
        loss = functional.cross_entropy(called(inputs), inputs[:, :3].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.weight.flatten().tolist()


def one_process() -> list[float]:
    """Plain torch on whole batches."""
    model, batches = model_and_data()
    return train(model, model, batches)


def usual_way(rank: int, folder: str) -> None:
    """Save the weights of all ranks: each has a quarter of every batch, and calls the inner module."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=4)
    model, batches = model_and_data()
    wrapped = DistributedDataParallel(model)
    weights = torch.tensor(
        train(model, wrapped.module, batches.chunk(4, dim=1)[rank]), dtype=torch.float64
    )
    replicas = [torch.zeros_like(weights) for _ in range(4)]
    dist.all_gather(replicas, weights)
    if rank == 0:
        torch.save(torch.stack(replicas), f"{folder}/replicas.pt")
    dist.destroy_process_group()


def samestep_way() -> list[float]:
    """The loop of one device."""
    samestep.init(device="cpu")
    model, batches = model_and_data()
    model = samestep.parallel(model, strict=True)
    return train(model, model, batches)


def main() -> tuple[float, float, float]:
    """Print and return relative distances: among replicas, of rank 0 and of Samestep to one process."""
    alone = one_process()
    ours = samestep.launch(samestep_way, processes=4)
    with TemporaryDirectory() as folder:  # ranks of Samestep would report the difference
        torch.multiprocessing.spawn(usual_way, args=(folder,), nprocs=4)
        replicas = torch.load(f"{folder}/replicas.pt").tolist()
    norm = math.hypot(*alone)
    among = max(math.dist(first, second) for first in replicas for second in replicas) / norm
    first, same = (math.dist(weights, alone) / norm for weights in (replicas[0], ours))
    print(f"one process       norm of the weights {norm:.6f}")
    print(f"model.module on 4 relative error {first:.2g}, between replicas {among:.2g}")
    print(f"samestep on 4     relative error {same:.2g}")
    return among, first, same


if __name__ == "__main__":
    main()
