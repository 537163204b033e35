"""A learning rate multiplied by the number of ranks makes the result a function of the machine.

Mistake: `lr * world_size` with a fixed batch per device. More devices take fewer steps with larger batches and rates.
Rule: batch size and learning rate belong to the global batch. Devices only divide the work of a step.
"""

import hashlib

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep

PROCESSES = (1, 2, 4)
Result = tuple[int, float, str]  # steps, loss over all data, SHA-256 of the weights


def model_and_data() -> tuple[nn.Module, TensorDataset]:
    """Return a small classifier and 512 samples."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 20)
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)), TensorDataset(inputs, inputs[:, :5].argmax(1))


def result_of(model: nn.Module, data: TensorDataset, steps: int) -> Result:
    inputs, classes = data.tensors
    with torch.no_grad():
        loss = float(functional.cross_entropy(model(inputs), classes))
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    return steps, loss, hashlib.sha256(weights).hexdigest()


def usual_way(world: samestep.World) -> Result:
    """Three epochs with batches of 16 per rank and the rate times the number of ranks."""
    model, data = model_and_data()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world.size, momentum=0.9)
    sampler = DistributedSampler(data, shuffle=True)
    steps = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, classes in DataLoader(data, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            functional.cross_entropy(wrapped(inputs), classes).backward()
            optimizer.step()
            steps += 1
    return result_of(model, data, steps)


def samestep_way(world: samestep.World) -> Result:
    """Three epochs with global batches of 64; scaled from 0.1 for 16, the rate is that of the usual way on 4."""
    model, data = model_and_data()
    lr = samestep.scaled_lr(0.1, 64, rule="linear", base_batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world)
    batches = samestep.loader(data, batch_size=64, microbatches=4, shuffle=True, world=world)
    for _ in range(3):
        for batch in batches:
            engine.step(batch)
    return result_of(model, data, engine.steps)


def on_ranks() -> tuple[Result, Result]:
    """Return both results, computed in the same ranks."""
    with samestep.start(device="cpu") as world:
        return usual_way(world), samestep_way(world)


def main() -> tuple[list[Result], list[Result]]:
    """Print and return the results of both methods on 1, 2 and 4 processes."""
    usual, ours = zip(*(samestep.launch(on_ranks, processes=size) for size in PROCESSES), strict=True)
    for name, results in (("lr x ranks", usual), ("samestep", ours)):
        for size, (steps, loss, weights) in zip(PROCESSES, results, strict=True):
            print(f"{name:10} on {size}  {steps} steps, loss {loss:.5f}, weights {weights[:12]}")
    return list(usual), list(ours)


if __name__ == "__main__":
    main()
