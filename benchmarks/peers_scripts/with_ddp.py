"""Usage: `torchrun --standalone --nproc-per-node N with_ddp.py OUTPUT`.

Training as in PyTorch's DDP tutorial. Evaluation uses `DistributedSampler`, and for comparison the scheme of PyTorch's
ImageNet example: `drop_last=True`, then each process evaluates the remaining samples.
"""

from pathlib import Path

import digits_task as task
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


def count_correct(model: nn.Module, batches: DataLoader) -> torch.Tensor:
    """Return the number of correct predictions and of samples."""
    counts = torch.zeros(2, dtype=torch.int64)
    for inputs, targets in batches:
        correct = (model(inputs).argmax(dim=1) == targets).sum()
        counts += torch.stack([correct, torch.tensor(len(targets))])
    return counts


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, batch_size: int, *, with_remainder: bool) -> list[int]:
    """Return the number of correct predictions and of samples over all processes."""
    model.eval()
    sampler = DistributedSampler(dataset, shuffle=False, drop_last=with_remainder)
    counts = count_correct(model, DataLoader(dataset, batch_size=batch_size, sampler=sampler))
    dist.all_reduce(counts)
    divided = len(sampler) * dist.get_world_size()
    if with_remainder and divided < len(dataset):
        remainder = Subset(dataset, range(divided, len(dataset)))
        counts += count_correct(model, DataLoader(remainder, batch_size=batch_size))
    return counts.tolist()


def train(output: Path, dropout: float) -> None:
    torch.manual_seed(task.SEED)
    training, held_out = task.build_datasets()
    batch_size = task.BATCH_SIZE // dist.get_world_size()
    model = DistributedDataParallel(task.build_model(dropout))
    optimizer = task.build_optimizer(model)
    sampler = DistributedSampler(training)
    batches = DataLoader(training, batch_size=batch_size, sampler=sampler)
    steps = 0
    for epoch in range(task.EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            steps += 1

    correct, samples = evaluate(model.module, held_out, batch_size, with_remainder=False)
    _, samples_imagenet = evaluate(model.module, held_out, batch_size, with_remainder=True)
    if dist.get_rank() == 0:
        task.report(
            output,
            model.module,
            processes=dist.get_world_size(),
            steps=steps,
            samples=samples,
            accuracy=correct / samples,
            samples_imagenet=samples_imagenet,
        )


if __name__ == "__main__":
    options = task.parse()
    dist.init_process_group("gloo")
    for dropout in options.dropout:
        train(options.output, dropout)
    dist.destroy_process_group()
