"""Check of the speed on several GPUs: divided calls and a hand-written loop with DDP, on one and on all GPUs."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from gpu_ranks import launch, most_ranks
from gpu_speed import NO_EVIDENCE, RATIO, Step, plain_step, seconds_of
from gpu_training import CLASSES, Outcome, joined
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import samestep
from samestep.distributed.rng import seed_generators
from samestep.distributed.world import World

DDP = "DDP"
_ROUNDS = 3
_TURN = 5  # steps


def scaling(device: str) -> Outcome:
    """Milliseconds of a step, samples per second and peak memory, on one and on all ranks."""
    outcome = Outcome()
    if device == "cpu":
        outcome.skipped = NO_EVIDENCE
    models = ("ResNet-50", "ViT-B/16") if device == "cuda" else ("small",)
    for ranks in sorted({1, most_ranks(device)}):
        for model in models:
            with outcome.attempt(f"{model}, {ranks} ranks"):
                found = launch(contest, model, device, ranks=ranks)
                outcome.numbers[f"{model}, {ranks} ranks"] = found
                ratio = found["fast"]["ratio"]
                if device == "cuda":
                    outcome.require(ratio <= RATIO, f"{model}, {ranks} ranks: `fast` takes {ratio} of {DDP}")
    return outcome


def contest(model: str, device: Any) -> dict[str, Any]:
    """Measure the steps of all contenders by turns; a function for `samestep.launch`."""
    with joined(device) as world:
        build, rows, pixels = _model(model)
        own = _samples(rows, pixels)
        every = _samples(rows * world.size, pixels)
        has_images = bool(pixels)
        memory_format = torch.channels_last if has_images else torch.preserve_format
        seed_generators(0, world.device)  # equal weights on all ranks

        def placed() -> nn.Module:
            """Return a model with the layout of its gradients, which buckets take over."""
            return build().to(world.device, memory_format=memory_format)

        def step_of(module: nn.Module, samples: TensorDataset, *, reads_loss: bool = False) -> Step:
            return plain_step(module, samples, world.device, has_images=has_images, reads_loss=reads_loss)

        contenders = {
            DDP: step_of(_ddp(placed(), world), own),
            "DDP, clipping and loss.item()": step_of(_ddp(placed(), world), own, reads_loss=True),
            "fast": step_of(_divided(placed(), "fast", world), every),
            "fast, clipping and loss.item()": step_of(_divided(placed(), "fast", world), every, reads_loss=True),
            "exact": step_of(_divided(placed(), "exact", world), every),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        memory: dict[str, int] = {}
        for number in range(_ROUNDS + 1):  # the first round warms up
            for name, step in contenders.items():
                _forget_peak(world.device)
                spent = seconds_of(step, _TURN, world.device)
                memory[name] = _peak(world.device)
                if number:
                    seconds[name].append(spent)
        return {"rows per rank": rows} | {
            name: {
                "milliseconds": round(1000 * median(values), 3),
                "samples_per_second": round(rows * world.size / median(values)),
                "ratio": round(median(value / other for value, other in zip(values, seconds[DDP], strict=True)), 3),
                "peak_mib": memory[name],
            }
            for name, values in seconds.items()
        }


def _model(name: str) -> tuple[Callable[[], nn.Module], int, int]:
    """Return the builder of a model, rows per rank and pixels per side."""
    if name == "small":
        return _perceptron, 64, 0
    from torchvision.models import resnet50, vit_b_16

    # The first call is whole on each rank: it must fit on one GPU.
    return (resnet50, 32, 224) if name == "ResNet-50" else (vit_b_16, 16, 224)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def _samples(rows: int, pixels: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    shape = (3, pixels, pixels) if pixels else (256,)
    return TensorDataset(
        torch.randn(rows, *shape, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)
    )


def _ddp(model: nn.Module, world: World) -> nn.Module:
    """Return a model as a hand-written loop with DDP has it, with batch norm over the whole batch."""
    if world.size == 1:
        return model
    if world.device.type != "cpu":  # torch has no such layer for CPUs
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _divided(model: nn.Module, reduction: Any, world: World) -> nn.Module:
    microbatches = world.size if reduction == "exact" else None
    return samestep.parallel(model, reduction=reduction, microbatches=microbatches, strict=True)


def _forget_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    """Return MiB; 0 on a CPU."""
    return 0 if device.type == "cpu" else torch.cuda.max_memory_allocated(device) >> 20
