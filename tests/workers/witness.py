"""Rank functions for `unit/engine/test_corruption_witness.py`: steps with and without flipped bits in gradients."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import samestep
from helpers.batches import batch_of, random_batch, random_data
from helpers.models import Normed, Perceptron, Tokens, seeded
from samestep.config import StepConfig, StrategyConfig
from samestep.data.batch import GlobalBatch
from samestep.distributed.rng import seed_generators
from samestep.engine.engine import Engine
from samestep.errors import InputError, RankMismatchError, WitnessError
from samestep.microbatches import owned_microbatches
from workers.loader import gathered

World = samestep.World
MICROBATCHES = 8
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def features(world: World, seed: int) -> GlobalBatch:
    return random_batch(world, 19, MICROBATCHES, seed=seed)


def few_features(world: World, seed: int) -> GlobalBatch:
    """Return a batch of which some ranks of four have no sample."""
    return random_batch(world, 1 + seed % 3, MICROBATCHES, seed=seed)


def forward_of_values(model: nn.Module, data: Any) -> dict[str, Any]:
    inputs, targets = data
    outputs = model(inputs)
    return {"loss": samestep.cross_entropy(outputs, targets), "size": outputs.abs().mean() + random.random()}


def single_features(world: World, seed: int) -> GlobalBatch:
    inputs, targets = random_data(19, seed=seed)
    return batch_of(world, inputs.float(), targets, MICROBATCHES)


def tokens(world: World, seed: int) -> GlobalBatch:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randint(0, 11, (2, 19, 5), generator=generator)
    return batch_of(world, inputs, targets, MICROBATCHES)


class Stateful(nn.Module):
    """Changes buffers and attributes in the forward, writes its inputs, and registers a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Normed()
        self.register_buffer("forwards", torch.tensor(0))
        self.register_buffer("last_mean", torch.zeros(6))
        self.calls, self.previous = 0, torch.zeros(6, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(len(inputs), 1, dtype=inputs.dtype), persistent=False)
        inputs.mul_(2).add_(0.01 * self.previous + 0.001 * self.calls + 0.01 * self.last_mean)
        if self.training:
            self.forwards += 1
            self.calls += 1
            self.last_mean = inputs.mean(0)
            self.previous = inputs[0].clone()
        return self.net(inputs * self.cache[: len(inputs)].mean())


@dataclass(frozen=True)
class Setting:
    """Model, data and options of a step."""

    model: Callable[[], nn.Module]
    batch: Callable[[World, int], GlobalBatch]
    options: dict[str, Any]
    forward: Callable[[nn.Module, Any], Any] | None = None
    buffers: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    "dropout and batch norm": Setting(lambda: seeded(0, Normed), features, {}),
    "bf16": Setting(lambda: seeded(0, Normed, dtype=torch.float32), single_features, {"precision": "bf16"}),
    "fp16": Setting(lambda: seeded(0, Normed, dtype=torch.float32), single_features, {"precision": "fp16"}),
    "tied weights": Setting(lambda: seeded(0, Tokens, 11, 6, 0.2), tokens, {}),
    "fast": Setting(lambda: seeded(0, Normed), features, {"reduction": "fast", "merge": "off"}),
    "recomputed layers": Setting(lambda: seeded(0, Normed), features, {"recompute": ("*",)}),
    "compiled": Setting(lambda: seeded(0, Normed), features, {"compile": True}),
    "state": Setting(lambda: seeded(0, Stateful), features, {}, buffers={"last_mean": "last"}),
    "forward function": Setting(lambda: seeded(0, Normed), features, {}, forward_of_values),
    "few samples": Setting(lambda: seeded(0, Perceptron), few_features, {}),
}


def engine_of(world: World, setting: Setting, every: int | None = 1) -> Engine:
    model = setting.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = StepConfig(**setting.options)
    return Engine(
        model,
        optimizer,
        samestep.cross_entropy,
        world=world,
        config=config,
        callbacks=[samestep.Witness(every)] if every is not None else [],
        buffers=setting.buffers,
    )


@dataclass
class Flip:
    """A bit of a gradient, in one backward of one rank."""

    rank: int
    is_repeated: bool  # in the computation of another rank's microbatch
    parameter: int
    element: int
    bit: int


class FaultyDevice:
    """Flips one bit of the memory of a gradient, by hooks on all parameters.

    Attributes:
        flip: the flip of the next step; None for none.
        is_permanent: the bit is flipped in every backward of the rank.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.flip, self.is_permanent = engine, None, False
        self.flipped = self._backward = 0
        self._parameters = list(engine.model.parameters())
        for number, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(lambda p, number=number: self._hook(number, p))

    def begin(self, flip: Flip | None, *, is_permanent: bool = False) -> None:
        self.flip, self.is_permanent, self.flipped, self._backward = flip, is_permanent, 0, 0

    def _hook(self, number: int, parameter: torch.Tensor) -> None:
        flip, world = self.flip, self._engine.world
        if flip is None or world.rank != flip.rank or number != flip.parameter:
            return
        count = len(owned_microbatches(MICROBATCHES, world.size, world.rank))
        witnessed = count if flip.is_repeated else (self._engine.steps + 1) % count
        self._backward += 1
        if self.is_permanent or self._backward == witnessed + 1:
            bits = parameter.grad.view(_INTEGERS[parameter.grad.element_size()]).view(-1)
            bits[flip.element] ^= (
                1 << flip.bit if flip.bit < 8 * bits.element_size() - 1 else torch.iinfo(bits.dtype).min
            )
            self.flipped += 1


def random_flip(engine: Engine, source: random.Random, *, is_repeated: bool) -> Flip:
    parameters = list(engine.model.parameters())
    number = source.randrange(len(parameters))
    parameter = parameters[number]
    bit = source.randrange(8 * parameter.element_size())
    return Flip(source.randrange(engine.world.size), is_repeated, number, source.randrange(parameter.numel()), bit)


def state_of(engine: Engine) -> Any:
    """Return everything that a step changes, as bits."""
    training = engine.training
    slots = [value for state in training.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    tensors = [*engine.model.state_dict().values(), *slots]
    return (
        engine.steps,
        engine.scaler.state_dict(),
        [t.contiguous().view(-1).view(torch.uint8).tolist() for t in tensors],
    )


def flip_bits(world: World, name: str, count: int, *, is_repeated: bool = False) -> list[Any]:
    """Return a description of each flip that was not reported as it should be, of `count` flips."""
    engine, source, wrong = engine_of(world, SETTINGS[name]), random.Random(world.size), []
    device = FaultyDevice(engine)
    for number in range(count):
        flip = random_flip(engine, source, is_repeated=is_repeated)
        batch, before = SETTINGS[name].batch(world, number), state_of(engine)
        device.begin(flip)
        try:
            engine.step(batch)
            named: tuple[int, ...] | None = None
        except WitnessError as error:
            named = error.ranks
        flipped = device.flipped == (world.rank == flip.rank)
        # On two ranks, the third result is that of the owner again: it does not decide against the witness.
        expected = (0, 1) if world.size == 2 and is_repeated else (flip.rank,)
        if named != expected or not flipped or state_of(engine) != before:
            wrong.append((number, str(flip), named, flipped, state_of(engine) == before))
        device.begin(None)
        if number % 5 == 0:
            engine.step(batch)
    return wrong


def errors_of(world: World, *, is_permanent: bool, is_repeated: bool = False) -> tuple[str, tuple[int, ...]]:
    """Return report and ranks of a flip on the last rank, after a clean step."""
    setting = SETTINGS["dropout and batch norm"]
    engine = engine_of(world, setting)
    device = FaultyDevice(engine)
    engine.step(setting.batch(world, 0))
    device.begin(Flip(world.size - 1, is_repeated, 0, 3, 40), is_permanent=is_permanent)
    try:
        engine.step(setting.batch(world, 1))
    except WitnessError as error:
        return str(error), error.ranks
    return "", ()


def train(world: World, name: str, steps: int, every: int | None) -> list[Any]:
    """Return losses, the state after correct steps, and the next random numbers."""
    setting = SETTINGS[name]
    engine = engine_of(world, setting, every)
    seed_generators(0)
    results = [engine.step(setting.batch(world, number), forward=setting.forward) for number in range(steps)]
    caches = [key for key, _ in engine.model.named_buffers()]
    values = [(result.loss, str(result.grad_norm), result.values) for result in results]
    return [values, caches, state_of(engine), float(torch.rand(())), random.random()]


def wrong_buffer(world: World) -> tuple[str, tuple[int, ...]]:
    """Return report and ranks of a running mean that is wrong on rank 0, which changes no gradient of the step."""
    setting = SETTINGS["dropout and batch norm"]
    engine = engine_of(world, setting)
    if world.rank == 0:

        def flip(module: nn.Module, inputs: Any, outputs: torch.Tensor) -> None:
            module.running_mean.data.view(torch.int64)[2] ^= 1

        engine.model[1].register_forward_hook(flip)
    try:
        engine.step(setting.batch(world, 0))
    except WitnessError as error:
        return str(error), error.ranks
    return "", ()


def refused(world: World, *, every: int = 1, data: Any = None, **options: Any) -> str:
    """Return the first line of the error of an engine, or of its first step."""
    try:
        setting = replace(SETTINGS["dropout and batch norm"], options=options)
        engine = engine_of(world, setting, every)
        batch = setting.batch(world, 0)
        if data is not None:
            local = tuple(microbatch._replace(data=data) for microbatch in batch.local_microbatches)
            batch = replace(batch, local_microbatches=local)
        engine.step(batch)
    except (InputError, RankMismatchError) as error:
        return str(error).splitlines()[0]
    return ""


def refresh(world: World) -> str:
    """Return the report of a flip after a parameter was frozen, which renews the components of an engine."""
    setting = SETTINGS["dropout and batch norm"]
    engine = engine_of(world, setting)
    device = FaultyDevice(engine)
    engine.step(setting.batch(world, 0))
    engine.model[4].requires_grad_(False)
    device.begin(Flip(0, False, 0, 0, 1))
    try:
        engine.step(setting.batch(world, 1))
    except WitnessError as error:
        return str(error).splitlines()[0]
    return ""


def run_flips(names: tuple[str, ...], count: int) -> dict[str, list[Any]]:
    """Return the wrong reports of `count` flips of each kind and setting, by rank."""
    with samestep.start(device="cpu") as world:
        return {
            f"{name}, repeated {is_repeated}": gathered(flip_bits(world, name, count, is_repeated=is_repeated))
            for name in names
            for is_repeated in (False, True)
        }


def run_training(names: tuple[str, ...], steps: int, every: int | None) -> dict[str, list[Any]]:
    with samestep.start(device="cpu") as world:
        return {name: gathered(train(world, name, steps, every)) for name in names}


def run_errors() -> dict[str, list[Any]]:
    with samestep.start(device="cpu") as world:
        return {
            "owner": gathered(errors_of(world, is_permanent=False)),
            "witness": gathered(errors_of(world, is_permanent=False, is_repeated=True)),
            "permanent": gathered(errors_of(world, is_permanent=True)),
            "buffer": gathered(wrong_buffer(world)),
            "frozen": gathered(refresh(world)),
        }


def run_refusals(strategy: str) -> dict[str, list[str]]:
    """Return the errors of options that exclude a witness, by rank."""
    with samestep.start(device="cpu", strategy=StrategyConfig(name=strategy)) as world:
        if strategy != "ddp":
            return {strategy: gathered(refused(world))}
        data = {"inputs": [torch.zeros(2, 6), {3, 4}]}
        return {
            "ddp": gathered(refused(world)),
            "sync": gathered(refused(world, batch_norm="sync")),
            "global": gathered(refused(world, gather="global")),
            "zero": gathered(refused(world, every=0)),
            "different": gathered(refused(world, every=1 + world.rank)),
            "data": gathered(refused(world, data=data)),
        }
