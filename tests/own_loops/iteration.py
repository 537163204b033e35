"""Loops over loaders: peeking, early ends, nested loops, several loaders, and the position after a resumption."""

import signal
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import RandomSampler, Subset

import samestep
from own_loops.cases import Setting, digest, refused, same
from own_loops.data import Noisy
from samestep.microbatches import Cursor


class Loop:
    """Engine, training data and test data of a loop.

    Attributes:
        seen: samples of each step.
    """

    def __init__(self, setting: Setting, dataset: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.engine = samestep.Engine(self.model, optimizer, nn.CrossEntropyLoss(), world=setting.world)
        options = {"batch_size": 16, "microbatches": 4, "shuffle": "sampler" not in options, **options}
        data = Noisy() if dataset is None else dataset
        self.batches = samestep.loader(data, world=setting.world, **options)
        self.tests = samestep.loader(Noisy(30), batch_size=8, microbatches=4, world=setting.world)
        self.seen: list[list[int]] = []

    def step(self, batch: Any) -> None:
        self.engine.step(batch)
        self.seen.append(batch.indices.tolist())

    def train(self, epochs: int = 2) -> None:
        for _ in range(epochs):
            for batch in self.batches:
                self.step(batch)

    @property
    def result(self) -> Any:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}, self.seen


def plain(setting: Setting, epochs: int = 2, **options: Any) -> Any:
    """Return the result of a loop that does nothing else."""
    loop = Loop(setting, **options)
    loop.train(epochs)
    return loop.result


@same
def two_epochs_use_each_sample_once_and_in_other_orders(setting: Setting) -> Any:
    state, seen = plain(setting)
    first, second = ([index for batch in part for index in batch] for part in (seen[:4], seen[4:]))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    return state, seen


@same
def the_first_batch_before_training(setting: Setting) -> Any:
    loop = Loop(setting)
    first = next(iter(loop.batches))
    loop.train()
    assert loop.seen[0] == first.indices.tolist()
    assert digest(loop.result) == digest(plain(setting))
    return loop.result


@same
def peeking_between_epochs(setting: Setting) -> Any:
    loop = Loop(setting)
    loop.train(epochs=1)
    if setting.world.is_main:
        next(iter(loop.batches))
        next(iter(loop.tests))
    loop.train(epochs=1)
    assert digest(loop.result) == digest(plain(setting))
    return loop.result


@same
def peeking_on_rank_0_keeps_the_random_numbers_of_the_script(setting: Setting) -> Any:
    loop = Loop(setting)
    torch.manual_seed(3)
    if setting.world.is_main:
        next(iter(loop.batches))
    return torch.rand(4)


@same
def an_evaluation_that_ends_early_starts_again_at_the_beginning(setting: Setting) -> Any:
    loop, values = Loop(setting), []
    for _ in range(2):
        for batch in loop.batches:
            loop.step(batch)
        tested = [batch.indices.tolist() for batch in islice(loop.tests, 2)]
        assert tested == [list(range(8)), list(range(8, 16))]
        for batch in loop.tests:
            assert batch.begin == Cursor()
            break
        values.append(loop.engine.evaluate(loop.tests))
        assert values[-1]["samples"] == 30
    return loop.result, values


@same
def evaluating_the_training_data_keeps_the_position(setting: Setting) -> Any:
    loop, values = Loop(setting), []
    for _ in range(2):
        for batch in loop.batches:
            loop.step(batch)
            values.append(loop.engine.evaluate(loop.batches))
            assert values[-1]["samples"] == 50
    assert digest(loop.result) == digest(plain(setting))
    return loop.result, values


@same
def an_epoch_that_ends_early_continues(setting: Setting) -> Any:
    loop = Loop(setting)
    for number, batch in enumerate(loop.batches):
        if number == 2:
            break
        loop.step(batch)
    for batch in islice(loop.batches, 2):
        loop.step(batch)
    loop.train(epochs=1)
    assert digest(loop.result) == digest(plain(setting))
    return loop.result


@same
def two_engines_with_the_same_batch(setting: Setting) -> Any:
    one, other = Loop(setting), Loop(setting)
    for _ in range(2):
        for batch in one.batches:
            one.step(batch)
            other.step(batch)
    assert one.batches.cursor == Cursor(2, 0)
    assert other.batches.cursor == Cursor()
    return one.result, other.result


@same
def batches_without_a_step_do_not_repeat_the_epoch(setting: Setting) -> Any:
    loop = Loop(setting)
    for _ in range(2):
        for batch in loop.batches:
            if batch.size == 16:  # the last one is left out by hand
                loop.step(batch)
    assert loop.batches.cursor == Cursor(2, 0)
    assert digest(loop.result) == digest(plain(setting, drop_last=True))
    return loop.result


# --- resume ---


def checkpoints_of(setting: Setting, loop: Loop) -> samestep.CheckpointManager:
    return samestep.CheckpointManager(setting.folder / "checkpoints", loop.engine, loop.batches)


def stop_and_resume(setting: Setting, steps: int, **options: Any) -> Loop:
    """Train for a number of steps, save within the loop, and return a new loop that has resumed."""
    loop = Loop(setting, **options)
    with checkpoints_of(setting, loop) as checkpoints:
        for _ in samestep.epochs(loop.batches, 9):
            for batch in loop.batches:
                loop.step(batch)
                if len(loop.seen) == steps:
                    checkpoints.save()
                    break
            if len(loop.seen) == steps:
                break
    other = Loop(setting, **options)
    other.seen = loop.seen
    with checkpoints_of(setting, other) as checkpoints:
        assert checkpoints.resume()
    return other


@same
def a_checkpoint_after_a_step_in_the_body(setting: Setting) -> Any:
    loop = stop_and_resume(setting, 2)
    assert loop.batches.cursor == Cursor(0, 32)
    loop.train()
    assert digest(loop.result) == digest(plain(setting))
    return loop.result


@same
def a_checkpoint_before_a_step_in_the_body(setting: Setting) -> Any:
    loop = Loop(setting)
    with checkpoints_of(setting, loop) as checkpoints:
        for batch in loop.batches:
            if len(loop.seen) == 3:
                checkpoints.save()
                break
            loop.step(batch)
    other = Loop(setting)
    other.seen = loop.seen
    with checkpoints_of(setting, other) as checkpoints:
        assert checkpoints.resume()
    other.train()
    assert digest(other.result) == digest(plain(setting))
    return other.result


@same
def epochs_resume_at_the_right_epoch(setting: Setting) -> Any:
    loop, numbers = stop_and_resume(setting, 6), []
    for epoch in samestep.epochs(loop.batches, 3):
        numbers.append(epoch)
        for batch in loop.batches:
            loop.step(batch)
    assert numbers == [1, 2]
    assert digest(loop.result) == digest(plain(setting, epochs=3))
    return loop.result


@same
def epochs_of_a_limited_number_of_batches(setting: Setting) -> Any:
    loop, numbers = Loop(setting), []
    for epoch in samestep.epochs(loop.batches, 2):
        numbers.append(epoch)
        for batch in islice(loop.batches, 3):
            loop.step(batch)
    assert numbers == [0, 0, 1, 1]
    assert digest(loop.result) == digest(plain(setting))
    return loop.result


@refused("E_LOADER")
def epochs_of_a_loader_that_no_step_uses(setting: Setting) -> Any:
    loop = Loop(setting)
    for _ in samestep.epochs(loop.tests, 2):
        loop.train(1)


@same
def epochs_of_checkpoints_continue_after_a_stop_request(setting: Setting) -> Any:
    loop, stop = Loop(setting), setting.world.context.stop
    with checkpoints_of(setting, loop) as checkpoints:
        for _ in checkpoints.epochs(3):
            for batch in loop.batches:
                loop.step(batch)
                if len(loop.seen) == 5 and setting.world.rank == setting.world.size - 1:
                    stop.number = signal.SIGTERM  # the step after this one receives the request
    stop.number = None
    assert loop.batches.cursor == Cursor(1, 32)
    other, numbers = Loop(setting), []
    other.seen = loop.seen
    with checkpoints_of(setting, other) as checkpoints:
        for epoch in checkpoints.epochs(3):
            numbers.append(epoch)
            for batch in other.batches:
                other.step(batch)
            checkpoints.save(other.engine.evaluate(other.tests))
    assert numbers == [1, 2]
    assert digest(other.result) == digest(plain(setting, epochs=3))
    third = Loop(setting)
    with checkpoints_of(setting, third) as checkpoints:
        assert list(checkpoints.epochs(3)) == []
        assert checkpoints.resume("best")
    return other.result


@same
def a_resume_within_an_epoch_of_a_sampler(setting: Setting) -> Any:
    options = {"sampler": RandomSampler(range(50), generator=torch.Generator().manual_seed(2))}
    loop = stop_and_resume(setting, 6, **options)
    loop.train(epochs=1)
    assert digest(loop.result) == digest(plain(setting, **options))
    return loop.result


class Growing(Noisy):
    """Points whose number and scale depend on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 18 + 16 * getattr(self, "epoch", 0)

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs * (1 + self.epoch), target


@same
def a_resume_within_an_epoch_of_a_growing_dataset(setting: Setting) -> Any:
    loop = stop_and_resume(setting, 4, dataset=Growing())
    assert loop.batches.cursor == Cursor(1, 32)
    loop.train()
    assert digest(loop.result) == digest(plain(setting, epochs=3, dataset=Growing()))
    return loop.result


@refused("E_RESUME_CHANGED")
def a_position_behind_the_end_of_the_data(setting: Setting) -> Any:
    loop = Loop(setting)
    loop.batches.cursor = Cursor(0, 64)
    loop.train()


@refused("E_RESUME_CHANGED")
def a_resume_on_fewer_samples_than_the_position(setting: Setting) -> Any:
    stop_and_resume(setting, 3)
    other = Loop(setting, dataset=Subset(Noisy(), range(20)))
    with checkpoints_of(setting, other) as checkpoints:
        checkpoints.resume()
