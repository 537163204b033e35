"""Rank functions for `strategies/test_pipeline.py`: training in float64, with stages and in one process."""

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from helpers.pipeline_models import CLASSES, TASKS, Deep, Draws, points
from helpers.ten_steps import outcome, resume_training, steps_of, train
from samestep.config import MeshConfig, StepConfig, StrategyConfig
from samestep.distributed.world import all_gather
from samestep.engine.callbacks import Callback
from samestep.errors import InputError

World = samestep.World


def pipeline(ranks: int, schedule: str = "1f1b", replicas: int = 1, stages: tuple[str, ...] = ()) -> StrategyConfig:
    """Return the strategy `pp`, or `ddp x pp` with several replicas."""
    mesh = MeshConfig(pipeline=ranks, replicate=replicas)
    return StrategyConfig(name="pp", mesh=mesh, schedule=schedule, stages=stages)  # type: ignore[arg-type]


LAYOUTS: dict[str, tuple[int, StrategyConfig | None]] = {
    "single": (1, None),
    "1f1b": (2, pipeline(2)),
    "zero_bubble": (2, pipeline(2, "zero_bubble")),
    "ddp x pp": (4, pipeline(2, "interleaved", replicas=2)),
    "pp x tp": (4, replace(pipeline(2), mesh=MeshConfig(pipeline=2, tensor=2))),
}


def build(
    world: World, task: str, callbacks: Sequence[Callback] = (), **step_options: Any
) -> tuple[samestep.Engine, Any, Any]:
    """Return an engine and its data, with one parameter group for weight decay."""
    model, data, options = TASKS[task]
    torch.manual_seed(0)
    net = model().double()
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01}]
    groups.append({"params": [p for p in trained if p.dim() == 1]})
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    step = StepConfig(**{"clip_norm": 0.4, **step_options})
    engine = samestep.Engine(
        net, optimizer, samestep.cross_entropy, world=world, config=step, ema=0.9, callbacks=callbacks
    )
    batches = samestep.loader(data(), batch_size=20, microbatches=5, shuffle=True, world=world, **options)
    return engine, batches, samestep.loader(data(), batch_size=30, microbatches=5, world=world, **options)


class CorrectCount:
    """Metric: number of correct predictions."""

    name = "correct"

    def __init__(self) -> None:
        self._count = 0.0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._count += float((outputs.argmax(dim=1) == targets).sum())

    def compute(self, world: World) -> float:
        total = torch.tensor([self._count])
        world.all_reduce(total)
        self.reset()
        return float(total)

    def reset(self) -> None:
        self._count = 0.0


def train_one(name: str, task: str, folder: Path) -> dict[str, Any]:
    """Train for ten steps, with a checkpoint after five; return the results of every rank."""
    with samestep.start(device="cpu", strategy=LAYOUTS[name][1]) as world:
        engine, batches, evaluation = build(world, task)
        result = train(engine, batches, evaluation, folder / name)
        result["metrics"] = engine.evaluate(evaluation, [CorrectCount()])
        result["of ranks"] = all_gather([result["steps"], result["metrics"], engine.steps], world)
        result["sizes"] = all_gather(
            sum(p.numel() for p in engine.local_parameters.local.values() if not p.is_meta), world
        )
        return result


def resume(name: str, task: str, folder: Path) -> dict[str, Any]:
    """Compute the second five steps from a checkpoint of another mesh."""
    with samestep.start(device="cpu", strategy=LAYOUTS[name][1]) as world:
        return resume_training(*build(world, task), folder)


def train_all(names: list[str], task: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Train with several meshes of this number of ranks."""
    return {name: train_one(name, task, folder) for name in names}


def resume_all(names: list[str], task: str, folder: Path, saved: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Resume the checkpoints of some meshes with several meshes of this number of ranks."""
    return {(before, name): resume(name, task, folder / before) for name in names for before in saved}


Case = tuple[StrategyConfig | None, str, str, dict[str, Any]]  # strategy, task, precision, options of a step


def digests(folder: Path, cases: dict[str, Case], epochs: int = 2, begin: str = "") -> dict[str, str]:
    """Train each case with checkpoints, from the last checkpoint of the case `begin`.

    Returns:
        The SHA-256 of losses, norms, weights, average, buffers and evaluation.
    """
    return {name: digest_of(folder, name, *case, epochs, begin) for name, case in cases.items()}


def digest_of(
    folder: Path,
    name: str,
    strategy: StrategyConfig | None,
    task: str,
    precision: str,
    options: dict[str, Any],
    epochs: int,
    begin: str,
) -> str:
    with samestep.start(device="cpu", strategy=strategy) as world:
        model, data, loading = TASKS[task]
        torch.manual_seed(0)
        net, dataset = model(), data()
        if isinstance(dataset, TensorDataset):
            dataset = TensorDataset(dataset.tensors[0].float(), dataset.tensors[1])
        step = StepConfig(**{"clip_norm": 0.4, "precision": precision, **options})
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        engine = samestep.Engine(net, optimizer, samestep.cross_entropy, world=world, config=step, ema=0.9)
        batches = samestep.loader(dataset, batch_size=20, microbatches=5, shuffle=True, world=world, **loading)
        if begin:
            assert samestep.CheckpointManager(folder / begin, engine, batches).resume()
        steps = []
        with samestep.CheckpointManager(folder / name, engine, batches) as checkpoints:
            for _ in samestep.epochs(batches, epochs):
                steps.append([(result.loss, result.grad_norm) for result in map(engine.step, batches)])
                for module in net.modules():
                    if isinstance(module, Draws):
                        module.is_active = True  # the ranks have computed steps without a draw
            checkpoints.save()
        result = outcome(engine, samestep.loader(dataset, batch_size=30, microbatches=5, world=world, **loading))
        tensors = [t for kind in ("weights", "average", "buffers") for t in result[kind].values()]
        values = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
        return hashlib.sha256(values + repr([steps[-1], result["evaluation"]]).encode()).hexdigest()


def losses_of(strategy: StrategyConfig | None, task: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of six steps."""
    with samestep.start(device="cpu", strategy=strategy) as world:
        engine, batches, _ = build(world, task, **options)
        return steps_of(engine, batches, 6)


def losses_under(cases: dict[str, tuple[StrategyConfig | None, str, dict[str, Any]]]) -> dict[str, list[Any]]:
    """Return the losses of several cases with this number of ranks."""
    return {name: losses_of(*case) for name, case in cases.items()}


class MicrobatchRecorder(Callback):
    """Records the microbatches of its calls."""

    def __init__(self) -> None:
        self.microbatches: list[int] = []

    def end_microbatch(self, microbatch: Any, outputs: Any, loss: Any) -> None:
        assert outputs.shape == (microbatch.size, CLASSES)
        self.microbatches.append(microbatch.number)


def callback_microbatches() -> list[list[int]]:
    """Return the microbatches of one step that callbacks of each rank received."""
    recorder = MicrobatchRecorder()
    with samestep.start(device="cpu", strategy=pipeline(2)) as world:
        engine, batches, _ = build(world, "deep", callbacks=[recorder])
        engine.step(next(iter(batches)))
        return all_gather(recorder.microbatches, world)


class DividesByZero(nn.Module):
    """Model with a non-finite output for one marked sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(inputs) / (inputs[:, :1] != 77)
        return logits


def not_finite(non_finite: str) -> dict[str, Any]:
    """Return the errors and steps of each rank if the third microbatch has a non-finite loss."""
    inputs, targets = points().tensors
    inputs[9, 0] = 77.0
    with samestep.start(device="cpu", strategy=pipeline(2)) as world:
        torch.manual_seed(0)
        net = DividesByZero().double()
        config = StepConfig(non_finite=non_finite)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = samestep.Engine(net, optimizer, samestep.cross_entropy, world=world, config=config)
        text = ""
        for batch in samestep.loader(TensorDataset(inputs, targets), batch_size=20, microbatches=5, world=world):
            try:
                engine.step(batch)
            except samestep.errors.NonFiniteError as error:
                text = str(error)
                break
        weights = [
            engine.local_parameters.full_tensor(name, p.detach()) for name, p in engine.local_parameters.local.items()
        ]
        finite = all(bool(torch.isfinite(weight).all()) for weight in weights)
        return {"errors": all_gather(text, world), "steps": all_gather(engine.steps, world), "finite": finite}


class DataDependent(nn.Module):
    """Model with control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.one(inputs)
        logits: torch.Tensor = self.other(hidden if hidden.sum() > 0 else -hidden)
        return logits


class SendsShape(nn.Module):
    """Model that uses a shape of one stage in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.other = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.one(inputs)
        size = hidden.shape[0]
        logits: torch.Tensor = self.other(self.two(hidden)).reshape(size, CLASSES)
        return logits


class OptionalInput(nn.Module):
    """Model with an optional input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, inputs: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.other(self.one(inputs if scale is None else inputs * scale))
        return logits


class TracedDraw(nn.Module):
    """Model that draws between the calls of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.other(self.one(inputs) * random.random())
        return logits


ERRORS: dict[str, tuple[Callable[[], nn.Module], StrategyConfig, dict[str, Any]]] = {
    "control flow": (DataDependent, pipeline(2), {}),
    "optional input": (OptionalInput, pipeline(2), {}),
    "too few modules": (SendsShape, pipeline(2, "interleaved"), {}),
    "unknown stage": (Deep, pipeline(2, stages=("block.3",)), {}),
    "number of stages": (Deep, pipeline(2, stages=("blocks.1", "blocks.3")), {}),
    "compile": (Deep, pipeline(2, "zero_bubble"), {"compile": True}),
    "exact compile": (Deep, pipeline(2), {"compile": True}),
    "batch norm": (Deep, pipeline(2), {"batch_norm": "sync"}),
    "cast twice": (Deep, pipeline(2), {"precision": "bf16"}),
    "traced draw": (TracedDraw, pipeline(2), {}),
}


def one_step(world: World, model: nn.Module, options: dict[str, Any], *, twice: bool = False) -> None:
    """Compute one step; with `twice`, the inputs are passed twice."""
    model.double()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world, config=StepConfig(**options))
    batch = next(iter(samestep.loader(points(), batch_size=20, microbatches=5, world=world)))
    if twice:
        microbatches = tuple(m._replace(data=((m.data[0], m.data[0]), m.data[1])) for m in batch.local_microbatches)
        batch = replace(batch, local_microbatches=microbatches)
    engine.step(batch)


def errors() -> dict[str, list[str]]:
    """Return the errors of each rank for unsupported models and options."""
    texts = {}
    for name, (model, strategy, options) in ERRORS.items():
        with samestep.start(device="cpu", strategy=strategy) as world:
            text = ""
            try:
                one_step(world, model(), options, twice=name == "optional input")
            except InputError as error:
                text = str(error)
            texts[name] = all_gather(text, world)
    return texts


def number_between_stages() -> None:
    """Partition a model between the computation and the use of a shape."""
    with samestep.start(device="cpu", strategy=pipeline(2, stages=("two",))) as world:
        one_step(world, SendsShape(), {})


class Hanging(nn.Module):
    """Module whose second forward never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        while self.calls > 1:
            time.sleep(0.05)
        return inputs


def hang() -> None:
    """Let the second of three stages hang."""
    with samestep.start(device="cpu", strategy=pipeline(3)) as world:
        one_step(world, nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), Hanging(), nn.Linear(12, CLASSES)), {})
