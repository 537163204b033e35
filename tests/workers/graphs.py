"""Steps with CUDA graphs, for `unit/engine/test_cuda_graphs.py`, and rank functions of DDP with simulated graphs."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import samestep
from helpers.batches import batch_of
from helpers.simulated_graphs import GraphAccelerator
from samestep.config import StepConfig, StrategyConfig
from samestep.config.strategy import StrategyName
from samestep.distributed.rng import seed_generators
from samestep.distributed.world import all_gather
from samestep.engine import cuda_graphs as graphs_module
from samestep.engine.engine import Engine
from samestep.zoo.text.models import GPT

SAMPLES, CLASSES, LENGTH, STEPS = 16, 11, 8, 5


class Perceptron(nn.Module):
    """Perceptron with a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(LENGTH, 16)
        self.frozen = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, CLASSES, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.frozen(self.first(values.float()))).relu())
        return result


def gpt(dropout: float) -> nn.Module:
    return GPT(num_classes=CLASSES, n_embd=16, n_head=2, n_layer=1, block_size=LENGTH, dropout=dropout)


class ConvolutionalNet(nn.Module):
    """Convolution with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(4 * LENGTH, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.net(values.float().unsqueeze(1)).flatten(1))
        return result


class Recurrent(nn.Module):
    """Recurrent layer, which keeps references to its parameters, with an embedding whose weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(CLASSES, 12), nn.LSTM(12, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layer(self.embedding(values))[0][:, -1])
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt(0.0),
    "perceptron": Perceptron,
    "dropout": lambda: gpt(0.1),
    "batch norm": lambda: nn.Sequential(Perceptron(), nn.BatchNorm1d(CLASSES)),
    "convolutional net": ConvolutionalNet,
    "recurrent": Recurrent,
}


class Result(NamedTuple):
    """Hash of losses, metrics and state after some steps, and whether graphs were replayed, or why not."""

    digest: str
    used: bool | None
    reason: str | None


def train(
    world: samestep.World,
    model: str | Callable[[], nn.Module],
    microbatches: int = 4,
    *,
    samples: Sequence[int] = (SAMPLES,) * STEPS,
    loss: Any = None,
    prepare: Callable[[Engine], Any] = lambda engine: None,
    before_step: Callable[[Engine, int], Any] = lambda engine, step: None,
    forward: Any = None,
    engine_options: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Return the result of training from seeded weights and data."""
    seed_generators(0, world.device)
    net = MODELS[model]() if isinstance(model, str) else model()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    config = StepConfig(clip_norm=1.0, **options)
    engine = Engine(net, optimizer, loss or nn.CrossEntropyLoss(), world=world, config=config, **(engine_options or {}))
    prepare(engine)
    total = hashlib.sha256()
    for step, size in enumerate(samples):
        before_step(engine, step)
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randint(CLASSES, (size, LENGTH), generator=generator).to(world.device)
        targets = torch.randint(CLASSES, (size, LENGTH) if isinstance(net, GPT) else (size,), generator=generator)
        batch = batch_of(world, inputs, targets.to(world.device), microbatches)
        result = engine.step(batch, forward=forward)
        total.update(repr((result.loss, result.grad_norm, result.skipped)).encode())
    if (engine_options or {}).get("metrics"):
        total.update(repr(engine.training_values()).encode())
    for tensor in net.state_dict().values():
        total.update((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().numpy().tobytes())
    return Result(total.hexdigest(), engine.step_runner.replays_graphs, engine.step_runner.graphs_reason)


def run(name: str, strategy: StrategyName, cuda_graphs: str) -> list[list[Any]]:
    """Return result and number of replays of each rank, with graphs of models without random numbers."""
    accelerator = GraphAccelerator()
    accelerator.manual_seed(0)  # for the initial weights
    with (
        samestep.start(device="cpu", strategy=StrategyConfig(name=strategy)) as world,
        pytest.MonkeyPatch.context() as patch,
    ):
        # The graphs alone are simulated: torch's DDP does not accept a CPU as an accelerator.
        patch.setattr(graphs_module, "is_accelerator", lambda device: True)
        patch.setattr(torch, "get_device_module", lambda kind=None: accelerator)
        with accelerator:
            result = train(world, name, 8, cuda_graphs=cuda_graphs)
        return all_gather([*result, accelerator.replays], world)


def on_gpu(name: str, cuda_graphs: str, precision: str) -> list[Any]:
    """Return the result on one GPU."""
    with samestep.start(device="cuda") as world:
        return list(train(world, name, cuda_graphs=cuda_graphs, precision=precision))
