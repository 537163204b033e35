"""Data sets, loaders and whole epochs of `plain_loop.py`, and DDP by hand with batch norm over ranks on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from samestep.config import RunOptions
from samestep.recipes.bad_samples import complete_epoch
from samestep.recipes.builder import build, start_world
from samestep.recipes.recipe_files import load_recipe
from samestep.zoo.digits import DigitsNet, load_digits

IMAGES_VARIABLE = "PLAIN_LOOP_IMAGES"  # folder of the JPEG files, for all processes of the benchmark
IMAGES = 512
VECTORS = 8192
DIGITS_BATCH = 64
_WORLD = ExitStack()  # of a recipe, until the process ends


def write_images(folder: Path) -> None:
    """Write JPEG files of noise in two classes, and their folder to the environment."""
    random = numpy.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / ("even", "odd")[number % 2] / f"{number:04}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=numpy.uint8))
        coarse.resize((192, 192), Image.Resampling.BICUBIC).save(path, quality=90)
    os.environ[IMAGES_VARIABLE] = str(folder)


def image_folder() -> Any:
    """Return the data set of the JPEG files, with the transforms of a tutorial."""
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(64),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    return datasets.ImageFolder(os.environ[IMAGES_VARIABLE], transform)


def vector_dataset() -> Any:
    """Return vectors and classes in memory."""
    return TensorDataset(torch.randn(VECTORS, 64), torch.randint(10, (VECTORS,)))


def text_dataset() -> Any:
    """Return texts of 64 characters in memory, each with the characters that follow."""
    texts = torch.randint(256, (VECTORS, 65))
    return TensorDataset(texts[:, :-1], texts[:, 1:])


def mask_dataset() -> Any:
    """Return images in memory with a class of each pixel."""
    return TensorDataset(torch.randn(IMAGES, 3, 32, 32), torch.randint(2, (IMAGES, 32, 32)))


def torch_loader(dataset: Any, batch_size: int, workers: int, rank: int, size: int) -> DataLoader[Any]:
    """Return the loader of a script, or that of one rank of DDP by hand."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if workers:
        options["multiprocessing_context"] = "fork"  # children of the rank, which end with it
    if size == 1:
        return DataLoader(dataset, batch_size, shuffle=True, **options)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, size, rank)
    return DataLoader(dataset, batch_size // size, sampler=sampler, **options)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of one epoch after another."""
    epoch = 0
    while True:
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


class _BatchNormOverRanks(torch.autograd.Function):
    """Batch norm as torch's `SyncBatchNorm`, which has no CPU version: one message forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, layer: SyncBatchNorm
    ) -> torch.Tensor:
        own = inputs.numel() // inputs.shape[1]
        mean, variance = torch.batch_norm_update_stats(inputs, None, None, 0.0)
        message = torch.cat([mean, variance + mean.square(), mean.new_ones(1)]).mul_(own)
        dist.all_reduce(message)
        count = message[-1].item()
        mean, squares = message[:-1].div_(count).chunk(2)
        variance = squares - mean.square()
        layer.running_mean.lerp_(mean, layer.momentum)
        layer.running_var.lerp_(variance * (count / (count - 1)), layer.momentum)
        ctx.save_for_backward(inputs, weight, mean, variance)
        ctx.count = count
        ctx.eps = layer.eps
        return functional.batch_norm(inputs, mean, variance, weight, bias, False, 0.0, layer.eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, mean, variance = ctx.saved_tensors
        (slope,) = gradients
        _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            slope, inputs, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        message = torch.cat([by_weight, by_bias])
        dist.all_reduce(message)
        scale = torch.rsqrt(variance + ctx.eps).mul_(weight)
        dot, shift = message.div_(-ctx.count).view(2, -1).mul_(scale)
        by_inputs = functional.batch_norm(inputs, mean, variance, dot, shift, False, 0.0, ctx.eps)
        by_inputs.addcmul_(slope, scale.view(1, -1, 1, 1))
        return by_inputs, by_weight, by_bias, None


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm with the statistics of all ranks in training."""

    running_mean: torch.Tensor
    running_var: torch.Tensor
    momentum: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized inputs."""
        if not self.training:
            return super().forward(input)
        self.num_batches_tracked.add_(1)  # type: ignore[operator]  # a tensor
        outputs: torch.Tensor = _BatchNormOverRanks.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self
        )
        return outputs


def use_statistics_of_all_ranks(module: nn.Module) -> None:
    """Change the batch norm of a model as `convert_sync_batchnorm` does."""
    for part in module.modules():
        if type(part) is nn.BatchNorm2d:
            part.__class__ = SyncBatchNorm


def recipe_epochs() -> tuple[nn.Module, Callable[[], None]]:
    """Return the model of the recipe `digits`, and a function that trains and evaluates an epoch as recipes do.

    Without logs and checkpoints.
    """
    recipe = load_recipe("digits", ["epochs=1000"])
    options = RunOptions()
    world = _WORLD.enter_context(start_world(recipe, options))
    built = build(recipe, options, world)
    torch.set_num_threads(1)

    def epoch() -> None:
        for batch in built.train:
            built.driver.step(batch)
        built.driver.evaluate(complete_epoch(built.evaluation), built.metrics)

    return built.driver.model, epoch


def hand_written_epochs(rank: int, size: int) -> tuple[nn.Module, Callable[[], None]]:
    """Return the model and an epoch of the same training by hand: a plain loop, or DDP."""
    splits = load_digits(shift=1)
    train = torch_loader(splits.train, DIGITS_BATCH, 0, rank, size)
    own = torch.utils.data.Subset(splits.evaluation, range(rank, len(splits.evaluation), size))
    evaluation: DataLoader[Any] = DataLoader(own, DIGITS_BATCH // size)
    module = DigitsNet()
    model: Any = module
    if size > 1:
        use_statistics_of_all_ranks(module)
        model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 23_000)
    numbers = iter(range(10**9))

    def epoch() -> None:
        if isinstance(train.sampler, DistributedSampler):
            train.sampler.set_epoch(next(numbers))
        model.train()
        losses = 0.0
        for inputs, targets in train:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses += loss.item()
        model.eval()
        sums = torch.zeros(2)
        with torch.no_grad():
            for inputs, targets in evaluation:
                outputs = module(inputs)
                loss = functional.cross_entropy(outputs, targets, reduction="sum")
                sums += torch.stack([loss, (outputs.argmax(1) == targets).sum()])
        if size > 1:
            dist.all_reduce(sums)

    return module, epoch
