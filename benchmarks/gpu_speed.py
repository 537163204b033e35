"""Checks of `gpu.py` that measure one rank: time of a step, kernels, attention, checkpoints."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_operations import recipe
from gpu_training import CLASSES, Outcome, joined, synchronize
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.data.batch import move
from samestep.distributed.devices import is_accelerator
from samestep.distributed.world import World
from samestep.zoo.models import causal_attention

RATIO = 1.03  # to a loop without Samestep, beyond which a step is too slow
SLOW = "exact, microbatches=8"  # several times as long on one GPU, so one step at a time is measured
# The same for one process, where the loop clips the gradient and reads the loss.
LIMITS = {"fast": 1.0, "exact, microbatches=1": RATIO, SLOW: 1.3, "recipe": RATIO}
NO_EVIDENCE = "measured, not judged: times on a CPU with other load are no evidence"
REPEATS = 8  # of a gradient of attention
PLAIN = "plain loop"
USUAL = "loop with clipping and item"
Step = Callable[[], Any]


@dataclass(frozen=True)
class _Case:
    """A model and its batch; inputs without pixels are vectors."""

    build: Callable[[], nn.Module]
    rows: int
    pixels: int
    turn: int  # steps in a row
    rounds: int


def speed(device: str) -> Outcome:
    """Time of a step relative to two hand-written loops, by turns; samples per second; kernels and waits of a step."""
    outcome = Outcome()
    if device == "cpu":
        outcome.skipped = NO_EVIDENCE
    with joined(device) as world:
        for name, case in _cases(device).items():
            with outcome.attempt(name):
                _compare(outcome, name, case, world)
    return outcome


def _cases(device: str) -> dict[str, _Case]:
    from torchvision.models import VisionTransformer, resnet18, resnet50, vit_b_16

    vectors = {"small": _Case(_perceptron, 64, 0, 20, 5)}
    if device == "cuda":
        return {"ResNet-50": _Case(resnet50, 256, 224, 5, 3), "ViT-B/16": _Case(vit_b_16, 128, 224, 5, 3)} | vectors
    tiny = partial(VisionTransformer, 32, 16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64)
    return {"ResNet-18": _Case(resnet18, 16, 32, 1, 1), "tiny ViT": _Case(tiny, 16, 32, 1, 1)} | vectors


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def _compare(outcome: Outcome, name: str, case: _Case, world: World) -> None:
    """Measure the steps of all contenders by turns."""
    contenders = _contenders(case, world)
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for number in range(case.rounds + 1):  # the first round warms up
        for contender, step in contenders.items():
            turn = 1 if contender == SLOW else case.turn
            spent = seconds_of(step, turn, world.device)
            if number:
                seconds[contender].append(spent)
    for contender, values in seconds.items():
        ratios = {
            loop: round(median(value / other for value, other in zip(values, seconds[loop], strict=True)), 3)
            for loop in (PLAIN, USUAL)
        }
        outcome.numbers[f"{name}, {contender}"] = {
            "milliseconds": round(1000 * median(values), 3),
            "samples_per_second": round(case.rows / median(values)),
            "ratio": ratios,
            **_traced(contenders[contender], world.device),
        }
        # In the log of the check, also if its time ends.
        print(name, contender, outcome.numbers[f"{name}, {contender}"], flush=True)
        limit = LIMITS.get(contender, float("inf"))
        if case.pixels and is_accelerator(world.device):
            is_fast = round(ratios[USUAL], 2) <= limit
            outcome.require(is_fast, f"{name}: a step of {contender} takes {ratios[USUAL]} of a {USUAL}")


def _contenders(case: _Case, world: World) -> dict[str, Step]:
    """Return the steps of loops without and with Samestep; those with it clip the gradient and read the loss."""
    shape = (3, case.pixels, case.pixels) if case.pixels else (256,)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(case.rows, *shape, generator=draw)
    dataset = TensorDataset(inputs, torch.randint(CLASSES, (case.rows,), generator=draw))
    step_of = partial(plain_step, dataset=dataset, device=world.device, has_images=case.pixels > 0)

    def divided(**options: Any) -> Step:
        return step_of(samestep.parallel(case.build().to(world.device), strict=True, **options), reads_loss=True)

    channels_last = f"step.channels_last={str(case.pixels > 0).lower()}"
    memory_format = torch.channels_last if case.pixels else torch.preserve_format
    recipe_model = case.build().to(world.device, memory_format=memory_format)
    batch = tuple(move(dataset.tensors, world.device))
    return {
        PLAIN: step_of(case.build()),
        f"{PLAIN}, any kernels": _with_any_kernels(step_of(case.build())),
        USUAL: step_of(case.build(), reads_loss=True),
        "fast": divided(),
        "exact, microbatches=1": divided(reduction="exact", microbatches=1),
        SLOW: divided(reduction="exact", microbatches=8),
        "recipe": recipe(recipe_model, batch, world, "step.clip_norm=1", "step.precision=bf16", channels_last),
    }


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
