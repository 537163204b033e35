"""Loops that are stopped in the middle and resumed: the same result, or a refusal of another loop."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

import samestep
from own_loops.cases import Setting, each, refused, same
from own_loops.modes import Points
from samestep.data.loader import Loader

STEPS, SAVED_AFTER = 11, 6  # an epoch has 4 steps
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
Schedulers = Callable[[torch.optim.Optimizer], LRScheduler]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_layers(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@dataclass
class Loop:
    """A model in training."""

    engine: samestep.Engine
    batches: Loader
    state: dict[str, Any] = field(default_factory=dict)
    results: list[tuple[float, float]] = field(default_factory=list)  # loss and learning rate
    indices: list[list[int]] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    def train(self, steps: int, after: Callable[[samestep.StepResult], None] = lambda result: None) -> None:
        done = 0
        while done < steps:
            for batch in self.batches:
                result = self.engine.step(batch)
                self.results.append((result.loss, result.lr))
                self.indices.append([int(index) for index in batch.indices])
                after(result)
                done += 1
                if done == steps:
                    break

    def manager(self, setting: Setting) -> samestep.CheckpointManager:
        state = {"state": self.state} if self.state else {}
        return samestep.CheckpointManager(setting.folder, self.engine, self.batches, **state)


def loop(
    setting: Setting,
    seed: int = 0,
    optimizer: Optimizers = sgd,
    scheduler: Schedulers | None = None,
    interval: Any = "step",
    model: Callable[[int], nn.Module] = two_layers,
    config: samestep.StepConfig | None = None,
    data: Any = None,
    **loader: Any,
) -> Loop:
    """Return a loop over 50 points in batches of 16; `seed` is that of the initial weights."""
    net = model(seed)
    made = optimizer(net)
    schedule = scheduler(made) if scheduler else None
    engine = samestep.Engine(
        net,
        made,
        nn.CrossEntropyLoss(),
        world=setting.world,
        scheduler=schedule,
        scheduler_interval=interval if schedule else None,
        config=config,
    )
    options = {"batch_size": 16, "microbatches": 4, "shuffle": True, **loader}
    return Loop(engine, samestep.loader(data or Points(), world=setting.world, **options))


def require_equal(one: Any, other: Any) -> None:
    """Require nested values with the same types and bits."""
    assert type(one) is type(other), (type(one), type(other))
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), (one, other)
    elif isinstance(one, Mapping):
        assert set(one) == set(other), (list(one), list(other))
        assert not isinstance(one, OrderedDict) or list(one) == list(other)
        for key in one:
            require_equal(one[key], other[key])
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            require_equal(*pair)
    elif isinstance(one, numpy.ndarray | numpy.generic):
        assert one.dtype == other.dtype and numpy.array_equal(one, other), (one, other)
    else:
        assert repr(one) == repr(other)


def resumes(setting: Setting, make: Callable[[int], Loop], after: Callable[[Loop], Any] | None = None) -> Any:
    """Train undisturbed and with a resumption in the middle, and require equal results.

    Args:
        setting: the surroundings of the case.
        make: function from the seed of the initial weights to a loop.
        after: called after each step with the loop.
    """

    def step(one: Loop) -> Callable[[samestep.StepResult], None]:
        return lambda result: after(one) if after else None

    whole = make(0)
    whole.train(STEPS, step(whole))
    first = make(0)
    first.train(SAVED_AFTER, step(first))
    first.manager(setting).save()
    second = make(1)
    assert second.manager(setting).resume()
    assert second.engine.steps == SAVED_AFTER
    second.train(STEPS - SAVED_AFTER, step(second))
    assert first.results + second.results == whole.results, (first.results + second.results, whole.results)
    require_equal(dict(second.model.state_dict()), dict(whole.model.state_dict()))
    require_equal(second.engine.optimizer.state_dict(), whole.engine.optimizer.state_dict())
    if whole.engine.scheduler is not None and second.engine.scheduler is not None:
        require_equal(second.engine.scheduler.state_dict(), whole.engine.scheduler.state_dict())
    return whole.model, whole.results


# --- modules with extra state ---------------------------------------------------------------------------


class Remembering(nn.Module):
    """A layer with state that is no tensor."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.extra = extra

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def remembering(extra: Any) -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(6, 8), Remembering(extra if seed == 0 else None), nn.Linear(8, 3))

    return make


def resumes_with_extra_state(setting: Setting, extra: Any) -> Any:
    return resumes(setting, lambda seed: loop(setting, seed, model=remembering(extra)))


@same
def extra_state_with_integer_keys_and_tuples_is_restored(setting: Setting) -> Any:
    return resumes_with_extra_state(setting, {1: (2, 3), "scale": 0.5, (4, 5): [None, True]})


@same
def extra_state_with_tensors_is_restored(setting: Setting) -> Any:
    return resumes_with_extra_state(setting, {"amax": [torch.ones(3), torch.tensor(2.5, dtype=torch.float64)]})


@refused("E_CHECKPOINT_WRITE")
def extra_state_that_is_an_object_is_refused_before_training(setting: Setting) -> Any:
    one = loop(setting, model=remembering(object()))
    one.manager(setting)


# --- objects in `state` ---------------------------------------------------------------------------------


@dataclass
class Patience:
    """Early stopping with the usual two methods."""

    best: float = float("inf")
    bad: int = 0
    history: list[float] = field(default_factory=list)

    def update(self, value: float) -> None:
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(value, self.best)
        self.history.append(value)

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Average:
    """Moving average of the weights as many scripts have it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.3)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.shadow = state


class Holder:
    """Any state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def resumes_with_state(setting: Setting, make: Callable[[Loop], Any], update: Callable[[Loop, Any], None]) -> Any:
    """Require that an object in `state` ends equal; `update` is called after each step."""
    loops: list[Loop] = []

    def with_state(seed: int) -> Loop:
        one = loop(setting, seed)
        one.state["it"] = make(one)
        loops.append(one)
        return one

    results = resumes(setting, with_state, lambda one: update(one, one.state["it"]))
    whole, _, second = (one.state["it"] for one in loops)
    return whole, second, results


@same
def patience_in_state_continues(setting: Setting) -> Any:
    whole, second, results = resumes_with_state(
        setting, lambda one: Patience(), lambda one, patience: patience.update(one.results[-1][0])
    )
    assert len(whole.history) == STEPS
    require_equal(second.state_dict(), whole.state_dict())
    return whole.state_dict(), results


@same
def a_moving_average_in_state_continues(setting: Setting) -> Any:
    whole, second, results = resumes_with_state(
        setting, lambda one: Average(one.model), lambda one, average: average.update(one.model)
    )
    require_equal(second.shadow, whole.shadow)
    return whole.shadow, results


@same
def a_module_in_state_continues(setting: Setting) -> Any:
    whole, second, results = resumes_with_state(
        setting,
        lambda one: torch.optim.swa_utils.AveragedModel(one.model),
        lambda one, average: average.update_parameters(one.model),
    )
    require_equal(dict(second.state_dict()), dict(whole.state_dict()))
    assert int(whole.n_averaged) == STEPS
    return whole, results


@same
def a_generator_in_state_continues(setting: Setting) -> Any:
    drawn: dict[int, list[float]] = {}

    def draw(one: Loop, generator: torch.Generator) -> None:
        drawn.setdefault(id(one), []).append(float(torch.rand((), generator=generator)))

    _, _, results = resumes_with_state(setting, lambda one: torch.Generator().manual_seed(0), draw)
    whole, first, second = drawn.values()
    assert first + second == whole
    return whole, results


@same
def a_plateau_scheduler_in_state_continues(setting: Setting) -> Any:
    whole, second, results = resumes_with_state(
        setting,
        lambda one: ReduceLROnPlateau(one.engine.optimizer, factor=0.5, patience=0),
        lambda one, plateau: plateau.step(one.results[-1][0]),
    )
    rates = {lr for _, lr in results[1]}
    assert len(rates) > 1, "the rate was never reduced"
    require_equal(second.state_dict(), whole.state_dict())
    return whole.state_dict(), results


def restored(setting: Setting, value: Any) -> Any:
    """Return a value after a save and a resumption."""
    one, other = loop(setting), loop(setting, 1)
    one.state["it"], other.state["it"] = Holder(value), Holder()
    one.manager(setting).save()
    assert other.manager(setting).resume()
    require_equal(other.state["it"].value, value)
    return repr(value)


@same
def tensors_in_containers_are_restored(setting: Setting) -> Any:
    shared = torch.arange(6.0)
    tensors = [shared, shared.view(2, 3).t(), torch.tensor(1), torch.empty(0, 3), torch.ones(2, dtype=torch.bfloat16)]
    return restored(setting, {"a.b": tensors, "a": {"b": tuple(tensors)}, 3: torch.tensor([True])})


@refused("E_CHECKPOINT_WRITE")
def state_that_no_file_can_hold_is_refused_before_training(setting: Setting) -> Any:
    one = loop(setting)
    one.state["it"] = Holder({"function": lambda: 1})
    one.manager(setting)


@refused("E_CHECKPOINT_WRITE")
def a_scheduler_that_holds_a_module_is_refused_before_training(setting: Setting) -> Any:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        scheduler = LambdaLR(optimizer, lambda step: 1.0)
        scheduler.model = nn.Linear(2, 2)  # type: ignore[attr-defined]
        return scheduler

    loop(setting, scheduler=make).manager(setting)


@refused("E_RESUME_CHANGED")
def another_object_in_state_is_refused(setting: Setting) -> Any:
    one, other = loop(setting), loop(setting)
    one.state["patience"] = Patience()
    other.state["stopping"] = Patience()
    one.manager(setting).save()
    other.manager(setting).resume()


# --- several engines ------------------------------------------------------------------------------------


class Adversaries:
    """A generator and a critic over one loader."""

    def __init__(self, setting: Setting, seed: int = 0, critic_steps: int = 1, dropout: float = 0.0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 6))
            critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
        adam = torch.optim.Adam

        def deceive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.softplus(-critic(outputs)).mean()

        def judge(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.softplus(outputs * (targets[:, None] - 1.0)).mean()

        self.generator = samestep.Engine(
            generator, adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9)), deceive, world=setting.world
        )
        self.critic = samestep.Engine(critic, adam(critic.parameters(), lr=0.01), judge, world=setting.world)
        self.batches = samestep.loader(Points(), batch_size=16, microbatches=4, shuffle=True, world=setting.world)
        self._critic_steps, self.losses = critic_steps, list[tuple[float, ...]]()

    @property
    def engines(self) -> dict[str, samestep.Engine]:
        return {"generator": self.generator, "critic": self.critic}

    def train(self, steps: int) -> None:
        done = 0
        while done < steps:
            for batch in self.batches:
                losses = [self.critic.step(batch).loss for _ in range(self._critic_steps)]
                self.losses.append((*losses, self.generator.step(batch).loss))
                done += 1
                if done == steps:
                    break

    def manager(self, setting: Setting) -> samestep.CheckpointManager:
        return samestep.CheckpointManager(setting.folder, self.engines, self.batches)


def adversaries_resume(setting: Setting, **options: Any) -> Any:
    whole = Adversaries(setting, **options)
    whole.train(STEPS)
    first = Adversaries(setting, **options)
    assert not first.manager(setting).resume()
    first.train(SAVED_AFTER)
    first.manager(setting).save()
    second = Adversaries(setting, 1, **options)
    assert second.manager(setting).resume()
    second.train(STEPS - SAVED_AFTER)
    for name, engine in whole.engines.items():
        require_equal(dict(second.engines[name].model.state_dict()), dict(engine.model.state_dict()))
        require_equal(second.engines[name].optimizer.state_dict(), engine.optimizer.state_dict())
        assert second.engines[name].steps == engine.steps
    return [engine.model for engine in whole.engines.values()], whole.losses


@same
def two_engines_resume_from_one_checkpoint(setting: Setting) -> Any:
    return adversaries_resume(setting)


@same
def engines_with_different_numbers_of_steps_resume(setting: Setting) -> Any:
    return adversaries_resume(setting, critic_steps=3)


@same
def engines_with_dropout_resume(setting: Setting) -> Any:
    return adversaries_resume(setting, dropout=0.5)


class Noise(nn.Module):
    """Returns random numbers, whatever the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.drawn: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(len(inputs), 3)
        self.drawn.append(noise)
        return noise * self.scale


@same
def two_engines_draw_different_numbers(setting: Setting) -> Any:
    one, other = (loop(setting, model=lambda seed: Noise()) for _ in range(2))
    one.train(1)
    other.train(1)
    assert not torch.equal(one.model.drawn[0], other.model.drawn[0])
    later = loop(setting, model=lambda seed: Noise())
    later.train(1)
    assert torch.equal(one.model.drawn[0], later.model.drawn[0]), "an engine of its own has other numbers"
    return one.results, other.results


@refused("E_RESUME_CHANGED")
def a_missing_engine_is_refused(setting: Setting) -> Any:
    one = Adversaries(setting)
    one.manager(setting).save()
    samestep.CheckpointManager(setting.folder, {"generator": one.generator}, one.batches).resume()


@refused("E_RESUME_CHANGED")
def several_engines_in_place_of_one_are_refused(setting: Setting) -> Any:
    loop(setting).manager(setting).save()
    Adversaries(setting).manager(setting).resume()


@refused("E_RESUME_CHANGED")
def another_set_of_loaders_is_refused(setting: Setting) -> Any:
    one = loop(setting)
    samestep.CheckpointManager(setting.folder, one.engine, {"train": one.batches}).save()
    samestep.CheckpointManager(setting.folder, one.engine, {"other": one.batches}).resume()


# --- changes that a resumption refuses ------------------------------------------------------------------


def resumed_with(setting: Setting, *, accept: bool = False, **changes: Any) -> Loop:
    one = loop(setting)
    one.train(2)
    one.manager(setting).save()
    other = loop(setting, **changes)
    assert other.manager(setting).resume(accept_changes=accept)
    return other


CHANGES: dict[str, dict[str, Any]] = {
    "another_batch_size_is_refused": {"batch_size": 8},
    "another_number_of_microbatches_is_refused": {"microbatches": 8},
    "another_seed_of_the_noise_is_refused": {"config": samestep.StepConfig(seed=3)},
    "a_longer_dataset_is_refused": {"data": Points(60)},
    "an_order_without_shuffling_is_refused": {"shuffle": False},
    "an_order_by_lengths_is_refused": {"lengths": list(range(50))},
    "dropping_the_last_batch_is_refused": {"drop_last": True},
}


@refused("E_RESUME_CHANGED")
@each(CHANGES)
def change_of_the_loop_is_refused(setting: Setting, changes: dict[str, Any]) -> Any:
    resumed_with(setting, **changes)


@refused("E_RESUME_CHANGED")
def another_seed_of_the_loader_is_refused(setting: Setting) -> Any:
    one = loop(setting)
    one.train(2)
    one.manager(setting).save()
    other = loop(setting)
    other.batches = samestep.loader(Points(), batch_size=16, microbatches=4, shuffle=True, seed=1, world=setting.world)
    other.manager(setting).resume()


@same
def accepted_changes_of_the_loop_continue(setting: Setting) -> Any:
    other = resumed_with(setting, accept=True, batch_size=32, data=Points(60), config=samestep.StepConfig(seed=3))
    assert other.engine.steps == 2 and other.batches.cursor.samples == 32
    other.train(2)
    assert [len(indices) for indices in other.indices] == [28, 32]
    return other.model, other.results


@same
def another_number_of_workers_is_no_change(setting: Setting) -> Any:
    other = resumed_with(setting, num_workers=1, prefetch_factor=3)
    other.train(3)
    other.batches.close()
    return other.model, other.results


@same
def a_loop_resumes_at_the_end_of_an_epoch_and_after_the_last(setting: Setting) -> Any:
    whole, one = loop(setting), loop(setting)
    whole.train(8)
    for number in range(1, 3):
        other = loop(setting, number)
        assert other.manager(setting).resume() == (number > 1)
        (other if number > 1 else one).train(4)
        (other if number > 1 else one).manager(setting).save()
    require_equal(dict(other.model.state_dict()), dict(whole.model.state_dict()))
    last = loop(setting, 5)
    last.manager(setting).resume()
    assert last.batches.cursor.epoch == 2
    return whole.model


@same
def a_return_to_a_plateau_before_its_first_value_continues(setting: Setting) -> Any:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    one = loop(setting, scheduler=make, interval="epoch")
    manager = one.manager(setting)
    manager.save()
    for _ in range(3):
        one.train(1)
        one.engine.scheduler.step(1.0)
    assert one.engine.optimizer.param_groups[0]["lr"] == 0.025
    manager.resume()
    one.train(1)
    assert one.results[-1] == one.results[0]
    return one.model, one.results
