"""Rank functions for `strategies/test_fsdp.py`."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.config import Precision, StepConfig, StrategyConfig
from samestep.errors import SamestepError
from workers.layouts import Full

SAMPLES, STEPS = 60, 6
FSDP = StrategyConfig(name="fsdp")
CLIP_NORM = 0.2


class Exploding(nn.Linear):
    """Layer whose gradient overflows if an input is larger than 50."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        return outputs * torch.where(inputs.abs().max() > 50, torch.inf, 1.0) if self.training else outputs


def data(largest: float = 1.0) -> TensorDataset:
    inputs = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1))
    inputs[25] *= largest / inputs[25].abs().max()
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def trained(part: StrategyConfig | None, precision: Precision) -> dict[str, Any]:
    """Train float32 weights for some steps; return losses, the scale, and the full weights of every rank."""
    with samestep.start(device="cpu", strategy=part) as world:
        torch.manual_seed(0)
        model = Full()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = StepConfig(precision=precision, clip_norm=1.0)
        engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=world, config=config)
        batches = samestep.loader(data(), batch_size=20, microbatches=5, world=world)
        losses = []
        while engine.steps < STEPS:
            losses += [engine.step(batch).loss for batch in batches]
        weights = {
            name: engine.local_parameters.full_tensor(name, p.detach()).tolist()
            for name, p in engine.local_parameters.local.items()
        }
        return {"losses": losses, "scale": engine.scaler.get_scale(), "weights": samestep.all_gather(weights, world)}


def precisions() -> dict[str, dict[str, Any]]:
    """Train with FSDP in every precision."""
    cases: dict[str, tuple[StrategyConfig, Precision]] = {
        "fp32": (FSDP, "fp32"),
        "bf16": (FSDP, "bf16"),
        "fp16": (FSDP, "fp16"),
        "gathered in bf16": (StrategyConfig(name="fsdp", gather="bf16"), "fp32"),
    }
    return {name: trained(*case) for name, case in cases.items()}


def scales() -> list[list[float]]:
    """Return the change of the scale on every rank: after a finite step, and after an overflow in one shard."""
    changes = []
    with samestep.start(device="cpu", strategy=FSDP) as world:
        engine = engine_of(world, Full(), precision="fp16", non_finite="skip")
        for batch in samestep.loader(data(), batch_size=20, microbatches=5, world=world):
            engine.step(batch)
        for overflowing in (None, 2):
            before = engine.scaler.get_scale()
            for shard in engine.local_parameters.trained.values():
                shard.grad = torch.full_like(shard, torch.inf if world.rank == overflowing else 0.0)
            engine.scaler.unscale_(engine.optimizer)
            engine.local_parameters.agree_on_overflow(engine.scaler, engine.optimizer, world)
            engine.scaler.update()
            changes.append(samestep.all_gather(engine.scaler.get_scale() / before, world))
    return changes


def single_process() -> dict[str, dict[str, Any]]:
    """Train with one process in every precision."""
    names: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    return {name: trained(None, name) for name in names}


def engine_of(
    world: samestep.World, model: nn.Module, optimizer: Any = torch.optim.SGD, **options: Any
) -> samestep.Engine:
    config = StepConfig(**options)
    return samestep.Engine(
        model, optimizer(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), world=world, config=config
    )


def errors() -> dict[str, list[str]]:
    """Return the errors of every rank for unsupported configurations."""
    texts: dict[str, list[str]] = {}

    def record(name: str, run: Any) -> None:
        try:
            run()
        except SamestepError as error:
            texts[name] = [f"{error.value}|{error.fix}"]
        texts[name] = samestep.all_gather(texts.get(name, ["no error"])[0], world)

    with samestep.start(device="cpu", strategy=FSDP) as world:
        record("optimizer", lambda: engine_of(world, nn.Linear(12, 4), torch.optim.Adafactor))
        images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))
        record("channels last", lambda: engine_of(world, images, channels_last=True))
        scaled = nn.Linear(12, 4)
        scaled.scale = nn.Parameter(torch.ones(()))
        record("scalar", lambda: engine_of(world, scaled))
        norms = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        record("batch norm", lambda: engine_of(world, norms, batch_norm="sync"))
        for name in ("skip", "stop"):
            model = nn.Sequential(nn.Linear(12, 8), Exploding(8, 8), nn.Linear(8, 4))
            engine = engine_of(world, model, non_finite=name)
            with torch.no_grad():
                for shard in engine.local_parameters.local.values():
                    shard.clamp_(-0.5, 0.5)
            batches = samestep.loader(data(10_000.0), batch_size=20, microbatches=5, world=world)
            record(name, lambda engine=engine, batches=batches: [engine.step(batch) for batch in batches])
            texts[f"{name}: steps"] = samestep.all_gather(str(engine.steps), world)
    with samestep.start(device="cpu", strategy=StrategyConfig(name="fsdp", meta=True)) as world:
        tied = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        tied[1].weight = tied[0].weight
        record("tied", lambda: engine_of(world, tied))
    return texts


def without_values() -> None:
    """Build an engine with a model that has no values on rank 0."""
    with samestep.start(device="cpu", strategy=StrategyConfig(name="fsdp", meta=True)) as world:
        engine_of(world, nn.Linear(12, 4, device="meta"))


class SkippedUnit(nn.Module):
    """Layers, one of which is left out for inputs larger than 50."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(12, 12) for _ in range(3)), nn.Linear(12, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        is_large = bool(inputs.max() > 50)
        for number, layer in enumerate(self.layers):
            inputs = inputs if number == 1 and is_large else layer(inputs)
        logits: torch.Tensor = self.head(inputs)
        return logits


def skipped_unit() -> None:
    """Train a model that leaves out a unit in the first of two microbatches of each rank."""
    with samestep.start(device="cpu", strategy=FSDP) as world:
        engine, microbatches = engine_of(world, SkippedUnit()), 2 * world.size
        inputs = torch.ones(4 * microbatches, 12)
        inputs.view(microbatches, 4, 12)[::2] = 100
        dataset = TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.long))
        for batch in samestep.loader(dataset, batch_size=len(inputs), microbatches=microbatches, world=world):
            engine.step(batch)


def shard_sizes() -> list[bool]:
    """Return whether a rank computes with full parameters, and whether it stores less than half of them."""
    with samestep.start(device="cpu", strategy=FSDP) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
        reference = copy.deepcopy(model)
        engine = engine_of(world, model)
        inputs = data().tensors[0]
        with torch.no_grad():
            same = torch.allclose(engine.model(inputs), reference(inputs), atol=1e-6)
        size = sum(shard.numel() for shard in engine.local_parameters.local.values())
        return samestep.all_gather([same, size < sum(p.numel() for p in reference.parameters()) / 2], world)


class Blocks(nn.Sequential):
    """Blocks with dropout and layer norm, and a parameter that belongs to no block."""

    def __init__(self) -> None:
        blocks = [
            nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 24), nn.LayerNorm(24))
            for _ in range(3)
        ]
        super().__init__(nn.Linear(12, 24), *blocks, nn.Linear(24, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.scale  # type: ignore[no-any-return]


def digests(
    folder: str, cases: dict[str, tuple[StrategyConfig | None, Precision]], epochs: int = 2, begin: str = ""
) -> dict[str, str]:
    """Train with clipping, evaluate the average, and save in each case, from the last checkpoint of the case `begin`.

    Returns:
        The SHA-256 of weights, losses of evaluations and norms.
    """
    return {name: digest_of(Path(folder), name, *case, epochs, begin) for name, case in cases.items()}


def digest_of(
    folder: Path, name: str, part: StrategyConfig | None, precision: Precision, epochs: int, begin: str
) -> str:
    with samestep.start(device="cpu", strategy=part) as world:
        torch.manual_seed(0)
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = StepConfig(precision=precision, clip_norm=CLIP_NORM)
        engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=world, config=config, ema=0.9)
        # The last batch has two samples, so some ranks have none.
        batches = samestep.loader(data(), batch_size=29, microbatches=6, shuffle=True, world=world)
        if begin:
            with samestep.CheckpointManager(folder / begin, engine, batches) as checkpoints:
                assert checkpoints.resume()
        norms, losses = [], []
        with samestep.CheckpointManager(folder / name, engine, batches) as checkpoints:
            for _ in samestep.epochs(batches, epochs):
                norms += [engine.step(batch).grad_norm for batch in batches]
                losses.append(engine.evaluate(batches)["loss"])
            checkpoints.save()
        assert max(norms) > CLIP_NORM
        local = engine.local_parameters
        tensors = [local.full_tensor(name, parameter.detach()) for name, parameter in local.local.items()]
        values = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
        return hashlib.sha256(values + repr([*norms[-3:], losses[-1]]).encode()).hexdigest()


def generator_and_critic() -> list[list[float]]:
    """Return the losses of an engine whose loss is computed by the model of another engine, on every rank."""
    with samestep.start(device="cpu", strategy=FSDP) as world:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, size)) for size in (12, 1)]
        generator, critic = (
            samestep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world) for model in models
        )

        def judge(model: nn.Module, batch: Any) -> torch.Tensor:
            return nn.functional.softplus(critic.model(model(batch[0]))).mean()

        def tell_apart(model: nn.Module, batch: Any) -> torch.Tensor:
            made = generator.model(batch[0]).detach()
            return nn.functional.softplus(torch.cat([model(batch[0]), -model(made)])).mean()

        losses = []
        for batch in samestep.loader(data(), batch_size=20, microbatches=3, world=world):
            losses += [generator.step(batch, forward=judge).loss, critic.step(batch, forward=tell_apart).loss]
        return samestep.all_gather(losses, world)
