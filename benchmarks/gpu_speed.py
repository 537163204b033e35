"""Checks of `gpu.py` that measure one rank: time of a step, kernels, attention, checkpoints."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_training import CLASSES, Outcome, joined, synchronize
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.data.batch import move
from samestep.distributed.world import World
from samestep.zoo.text.models import causal_attention

# Ratio to the hand-written loop that one process may have.
RATIO = 1.03
NO_EVIDENCE = "measured, not judged: times on a CPU with other load are no evidence"
REPEATS = 8  # of a gradient of attention
Step = Callable[[], Any]


def speed(device: str) -> Outcome:
    """Time of a step relative to a hand-written loop, by turns; samples per second; kernels and waits of a step."""
    outcome = Outcome()
    if device == "cpu":
        outcome.skipped = NO_EVIDENCE
    models: dict[str, tuple[Callable[[], nn.Module], int, int]] = {"small": (_perceptron, 64, 0)}
    if device == "cuda":
        from torchvision.models import resnet50, vit_b_16

        models = {"ResNet-50": (resnet50, 256, 224), "ViT-B/16": (vit_b_16, 128, 224)} | models
    with joined(device) as world:
        for name, (build, batch_size, pixels) in models.items():
            with outcome.attempt(name):
                _compare(outcome, name, build, batch_size, pixels, world)
    return outcome


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def _compare(
    outcome: Outcome,
    name: str,
    build: Callable[[], nn.Module],
    batch_size: int,
    pixels: int,
    world: World,
) -> None:
    """Measure the steps of all contenders by turns."""
    shape = (3, pixels, pixels) if pixels else (256,)
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(batch_size, *shape, generator=draw), torch.randint(CLASSES, (batch_size,), generator=draw)
    )
    turn, rounds = (5, 3) if pixels else (20, 5)
    divided = samestep.parallel(build().to(world.device))
    contenders = {
        "hand-written loop": plain_step(build(), dataset, world.device, has_images=bool(pixels)),
        "hand-written loop, any kernels": _with_any_kernels(
            plain_step(build(), dataset, world.device, has_images=bool(pixels))
        ),
        "fast": plain_step(divided, dataset, world.device, has_images=bool(pixels)),
        **{f"exact, {v} microbatches": _divided_step(build(), dataset, v, world.device) for v in (1, 2, 4, 8)},
    }
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for number in range(rounds + 1):  # the first round warms up
        for contender, step in contenders.items():
            spent = seconds_of(step, turn, world.device)
            if number:
                seconds[contender].append(spent)
    plain = seconds["hand-written loop"]
    for contender, values in seconds.items():
        ratio = median(value / other for value, other in zip(values, plain, strict=True))
        outcome.numbers[f"{name}, {contender}"] = {
            "milliseconds": round(1000 * median(values), 3),
            "samples_per_second": round(batch_size / median(values)),
            "ratio": round(ratio, 3),
            **_traced(contenders[contender], world.device),
        }
    ratio = outcome.numbers[f"{name}, fast"]["ratio"]
    if pixels:
        outcome.require(ratio <= RATIO, f"{name}: a step under `fast` takes {ratio} of the hand-written loop")


def plain_step(
    model: nn.Module, dataset: TensorDataset, device: torch.device, *, has_images: bool, reads_loss: bool = False
) -> Step:
    """Return the step of a plain loop in bf16.

    Args:
        model: the model.
        dataset: one batch.
        device: device of the step.
        has_images: whether inputs are images, for which the layout is channels-last.
        reads_loss: whether the step clips the norm of the gradient and reads the loss, as most loops do.
    """
    memory_format = torch.channels_last if has_images else torch.preserve_format
    model = model.to(device, memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = move(dataset.tensors, device)
    inputs = inputs.contiguous(memory_format=memory_format) if has_images else inputs

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        if reads_loss:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if reads_loss:
            loss.item()

    return step


def _with_any_kernels(step: Step) -> Step:
    """Return the step with the kernels that torch selects by default, not only deterministic ones."""

    def stepped() -> None:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = True
        step()
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)

    return stepped


def _divided_step(model: nn.Module, dataset: TensorDataset, microbatches: int, device: torch.device) -> Step:
    """Return the step of a loop with `samestep.parallel` under `exact`."""
    divided = samestep.parallel(model.to(device), reduction="exact", microbatches=microbatches)
    return plain_step(divided, dataset, device, has_images=dataset.tensors[0].dim() == 4)


def seconds_of(step: Step, turn: int, device: torch.device) -> float:
    """Return the seconds of a step, as the mean over a turn of steps."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(turn):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / turn


def _traced(step: Step, device: torch.device) -> dict[str, float]:
    """Return kernels, waits and the idle share of the device in a step; nothing on a CPU."""
    if device.type == "cpu":
        return {}
    from torch.profiler import ProfilerActivity, profile

    steps = 2
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:  # the calls of CUDA are in it too
        seconds = seconds_of(step, steps, device)
    events = profiler.events() or []
    cpu = torch.autograd.DeviceType.CPU
    kernels = [event for event in events if event.device_type != cpu and not event.is_user_annotation]
    busy = sum(event.device_time_total for event in kernels) / 1e6 / steps
    waits = sum(event.name.startswith(("cudaStreamSync", "cudaDeviceSync", "cudaEventSync")) for event in events)
    return {
        "kernels": round(len(kernels) / steps),
        "waits": round((waits - 2) / steps, 1),  # two are of the measurement
        "idle": round(max(0.0, 1 - busy / seconds), 3),
    }


def attention(device: str) -> Outcome:
    """Repeated gradients, and time of forward and backward, of fused attention and of attention written out."""
    outcome = Outcome()
    rows, length, size, heads = (8, 1024, 768, 12) if device == "cuda" else (2, 64, 32, 4)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, length, 3 * size, generator=generator)
    weights = torch.randn(rows, length, size, generator=generator)
    with joined(device) as world:
        for dtype, is_fused in product((torch.float32, torch.bfloat16), (False, True)):
            projections, scales = values.to(world.device, dtype).requires_grad_(), weights.to(world.device, dtype)

            def gradient(projections: Any = projections, scales: Any = scales, fused: bool = is_fused) -> torch.Tensor:
                attended = causal_attention(projections, heads, fused=fused)
                return torch.autograd.grad((attended * scales).float().sum(), projections)[0]

            first, key = gradient(), f"{dtype}, {'fused' if is_fused else 'written out'}"
            is_repeated = all(torch.equal(gradient(), first) for _ in range(REPEATS))
            outcome.numbers[key] = {"milliseconds": round(1000 * seconds_of(gradient, REPEATS, world.device), 3)}
            outcome.require(is_repeated, f"{key}: repeated gradients differ")
    return outcome


def checkpoint(device: str) -> Outcome:
    """Standstill of the training loop by a checkpoint of 350 M parameters with AdamW, and the time to load it."""
    width, layers = (4096, 21) if device == "cuda" else (256, 4)
    outcome = Outcome()
    with joined(device) as world, tempfile.TemporaryDirectory() as folder:
        dataset = TensorDataset(torch.randn(8, width), torch.randint(width, (8,)))

        def build() -> tuple[Any, Any, Any]:
            torch.manual_seed(0)
            with world.device:
                model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            samestep.parallel(model)
            return model, torch.optim.AdamW(model.parameters()), samestep.loader(dataset, batch_size=8)

        model, optimizer, batches = build()
        inputs, targets = move(next(iter(batches)), world.device)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        outcome.numbers["GB"] = round(3 * sum(p.nbytes for p in model.parameters()) / 1e9, 2)
        manager = samestep.CheckpointManager(Path(folder), model, batches, optimizer=optimizer, background=True)
        with manager as checkpoints:
            for name in ("first save", "next save"):  # the first one allocates the memory of the copies
                optimizer.step()
                synchronize(world.device)
                began = time.perf_counter()
                checkpoints.save()
                outcome.numbers[f"{name}: standstill of the host, seconds"] = round(time.perf_counter() - began, 3)
                synchronize(world.device)
                outcome.numbers[f"{name}: of the device, seconds"] = round(time.perf_counter() - began, 3)
                checkpoints._writer.wait()
                outcome.numbers[f"{name}: written, seconds"] = round(time.perf_counter() - began, 3)
        before = _sums(model.parameters())
        model, optimizer, batches = build()
        with samestep.CheckpointManager(Path(folder), model, batches, optimizer=optimizer) as checkpoints:
            began = time.perf_counter()
            outcome.require(checkpoints.resume(), "no checkpoint was found")
            synchronize(world.device)
            outcome.numbers["loaded, seconds"] = round(time.perf_counter() - began, 3)
        outcome.require(_sums(model.parameters()) == before, "loaded weights differ from the saved ones")
    return outcome


def _sums(parameters: Any) -> Sequence[float]:
    return [float(parameter.detach().double().sum()) for parameter in parameters]
