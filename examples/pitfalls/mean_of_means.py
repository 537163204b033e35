"""DDP averages gradients over ranks: a mean of means if ranks have different numbers of tokens.

Mistake: each rank's loss is the mean over its local tokens, so tokens on a rank with few tokens have more weight.
Rule: the loss is that of the whole batch, outside of the model; only the calls of the model are divided.
"""

import math
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep

LETTERS, LONGEST, PADDING = 12, 24, -100


def model_and_data() -> tuple[nn.Module, TensorDataset]:
    """Return a model that predicts the next letter, and 32 padded lines of different length."""
    torch.manual_seed(0)
    lines = torch.randint(LETTERS, (32, LONGEST + 1))
    lengths = torch.randint(2, LONGEST + 1, (32, 1))
    targets = lines[:, 1:].where(torch.arange(LONGEST) < lengths, PADDING)
    model = nn.Sequential(nn.Embedding(LETTERS, 16), nn.Linear(16, LETTERS)).double()
    return model, TensorDataset(lines[:, :-1], targets)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens."""
    return functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PADDING)


def gradient_of(model: nn.Module) -> list[float]:
    """Return the gradient of all parameters as one list."""
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    ).tolist()


def one_process() -> list[float]:
    """Plain torch on the whole batch."""
    model, data = model_and_data()
    inputs, targets = data.tensors
    mean_loss(model(inputs), targets).backward()
    return gradient_of(model)


def usual_way() -> list[float]:
    """DDP with a quarter of the batch per rank."""
    model, data = model_and_data()
    wrapped = DistributedDataParallel(model)
    sampler = DistributedSampler(data, shuffle=False)
    for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
        mean_loss(wrapped(inputs), targets).backward()
    return gradient_of(model)


def samestep_way() -> list[float]:
    """The loop of one device. The first call of a kind is computed whole; the second is divided."""
    model, data = model_and_data()
    model = samestep.parallel(model, strict=True)
    inputs, targets = data.tensors
    for _ in range(2):
        model.zero_grad()
        mean_loss(model(inputs), targets).backward()
    return gradient_of(model)


def on_ranks(address: str) -> tuple[list[float], list[float]]:
    """Return both results, computed in the same ranks; the usual way has a process group of its own."""
    world = samestep.init(device="cpu")
    ours = samestep_way()
    dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
    return usual_way(), ours


def main() -> tuple[float, float]:
    """Print the gradient norm of one process and the relative errors of the others; return the errors."""
    whole = one_process()
    with TemporaryDirectory() as folder:
        gradients = samestep.launch(on_ranks, f"file://{folder}/group", processes=4)
    usual, ours = (math.dist(gradient, whole) / math.hypot(*whole) for gradient in gradients)
    print(f"one process    norm of the gradient {math.hypot(*whole):.6f}")
    print(f"DDP on 4       relative error {usual:.2g}")
    print(f"samestep on 4  relative error {ours:.2g}")
    return usual, ours


if __name__ == "__main__":
    main()
