"""Schedulers of torch, saved and resumed in the middle: the rates of a plain loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from own_loops.cases import Setting, each, same
from own_loops.resume import STEPS, Loop, Optimizers, Schedulers, loop, resumes, sgd

EPOCH = 4  # steps


def plain_rates(optimizer: Optimizers, scheduler: Schedulers, period: int) -> list[float]:
    """Return the rates of a plain loop whose scheduler is stepped every `period` steps."""
    made = optimizer(nn.Linear(2, 2))
    schedule = scheduler(made)
    rates = []
    for step in range(STEPS):
        rates.append(float(made.param_groups[0]["lr"]))
        made.step()
        if (step + 1) % period == 0:
            schedule.step()
    return rates


def follows_plain_loop(
    setting: Setting, scheduler: Schedulers, optimizer: Optimizers = sgd, interval: str = "step"
) -> Any:
    """Require the rates of a plain loop, and equal results after a resumption."""
    model, results = resumes(setting, lambda seed: loop(setting, seed, optimizer, scheduler, interval))
    rates = [lr for _, lr in results]
    assert rates == plain_rates(optimizer, scheduler, 1 if interval == "step" else EPOCH), rates
    assert len(set(rates)) > 1, "the schedule is constant"
    return model, results


class Falling:
    """A scale function of `CyclicLR` that is an object."""

    def __init__(self) -> None:
        self.called: dict[int, int] = {}

    def __call__(self, cycle: float) -> float:
        self.called[int(cycle)] = self.called.get(int(cycle), 0) + 1
        return 0.5 ** self.called[int(cycle)]


class Remembers:
    """A factor that depends on earlier calls."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.by_step: dict[int, float] = {}

    def __call__(self, step: int) -> float:
        self.seen.append(step)
        self.by_step[step] = 1 / len(self.seen)
        return sum(self.by_step.values()) / len(self.by_step)


class ByTable(LRScheduler):
    """A scheduler of a user, with integer keys, tuples and a growing history."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.table = {(0, 5): 1.0, (5, 9): 0.5, (9, 99): 0.1}
        self.factors = {0: 1.0}
        self.history: list[torch.Tensor] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        factor = next(value for (begin, end), value in self.table.items() if begin <= self.last_epoch < end)
        self.factors[self.last_epoch] = factor * self.factors.get(self.last_epoch - 3, 1.0)
        self.history.append(torch.tensor(factor))
        return [base * self.factors[self.last_epoch] for base in self.base_lrs]


SCHEDULERS: dict[str, Schedulers] = {
    "step_lr": lambda optimizer: lr_scheduler.StepLR(optimizer, 4),
    "multi_step_lr": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 8, 9, 9]),
    "constant_lr": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 8),
    "linear_lr": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8),
    "exponential_lr": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "polynomial_lr": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9, power=2.0),
    "cosine_annealing_lr": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20, 0.001),
    "cosine_annealing_warm_restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "cyclic_lr": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, mode="triangular2"),
    "cyclic_lr_with_a_function_that_counts": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=3, scale_fn=Falling()
    ),
    "one_cycle_lr": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "lambda_lr": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "lambda_lr_with_an_object_that_remembers": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Remembers()),
    "multiplicative_lr": lambda optimizer: lr_scheduler.MultiplicativeLR(
        optimizer, lambda step: 0.9 if step % 2 else 0.8
    ),
    "swa_lr": lambda optimizer: SWALR(optimizer, swa_lr=0.01, anneal_epochs=8),
    "a_scheduler_of_the_user": ByTable,
}


@same
@each(SCHEDULERS)
def scheduler_of_one_group(setting: Setting, scheduler: Schedulers) -> Any:
    return follows_plain_loop(setting, scheduler)


@same
def step_lr_in_epochs(setting: Setting) -> Any:
    return follows_plain_loop(setting, lambda optimizer: lr_scheduler.StepLR(optimizer, 1), interval="epoch")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@same
def one_cycle_lr_with_betas(setting: Setting) -> Any:
    return follows_plain_loop(
        setting, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30, three_phase=True), adamw
    )


@same
def sequential_lr_of_warm_up_and_milestones(setting: Setting) -> Any:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.MultiStepLR(optimizer, [2, 5])], [3])

    return follows_plain_loop(setting, make)


@same
def sequential_lr_within_chained_scheduler(setting: Setting) -> Any:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 9), lr_scheduler.MultiStepLR(optimizer, [1, 4])]
        inner = lr_scheduler.SequentialLR(optimizer, parts, [4])
        return lr_scheduler.ChainedScheduler([inner, lr_scheduler.ExponentialLR(optimizer, 0.95)])

    return follows_plain_loop(setting, make)


def tensor_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64))


@same
def step_lr_of_a_rate_that_is_a_tensor(setting: Setting) -> Any:
    return follows_plain_loop(setting, lambda optimizer: lr_scheduler.StepLR(optimizer, 4), tensor_rate)


@same
def one_cycle_lr_of_a_rate_that_is_a_tensor(setting: Setting) -> Any:
    return follows_plain_loop(
        setting, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30), tensor_rate
    )


@same
def several_groups_with_their_own_rates(setting: Setting) -> Any:
    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        return torch.optim.SGD([{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}], lr=0.1)

    factors: list[Callable[[int], float]] = [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
    return follows_plain_loop(setting, lambda optimizer: lr_scheduler.LambdaLR(optimizer, factors), two_groups)


def plateau(mode: Any) -> Schedulers:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return lr_scheduler.ReduceLROnPlateau(optimizer, mode, factor=0.5, patience=0, threshold=0.05, cooldown=1)

    return make


@same
@each({"reduce_lr_on_plateau": "min", "reduce_lr_on_plateau_of_a_maximum": "max"})
def plateau_resumes(setting: Setting, mode: str) -> Any:
    def after(one: Loop) -> None:
        if one.batches.cursor.samples == 0 or one.engine.steps % 3 == 0:
            assert one.engine.scheduler is not None
            one.engine.scheduler.step(one.results[-1][0])

    def make(seed: int) -> Loop:
        return loop(setting, seed, sgd, plateau(mode), "epoch")

    model, results = resumes(setting, make, after)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    expected, schedule = [], plateau(mode)(optimizer)
    for step, (loss, _) in enumerate(results, 1):
        expected.append(optimizer.param_groups[0]["lr"])
        if step % EPOCH == 0 or step % 3 == 0:
            schedule.step(loss)
    assert [lr for _, lr in results] == expected
    assert len(set(expected)) > 1
    return model, results
