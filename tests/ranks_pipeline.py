"""What ranks run for `parallel_layouts/test_pipeline.py`: small trainings in float64, in stages and in one process."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

import samestep
from samestep.config import Mesh, StepRules, StrategyPart
from samestep.engine.observer import Observer, observe
from samestep.errors import InputError
from samestep.recipes.text.gpt import GPT
from samestep.runtime.gather import all_gather
from ten_steps import go_on, steps_of, train

World = samestep.World
CLASSES = 4


def pipeline(ranks: int, schedule: str = "1f1b", copies: int = 1, stages: tuple[str, ...] = ()) -> StrategyPart:
    """The strategy `pp`, or `ddp x pp` where there are copies."""
    mesh = Mesh(pipeline=ranks, replicate=copies)
    return StrategyPart(name="pp", mesh=mesh, schedule=schedule, stages=stages)  # type: ignore[arg-type]


LAYOUTS: dict[str, tuple[int, StrategyPart | None]] = {
    "single": (1, None),
    "gpipe": (2, pipeline(2, "gpipe")),
    "1f1b": (2, pipeline(2)),
    "interleaved": (2, pipeline(2, "interleaved")),
    "zero_bubble": (2, pipeline(2, "zero_bubble")),
    "pp of 4": (4, pipeline(4)),
    "zero_bubble of 4": (4, pipeline(4, "zero_bubble")),
    "ddp x pp": (4, pipeline(2, "interleaved", copies=2)),
    "pp x tp": (4, replace(pipeline(2), mesh=Mesh(pipeline=2, tensor=2))),
    "pp x tp zero_bubble": (4, replace(pipeline(2, "zero_bubble"), mesh=Mesh(pipeline=2, tensor=2))),
    "ddp x pp zero_bubble": (4, pipeline(2, "zero_bubble", copies=2)),
}


class Deep(nn.Module):
    """Batch norm, a layer that changes its input in place, one that is frozen, one used twice, and a way around."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(16, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first = hidden = self.norm(self.first(inputs))
        for block in [*self.blocks, self.blocks[0]]:
            hidden = self.drop(self.act(block(hidden)))
        logits: torch.Tensor = self.last(self.frozen(hidden) + first)
        return logits


class HalfFrozen(Deep):
    """Trains some of its modules only, which are all in one stage of two."""

    def __init__(self, trained: tuple[str, ...]) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(trained))


def points() -> Any:
    """91 samples; 5 shards of 4 in a batch of 20, and a last batch of 11."""
    inputs = torch.randn(91, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(dim=1))


def padded(sentences: list[tuple[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """As long as the longest of the shard: shards of one batch have different shapes."""
    inputs = pad_sequence([sentence[:-1] for (sentence,) in sentences], batch_first=True)
    targets = pad_sequence([sentence[1:] for (sentence,) in sentences], batch_first=True, padding_value=-100)
    return inputs, targets


def sentences() -> Any:
    """82 texts of different lengths; the last batch has 2, so that ranks and shards have nothing to do."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(4, 7, (82,), generator=generator).tolist()
    return [(torch.randint(1, 11, (length,), generator=generator),) for length in lengths]


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {
    "deep": (Deep, points, {}),
    "text": (partial(GPT, 11, 8, 2, 5, 8), sentences, {"collate": padded}),
    "dropout": (partial(Deep, 0.3), points, {}),
    "first frozen": (partial(HalfFrozen, ("blocks.4", "last")), points, {}),
    "last frozen": (partial(HalfFrozen, ("first", "norm", "blocks.0")), points, {}),
}


def made(world: World, task: str, **rules: Any) -> tuple[samestep.Engine, Any, Any]:
    """An engine and its data; weights decay in a group of their own."""
    model, data, options = TASKS[task]
    torch.manual_seed(0)
    net = model().double()
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01}]
    groups.append({"params": [p for p in trained if p.dim() == 1]})
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    step = StepRules(**{"clip_norm": 0.4, **rules})
    engine = samestep.Engine(net, optimizer, samestep.cross_entropy, world=world, rules=step, ema=0.9)
    batches = samestep.loader(data(), batch_size=20, shards=5, shuffle=True, world=world, **options)
    return engine, batches, samestep.loader(data(), batch_size=30, shards=5, world=world, **options)


class Right:
    """A metric: how many targets are the likeliest class."""

    name = "right"

    def __init__(self) -> None:
        self._found = 0.0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._found += float((outputs.argmax(dim=1) == targets).sum())

    def compute(self, world: World) -> float:
        total = torch.tensor([self._found])
        world.all_reduce(total)
        self.reset()
        return float(total)

    def reset(self) -> None:
        self._found = 0.0


def trained(name: str, task: str, folder: Path) -> dict[str, Any]:
    """Ten steps, with a checkpoint after five; what every rank saw."""
    with samestep.start(device="cpu", strategy=LAYOUTS[name][1]) as world:
        engine, batches, evaluation = made(world, task)
        result = train(engine, batches, evaluation, folder / name)
        result["metrics"] = engine.evaluate(evaluation, [Right()])
        result["of ranks"] = all_gather([result["steps"], result["metrics"], engine.steps], world)
        result["held"] = all_gather(sum(p.numel() for p in engine.pieces.held.values() if not p.is_meta), world)
        return result


def gone_on(name: str, task: str, folder: Path) -> dict[str, Any]:
    """The second five steps from a checkpoint that another layout saved."""
    with samestep.start(device="cpu", strategy=LAYOUTS[name][1]) as world:
        return go_on(*made(world, task), folder)


def all_trained(names: list[str], task: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Every layout of as many ranks, one after the other."""
    return {name: trained(name, task, folder) for name in names}


def all_gone_on(names: list[str], task: str, folder: Path, saved: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Every layout of as many ranks, from what others have saved."""
    return {(before, name): gone_on(name, task, folder / before) for name in names for before in saved}


def losses_of(part: StrategyPart | None, task: str, rules: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and norm of six steps under some rules."""
    with samestep.start(device="cpu", strategy=part) as world:
        engine, batches, _ = made(world, task, **rules)
        return steps_of(engine, batches, 6)


def losses_under(cases: dict[str, tuple[StrategyPart | None, str, dict[str, Any]]]) -> dict[str, list[Any]]:
    """The same for some strategies of as many ranks."""
    return {name: losses_of(*case) for name, case in cases.items()}


class Heard(Observer):
    """Remembers which shards it was told of."""

    def __init__(self) -> None:
        self.shards: list[int] = []

    def end_shard(self, part: Any, outputs: Any, loss: Any) -> None:
        assert outputs.shape == (part.size, CLASSES)
        self.shards.append(part.number)


def told() -> list[list[int]]:
    """The shards of one step that observers of each rank heard of."""
    heard = Heard()
    observe(heard)
    with samestep.start(device="cpu", strategy=pipeline(2)) as world:
        engine, batches, _ = made(world, "deep")
        engine.step(next(iter(batches)))
        return all_gather(heard.shards, world)


class Spoilt(nn.Module):
    """Its second layer makes what is not finite of one sample's mark."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(inputs) / (inputs[:, :1] != 77)
        return logits


def not_finite(non_finite: str) -> dict[str, Any]:
    """What each rank makes of a step whose third shard has a loss that is not finite."""
    inputs, targets = points().tensors
    inputs[9, 0] = 77.0
    with samestep.start(device="cpu", strategy=pipeline(2)) as world:
        torch.manual_seed(0)
        net = Spoilt().double()
        rules = StepRules(non_finite=non_finite)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = samestep.Engine(net, optimizer, samestep.cross_entropy, world=world, rules=rules)
        said = ""
        for batch in samestep.loader(TensorDataset(inputs, targets), batch_size=20, shards=5, world=world):
            try:
                engine.step(batch)
            except samestep.errors.NonFiniteError as error:
                said = str(error)
                break
        weights = [engine.pieces.whole(name, p.detach()) for name, p in engine.pieces.held.items()]
        finite = all(bool(torch.isfinite(weight).all()) for weight in weights)
        return {"said": all_gather(said, world), "steps": all_gather(engine.steps, world), "finite": finite}


class Chooses(nn.Module):
    """Lets a value decide, which no stage can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.one(inputs)
        logits: torch.Tensor = self.other(hidden if hidden.sum() > 0 else -hidden)
        return logits


class Shapes(nn.Module):
    """Takes a number from one stage to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.other = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.one(inputs)
        size = hidden.shape[0]
        logits: torch.Tensor = self.other(self.two(hidden)).reshape(size, CLASSES)
        return logits


class Optional(nn.Module):
    """Has an input that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, inputs: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.other(self.one(inputs if scale is None else inputs * scale))
        return logits


REFUSED: dict[str, tuple[Callable[[], nn.Module], StrategyPart, dict[str, Any]]] = {
    "control flow": (Chooses, pipeline(2), {}),
    "optional input": (Optional, pipeline(2), {}),
    "too few modules": (Shapes, pipeline(2, "interleaved"), {}),
    "unknown stage": (Deep, pipeline(2, stages=("block.3",)), {}),
    "number of stages": (Deep, pipeline(2, stages=("blocks.1", "blocks.3")), {}),
    "compile": (Deep, pipeline(2, "zero_bubble"), {"compile": True}),
    "batch norm": (Deep, pipeline(2), {"batch_norm": "sync"}),
}


def one_step(world: World, model: nn.Module, rules: dict[str, Any], *, twice: bool = False) -> None:
    """A step with the inputs, or with the inputs given twice."""
    model.double()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world, rules=StepRules(**rules))
    batch = next(iter(samestep.loader(points(), batch_size=20, shards=5, world=world)))
    if twice:
        parts = tuple(part._replace(data=((part.data[0], part.data[0]), part.data[1])) for part in batch.parts)
        batch = replace(batch, parts=parts)
    engine.step(batch)


def refused() -> dict[str, list[str]]:
    """What each rank says of what cannot be."""
    found = {}
    for name, (model, part, rules) in REFUSED.items():
        with samestep.start(device="cpu", strategy=part) as world:
            said = ""
            try:
                one_step(world, model(), rules, twice=name == "optional input")
            except InputError as error:
                said = str(error)
            found[name] = all_gather(said, world)
    return found


def number_between_stages() -> None:
    """Refused on the rank that would hand it on."""
    with samestep.start(device="cpu", strategy=pipeline(2, stages=("two",))) as world:
        one_step(world, Shapes(), {})


class Stuck(nn.Module):
    """Never ends its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        while self.calls > 1:
            time.sleep(0.05)
        return inputs


def stuck() -> None:
    """The middle one of three stages hangs."""
    with samestep.start(device="cpu", strategy=pipeline(3)) as world:
        one_step(world, nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), Stuck(), nn.Linear(12, CLASSES)), {})
