"""Checks of `gpu.py` with one rank: bits, batch norm, races, operators."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_training import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    Outcome,
    Plan,
    distance,
    joined,
    rival_work,
    train_alone,
)
from torch import nn

import samestep
from samestep.distributed.world import World
from samestep.errors import InputError


def bits(device: str) -> Outcome:
    """One digest for repeated runs, workers, other work on the device, and a resumption."""
    outcome = Outcome()
    models = ("resnet18", "tokens", "gpt")
    counts = (1, 2, 4, 8) if device == "cuda" else (1, 4)
    for model, microbatches in product(models, counts):
        key = f"{model}, {microbatches} microbatches"
        with outcome.attempt(key):
            plan = Plan(model, microbatches)
            outcome.require_one(key, {run: train_alone(plan, device).digest for run in ("first", "again")})
    plan = Plan("resnet18", 4)
    digests = {"first": train_alone(plan, device).digest}
    with outcome.attempt("2 workers"):
        digests["2 workers"] = train_alone(replace(plan, num_workers=2), device).digest
    with outcome.attempt("other work"), rival_work(torch.device(device)):
        digests["with other work"] = train_alone(plan, device).digest
    with outcome.attempt("resumed"), tempfile.TemporaryDirectory() as folder:
        saved = replace(plan, folder=Path(folder) / "saved", steps=2, save_after=2)
        train_alone(saved, device)
        digests["resumed"] = train_alone(replace(saved, steps=3, save_after=None, resume=True), device).digest
    outcome.require_one("resnet18, variants", digests)
    with outcome.attempt("bf16"):
        bf16 = replace(plan, is_bf16=True)
        outcome.require_one("bf16", {run: train_alone(bf16, device).digest for run in ("first", "again")})
    return outcome


def batch_norm(device: str) -> Outcome:
    """Steps in float64 with batch norm, compared with the CPU and with another run."""
    plan = Plan("normed", 4, is_double=True)
    outcome, results = Outcome(), {}
    for name, kind in {"cpu": "cpu", "device": device, "device, again": device}.items():
        results[name] = train_alone(plan, kind)
    outcome.require_one("digests of two runs", {name: results[name].digest for name in ("device", "device, again")})
    difference = distance(results["device"].weights, results["cpu"].weights)
    outcome.numbers["relative difference from the CPU"] = difference
    outcome.require(difference < 1e-10, f"weights differ from those of the CPU by {difference:.1e}")
    return outcome


def sanitizer(device: str) -> Outcome:
    """Accesses of two streams to one tensor without an order between them, by torch's CUDA sanitizer.

    It is a mode that observes operations, in which calls are whole: it sees batches, transfers and steps.
    """
    if device != "cuda":
        return Outcome(skipped="torch's sanitizer observes CUDA streams")
    from torch.cuda._sanitizer import CUDASanitizerErrors, enable_cuda_sanitizer

    enable_cuda_sanitizer()
    outcome = Outcome()
    try:
        train_alone(Plan("small", 4, is_strict=False), device)
    except CUDASanitizerErrors as error:
        outcome.failures.append(str(error)[:1000])
    return outcome


def zoo(device: str) -> Outcome:
    """Two `exact` steps of many models: computed, or the operator without a deterministic kernel."""
    outcome = Outcome()
    with joined(device) as world:
        for name, builder in _zoo(is_small=device == "cpu").items():
            try:
                model, inputs, targets, loss = builder()
            except ImportError as error:
                outcome.numbers[name] = f"not installed: {error.name}"
                continue
            try:
                with _quiet():
                    _two_steps(model, inputs, targets, loss, world)
                outcome.numbers[name] = "computed"
            except (RuntimeError, InputError) as error:
                text = str(error).strip().splitlines()[0]
                outcome.numbers[name] = text[:200]
                outcome.require("deterministic" in text, f"{name}: {text[:200]}")
            del model
    return outcome


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _two_steps(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, loss: Any, world: World) -> None:
    model = samestep.parallel(model.to(world.device), reduction="exact", microbatches=2, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    size = len(inputs) // 2
    for rows in (slice(0, size), slice(size, None)):
        optimizer.zero_grad()
        with torch.autocast(world.device.type, torch.bfloat16):
            value = loss(model(inputs[rows].to(world.device)), targets[rows].to(world.device))
        value.backward()
        optimizer.step()


class _WithMask(nn.Module):
    """BERT for texts without padding."""

    def __init__(self) -> None:
        super().__init__()
        from samestep.zoo.model_libraries import transformers_model

        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
        data = {"vocabulary": VOCABULARY, "padding": 0, "longest": LENGTH}
        self.bert = transformers_model("BertForSequenceClassification")(num_classes=CLASSES, **data, **sizes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.bert(tokens, torch.ones_like(tokens))
        return logits


def _zoo(*, is_small: bool) -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor, Any]]]:
    """Return builders of a model, inputs, targets and loss."""
    from samestep.zoo.models import GPT, TokensNet, UNet

    draw = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (8,), generator=draw)

    def images(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
        from torchvision import models

        pixels = torch.randn(8, 3, 224, 224, generator=draw)
        return getattr(models, name)(num_classes=CLASSES), pixels, classes, nn.functional.cross_entropy

    def masks(loss: Any) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
        model = UNet(num_classes=3, in_channels=3, width=8, levels=2)
        targets = torch.randint(3, (8, 64, 64), generator=draw)
        return model, torch.randn(8, 3, 64, 64, generator=draw), targets, loss

    def text(model: nn.Module, *, is_classifier: bool = False) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
        tokens = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=draw)
        return model, tokens[:, :-1], classes if is_classifier else tokens[:, 1:], nn.functional.cross_entropy

    gpt = {"num_classes": VOCABULARY, "n_embd": 64, "n_head": 4, "n_layer": 2, "block_size": LENGTH}
    small: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor, Any]]] = {
        "U-Net": lambda: masks(nn.functional.cross_entropy),
        "U-Net, torch's CrossEntropyLoss": lambda: masks(nn.CrossEntropyLoss()),
        "GPT": lambda: text(GPT(**gpt)),
        "GPT, fused attention": lambda: text(GPT(**gpt, fused=True)),
        "TokensNet": lambda: text(TokensNet(VOCABULARY, longest=LENGTH)),
        "BERT": lambda: text(_WithMask(), is_classifier=True),
    }
    names = ("resnet34",) if is_small else ("resnet34", "vgg16", "vit_b_16", "densenet121", "convnext_tiny")
    return {name: lambda name=name: images(name) for name in names} | small
