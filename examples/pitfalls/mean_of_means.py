"""DDP averages gradients over ranks, which is a mean of means where ranks count different numbers of tokens.

The mistake: each rank's loss is the mean over its own tokens, so a token on a rank with few of them weighs more.
The rule: a loss is a sum and a count. Sums are added, counts are added, and the one is divided by the other once.
"""

import math

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep

LETTERS, LONGEST, PADDING = 12, 24, -100


def model_and_data() -> tuple[nn.Module, TensorDataset]:
    """A model that guesses the next letter, and 32 lines of different length, padded to the longest."""
    torch.manual_seed(0)
    lines = torch.randint(LETTERS, (32, LONGEST + 1))
    lengths = torch.randint(2, LONGEST + 1, (32, 1))
    targets = lines[:, 1:].where(torch.arange(LONGEST) < lengths, PADDING)
    model = nn.Sequential(nn.Embedding(LETTERS, 16), nn.Linear(16, LETTERS)).double()
    return model, TensorDataset(lines[:, :-1], targets)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens that one rank has."""
    return functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PADDING)


def sum_and_count(logits: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
    """The same as a sum and a count."""
    return samestep.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PADDING)


def gradient_of(model: nn.Module) -> list[float]:
    """The gradient of all parameters in one row."""
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    ).tolist()


def one_process() -> list[float]:
    """Plain torch, the whole batch at once."""
    model, data = model_and_data()
    inputs, targets = data.tensors
    mean_loss(model(inputs), targets).backward()
    return gradient_of(model)


def usual_way() -> list[float]:
    """A quarter of the batch each, and DDP."""
    model, data = model_and_data()
    wrapped = DistributedDataParallel(model)
    sampler = DistributedSampler(data, shuffle=False)
    for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
        mean_loss(wrapped(inputs), targets).backward()
    return gradient_of(model)


def samestep_way(world: samestep.World) -> list[float]:
    """The same batch in shards."""
    model, data = model_and_data()
    engine = samestep.Engine(model, torch.optim.SGD(model.parameters()), sum_and_count, world=world)
    for batch in samestep.loader(data, batch_size=32, shards=8, world=world):
        engine.step(batch)
    return gradient_of(model)


def on_ranks() -> tuple[list[float], list[float]]:
    """Both ways in the same ranks."""
    with samestep.start(device="cpu") as world:
        return usual_way(), samestep_way(world)


def main() -> tuple[float, float]:
    """Print the gradient of one process and how far the others are from it; return these distances."""
    whole = one_process()
    usual, ours = (
        math.dist(gradient, whole) / math.hypot(*whole) for gradient in samestep.launch(on_ranks, processes=4)
    )
    print(f"one process    norm of the gradient {math.hypot(*whole):.6f}")
    print(f"DDP on 4       relative error {usual:.2g}")
    print(f"samestep on 4  relative error {ours:.2g}")
    return usual, ours


if __name__ == "__main__":
    main()
