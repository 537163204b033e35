"""Checks of `gpu.py` with one rank: facts, waits for the device, bits, batch norm, compilation, races, operators."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
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
    build_dataset,
    build_engine,
    distance,
    ready_batches,
    rival_work,
    train,
)
from torch import nn

import samestep
from helpers.waits import Waits
from samestep.config import StepConfig, StrategyConfig

CLIPPED = StepConfig(clip_norm=1.0)
BF16 = StepConfig(precision="bf16", clip_norm=1.0)


def facts(device: str) -> Outcome:
    """Versions, devices and the findings of `samestep doctor`."""
    outcome = Outcome({"torch": torch.__version__, "threads": torch.get_num_threads()})
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        outcome.numbers |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _driver(),
        }
    command = [sys.executable, "-m", "samestep", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError):
        outcome.failures.append(f"samestep doctor: exit code {done.returncode}, {done.stderr[-300:]}")
        return outcome
    failed = {finding["name"]: finding["value"] for finding in findings if finding["verdict"] == "fail"}
    outcome.numbers["doctor"] = dict(Counter(finding["verdict"] for finding in findings))
    # Free memory and disks of the machine decide the other findings, not the code.
    for name in ("self-test", "GPUs", "torch build"):
        outcome.require(name not in failed, f"samestep doctor: {name}: {failed.get(name)}")
    return outcome


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()


def _waits(device: str, function: Callable[[], Any]) -> int:
    """Count the waits of the host: by torch on a GPU, by function calls on a CPU."""
    if device == "cpu":
        with Waits() as reads:
            function()
        return reads.calls.total()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def _mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def waits(device: str) -> Outcome:
    """Waits of the host for the device in a step and in an evaluation."""
    outcome = Outcome()
    precisions = ("fp32", "bf16", "fp16") if device == "cuda" else ("fp32", "bf16")
    losses: dict[str, Any] = {"loss": samestep.cross_entropy, "mean": _mean_loss}
    with samestep.start(device=device) as world:
        dataset = build_dataset("small", 64)
        for precision, name, microbatches in product(precisions, losses, (1, 4, 8)):
            key = f"step, {precision}, {name}, {microbatches} microbatches"
            with outcome.attempt(key):
                model = build_engine(Plan("small"), world).model
                engine = samestep.Engine(
                    model,
                    torch.optim.SGD(model.parameters(), lr=0.1),
                    losses[name],
                    world=world,
                    config=StepConfig(precision=precision, clip_norm=1.0),
                )
                batches = ready_batches(dataset, 16, microbatches, 3, world)
                engine.step(batches[0])
                engine.step(batches[1])
                count = _waits(device, lambda engine=engine, batch=batches[2]: engine.step(batch))
                outcome.numbers[key] = count
                outcome.require(count <= (2 if precision == "fp16" else 1), f"{key}: {count} waits")
        batches = ready_batches(dataset, 16, 4, 2, world)
        count = _waits(device, lambda: engine.evaluate(batches, ["accuracy"]))
        outcome.numbers["evaluation of 2 batches"] = count
        outcome.require(count <= 2, f"evaluation of 2 batches: {count} waits")
    return outcome


def bits(device: str) -> Outcome:
    """One digest for plain and DDP steps, buckets, runs, workers, other work on the device, and a resumption."""
    outcome = Outcome()
    models = ("resnet18", "tokens", "gpt")
    counts = (1, 2, 4, 8) if device == "cuda" else (1, 4)
    digests: dict[tuple[str, int], dict[str, str]] = {(m, v): {} for m in models for v in counts}
    for variant, bucket_mb in {"plain": 25.0, "ddp, 0.1 MB": 0.1, "ddp, 25 MB": 25.0}.items():
        with samestep.start(device=device, strategy=StrategyConfig(bucket_mb=bucket_mb)) as world:
            for (model, microbatches), variants in digests.items():
                plan = Plan(model, microbatches, config=CLIPPED, is_wrapped=variant != "plain")
                with outcome.attempt(f"{model}, {microbatches} microbatches, {variant}"):
                    variants[variant] = train(plan, world).digest
    with samestep.start(device=device, strategy=StrategyConfig(name="dp", devices=1)) as world:
        for model in models:
            with outcome.attempt(f"{model}, dp of one"):
                digests[model, 4]["dp of one"] = train(Plan(model, 4, config=CLIPPED), world).digest
    with samestep.start(device=device) as world, tempfile.TemporaryDirectory() as folder:
        plan = Plan("resnet18", 4, config=CLIPPED)
        digests["resnet18", 4]["again"] = train(plan, world).digest
        with outcome.attempt("2 workers"):
            digests["resnet18", 4]["2 workers"] = train(replace(plan, num_workers=2), world).digest
        with outcome.attempt("other work"), rival_work(world.device):
            digests["resnet18", 4]["with other work"] = train(replace(plan, is_wrapped=True), world).digest
        for wrapped in (False, True):
            with outcome.attempt(f"resumed, {'ddp' if wrapped else 'plain'}"):
                saved = replace(plan, folder=Path(folder) / str(wrapped), is_wrapped=wrapped, steps=2, save_after=2)
                train(saved, world)
                resumed = replace(saved, steps=3, save_after=None, resume=True)
                digests["resnet18", 4][f"resumed, {'ddp' if wrapped else 'plain'}"] = train(resumed, world).digest
        bf16 = replace(plan, config=BF16)
        with outcome.attempt("bf16"):
            outcome.require_one(
                "bf16", {str(w): train(replace(bf16, is_wrapped=w), world).digest for w in (False, True)}
            )
    for (model, microbatches), variants in digests.items():
        outcome.require_one(f"{model}, {microbatches} microbatches", variants)
    return outcome


def sync(device: str) -> Outcome:
    """Steps with batch norm over the global batch in float64, compared with the CPU and with another run."""
    plan = Plan("normed", 4, is_double=True, config=StepConfig(batch_norm="sync", clip_norm=1.0))
    outcome, results = Outcome(), {}
    for name, kind in {"cpu": "cpu", "device": device, "device, again": device}.items():
        with samestep.start(device=kind) as world:
            results[name] = train(replace(plan, config=replace(plan.config)), world)
    outcome.require_one("digests of two runs", {name: results[name].digest for name in ("device", "device, again")})
    difference = distance(results["device"].weights, results["cpu"].weights)
    outcome.numbers["relative difference from the CPU"] = difference
    outcome.require(difference < 1e-10, f"weights differ from those of the CPU by {difference:.1e}")
    with samestep.start(device=device) as world:
        engine = build_engine(replace(plan, is_double=False), world)
        for batch in ready_batches(build_dataset("normed", 64), 16, 4, 3, world):
            engine.step(batch)
        counted = {name: int(b) for name, b in engine.model.named_buffers() if name.endswith("num_batches_tracked")}
    outcome.require(set(counted.values()) == {3}, f"num_batches_tracked after 3 steps: {counted}")
    return outcome


def compile_bits(device: str) -> Outcome:
    """One digest for a compiled model in bf16, plain and under DDP with several buckets."""
    config, digests, outcome = StepConfig(precision="bf16", compile=True), {}, Outcome()
    for variant, bucket_mb in {"plain": 25.0, "ddp, 0.25 MB": 0.25, "ddp, 25 MB": 25.0}.items():
        torch.compiler.reset()
        with samestep.start(device=device, strategy=StrategyConfig(bucket_mb=bucket_mb)) as world:
            plan = Plan("wide", 2, steps=2, config=config, is_wrapped=variant != "plain")
            with outcome.attempt(variant):
                digests[variant] = train(plan, world).digest
    outcome.require_one("wide, compiled, bf16", digests)
    return outcome


def sanitizer(device: str) -> Outcome:
    """Accesses of two streams to one tensor without an order between them, by torch's CUDA sanitizer."""
    if device != "cuda":
        return Outcome(skipped="torch's sanitizer observes CUDA streams")
    from torch.cuda._sanitizer import CUDASanitizerErrors, enable_cuda_sanitizer

    enable_cuda_sanitizer()
    outcome = Outcome()
    with samestep.start(device=device) as world:
        try:
            train(Plan("small", 4, config=CLIPPED, is_wrapped=True), world)
        except CUDASanitizerErrors as error:
            outcome.failures.append(str(error)[:1000])
    return outcome


def zoo(device: str) -> Outcome:
    """Two `exact` steps of many models: computed, or the operator without a deterministic kernel."""
    outcome = Outcome()
    with samestep.start(device=device) as world:
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
            except RuntimeError as error:
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


def _two_steps(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, loss: Any, world: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = samestep.Engine(model, optimizer, loss, world=world, config=BF16)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    for batch in ready_batches(dataset, len(inputs) // 2, 2, 2, world):
        engine.step(batch)


class _WithMask(nn.Module):
    """BERT for texts without padding."""

    def __init__(self) -> None:
        super().__init__()
        from samestep.zoo.transformers_models import transformers_model

        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
        data = {"vocabulary": VOCABULARY, "padding": 0, "longest": LENGTH}
        self.bert = transformers_model("BertForSequenceClassification")(num_classes=CLASSES, **data, **sizes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.bert(tokens, torch.ones_like(tokens))
        return logits


def _zoo(*, is_small: bool) -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor, Any]]]:
    """Return builders of a model, inputs, targets and loss."""
    from samestep.zoo.segmentation.unet import UNet
    from samestep.zoo.text.models import GPT
    from samestep.zoo.text.sentences import TokensNet

    draw = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (8,), generator=draw)

    def images(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
        from torchvision import models

        pixels = torch.randn(8, 3, 224, 224, generator=draw)
        return getattr(models, name)(num_classes=CLASSES), pixels, classes, samestep.cross_entropy

    def masks(dimensions: int, loss: Any) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
        size = (64, 64) if dimensions == 2 else (32, 32, 32)
        model = UNet(num_classes=3, in_channels=3, dimensions=dimensions, width=8, levels=2)
        targets = torch.randint(3, (8, *size), generator=draw)
        return model, torch.randn(8, 3, *size, generator=draw), targets, loss

    def text(model: nn.Module, *, is_classifier: bool = False) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
        tokens = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=draw)
        return model, tokens[:, :-1], classes if is_classifier else tokens[:, 1:], samestep.cross_entropy

    gpt = {"num_classes": VOCABULARY, "n_embd": 64, "n_head": 4, "n_layer": 2, "block_size": LENGTH}
    small: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor, Any]]] = {
        "U-Net": lambda: masks(2, samestep.cross_entropy),
        "3-d U-Net": lambda: masks(3, samestep.cross_entropy),
        "U-Net, torch's CrossEntropyLoss": lambda: masks(2, nn.CrossEntropyLoss()),
        "GPT": lambda: text(GPT(**gpt)),
        "GPT, fused attention": lambda: text(GPT(**gpt, fused=True)),
        "TokensNet": lambda: text(TokensNet(VOCABULARY, longest=LENGTH)),
        "BERT": lambda: text(_WithMask(), is_classifier=True),
    }
    names = ("resnet34",) if is_small else ("resnet34", "vgg16", "vit_b_16", "densenet121", "convnext_tiny")
    return {name: lambda name=name: images(name) for name in names} | small
