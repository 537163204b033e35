"""Datasets that change, samplers, and other words of torch's DataLoader."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

import samestep
from own_loops.cases import Setting, digest, refused, same
from own_loops.modes import Points

Pair = tuple[torch.Tensor, torch.Tensor]


def fit(
    setting: Setting, dataset: Any, epochs: int = 2, after: Callable[[int], object] = lambda epoch: None, **options: Any
) -> tuple[Any, list[list[int]]]:
    """Train a model with a loader; return the state and the samples of each epoch in order."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    engine = samestep.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), world=setting.world
    )
    options = {"microbatches": 4, **options}
    if "batch_sampler" not in options:
        options = {"batch_size": 16, **options}
    batches, seen = samestep.loader(dataset, world=setting.world, **options), []
    for epoch in range(epochs):
        seen.append([])
        for batch in batches:
            engine.step(batch)
            seen[-1] += batch.indices.tolist()
        after(epoch)
    batches.close()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, seen


def with_workers(setting: Setting, run: Callable[..., Any], **options: Any) -> Any:
    """Return the result of a run without workers, which is that of a run with workers."""
    alone = run(setting, **options)
    assert digest(run(setting, num_workers=2, **options)) == digest(alone)
    return alone


class Noisy(Points):
    """Points with noise from each generator."""

    def __getitem__(self, index: int) -> Pair:
        inputs, target = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(6) + random.random() + numpy.random.rand(), target


class Curriculum(Noisy):
    """Points whose scale and number depend on the epoch."""

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.epoch, self._grows = 99, grows

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 20 + 15 * self.epoch if self._grows else 50

    def __getitem__(self, index: int) -> Pair:
        inputs, target = super().__getitem__(index)
        return inputs * (1 + self.epoch), target


@same
def a_curriculum_by_set_epoch_does_not_depend_on_workers(setting: Setting) -> Any:
    return with_workers(setting, lambda setting, **options: fit(setting, Curriculum(), shuffle=True, **options))


@same
def set_epoch_can_change_the_length(setting: Setting) -> Any:
    state, seen = with_workers(
        setting, lambda setting, **options: fit(setting, Curriculum(grows=True), epochs=3, shuffle=True, **options)
    )
    assert [sorted(epoch) for epoch in seen] == [list(range(20)), list(range(35)), list(range(50))]
    return state, seen


@same
def random_draws_in_set_epoch_are_equal_everywhere(setting: Setting) -> Any:
    class Shifted(Points):
        def set_epoch(self, epoch: int) -> None:
            self.shift = random.random() + numpy.random.rand() + torch.rand(())

        def __getitem__(self, index: int) -> Pair:
            inputs, target = super().__getitem__(index)
            return inputs + self.shift, target

    return with_workers(setting, lambda setting, **options: fit(setting, Shifted(), shuffle=True, **options))


@same
def set_epoch_reaches_the_dataset_of_a_split(setting: Setting) -> Any:
    base = Curriculum()
    train, test = random_split(base, [40, 10], generator=torch.Generator().manual_seed(0))
    model = nn.Linear(6, 3)
    engine = samestep.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), world=setting.world
    )
    batches = samestep.loader(train, batch_size=10, microbatches=4, shuffle=True, world=setting.world)
    tests = samestep.loader(test, batch_size=10, microbatches=4, world=setting.world)
    values = []
    for _ in range(2):
        for number, batch in enumerate(batches):
            engine.step(batch)
            if number == 1:
                values.append(engine.evaluate(tests))
    assert base.epoch == 1, "the last samples that were read are those of training"
    return model, values


class Changing(Points):
    """Points with a scale, and more points later."""

    def __init__(self, size: int = 50) -> None:
        super().__init__(100)
        self.size, self.scale = size, 1.0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Pair:
        inputs, target = super().__getitem__(index)
        return inputs * self.scale, target


def fit_changing(setting: Setting, sizes: tuple[int, ...], **options: Any) -> Any:
    dataset = Changing(sizes[0])

    def change(epoch: int) -> None:
        dataset.scale *= 0.5
        dataset.size = sizes[min(epoch + 1, len(sizes) - 1)]

    state, seen = fit(setting, dataset, epochs=len(sizes), after=change, shuffle=True, **options)
    assert [sorted(epoch) for epoch in seen] == [list(range(size)) for size in sizes]
    return state, seen


@same
def an_attribute_changed_after_an_epoch_is_seen_by_workers(setting: Setting) -> Any:
    state, seen = with_workers(setting, fit_changing, sizes=(50, 50, 50))
    other, _ = fit(setting, Changing(), epochs=3, shuffle=True)
    assert digest(other) != digest(state)
    return state, seen


@same
def a_dataset_that_grows_between_epochs_is_read_completely(setting: Setting) -> Any:
    return with_workers(setting, fit_changing, sizes=(30, 50, 70))


@same
def persistent_workers_are_replaced_when_the_dataset_grows(setting: Setting) -> Any:
    def run(setting: Setting, **options: Any) -> Any:
        dataset = Changing(30)
        grow = lambda epoch: setattr(dataset, "size", dataset.size + 20)  # noqa: E731
        return fit(setting, dataset, after=grow, shuffle=True, persistent_workers=True, **options)

    return with_workers(setting, run)


@refused("E_EMPTY_DATASET")
def a_dataset_that_becomes_empty(setting: Setting) -> Any:
    dataset = Changing(50)
    return fit(setting, dataset, after=lambda epoch: setattr(dataset, "size", 0))


@same
def drop_last_leaves_out_the_rest(setting: Setting) -> Any:
    state, seen = fit(setting, Points(), drop_last=True, shuffle=True)
    assert [len(epoch) for epoch in seen] == [48, 48]
    return state, seen


# --- samplers ---


def fit_sampled(setting: Setting, sampler: Callable[[Any], Any], epochs: int = 3, **options: Any) -> Any:
    dataset = Noisy()
    return fit(setting, dataset, epochs=epochs, sampler=sampler(dataset), **options)


@same
def a_weighted_sampler_draws_by_weight(setting: Setting) -> Any:
    weights = [float(index % 5 == 0) for index in range(50)]
    state, seen = with_workers(setting, fit_sampled, sampler=lambda data: WeightedRandomSampler(weights, 40))
    assert all(index % 5 == 0 for epoch in seen for index in epoch)
    assert [len(epoch) for epoch in seen] == [40, 40, 40]
    assert seen[0] != seen[1] != seen[2]
    return state, seen


@same
def a_sample_drawn_twice_is_augmented_differently(setting: Setting) -> Any:
    class Random(Points):
        def __getitem__(self, index: int) -> Any:
            return float(torch.rand(())), index

    batches = samestep.loader(Random(), batch_size=16, microbatches=1, sampler=[7] * 16, world=alone(setting))
    (batch,) = batches
    drawn = batch.local_microbatches[0].data[0].tolist()
    assert len(set(drawn)) == 16
    return drawn


def alone(setting: Setting) -> samestep.World:
    """Return a world of one rank with the device of the ranks."""
    return samestep.World(rank=0, size=1, device=setting.world.device)


@same
def a_random_sampler_with_a_generator(setting: Setting) -> Any:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    results = fit_sampled(setting, lambda data: RandomSampler(data, generator=generator))
    assert torch.equal(generator.get_state(), state), "the order depends on no earlier draws"
    assert all(sorted(epoch) == list(range(50)) for epoch in results[1])
    assert results[1][0] != results[1][1]
    return results


@same
def a_class_balanced_sampler_as_a_function(setting: Setting) -> Any:
    targets = [int(target) for _, target in Points()]

    def balanced(seed: int, epoch: int) -> list[int]:
        draws = random.Random(1000 * seed + epoch)
        by_class = [[index for index, target in enumerate(targets) if target == kind] for kind in range(3)]
        return [draws.choice(by_class[number % 3]) for number in range(48)]

    state, seen = fit_sampled(setting, lambda data: balanced)
    assert all([targets[index] for index in epoch] == [0, 1, 2] * 16 for epoch in seen)
    assert seen[0] != seen[1]
    return state, seen


@same
def a_sampler_of_the_user_with_own_generators(setting: Setting) -> Any:
    class Own(Sampler[int]):
        def __init__(self) -> None:
            self.indices, self.generator = list(range(50)), numpy.random.default_rng(3)

        def __iter__(self) -> Iterator[int]:
            random.shuffle(self.indices)  # in place
            return iter(self.indices[int(self.generator.integers(10)) :])

        def __len__(self) -> int:
            return 50

    results = fit_sampled(setting, lambda data: Own())
    assert results[1][0] != results[1][1]
    return results


@same
def a_sampler_with_set_epoch(setting: Setting) -> Any:
    class ByEpoch(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.epoch, 50))

    state, seen = fit_sampled(setting, lambda data: ByEpoch())
    assert seen == [list(range(epoch, 50)) for epoch in range(3)]
    return state, seen


@same
def a_batch_sampler_of_one_size(setting: Setting) -> Any:
    dataset = Noisy()
    state, seen = fit(setting, dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 12, drop_last=False))
    assert all(sorted(epoch) == list(range(50)) for epoch in seen)
    assert seen[0] != seen[1]
    return state, seen


@refused("E_LOADER")
def a_batch_sampler_of_several_sizes(setting: Setting) -> Any:
    return fit(setting, Points(), batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11]])


@refused("E_LOADER")
def a_distributed_sampler_by_habit(setting: Setting) -> Any:
    world = setting.world
    return fit_sampled(setting, lambda data: DistributedSampler(data, world.size, world.rank))


@refused("E_LOADER")
def a_sampler_that_counts_epochs_itself(setting: Setting) -> Any:
    class Counting(Sampler[int]):
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            self.epoch += 1
            return iter(torch.randperm(50, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    return fit_sampled(setting, lambda data: Counting())


@refused("E_LOADER")
def a_generator_function_as_a_sampler(setting: Setting) -> Any:
    return fit_sampled(setting, lambda data: (index for index in range(50)))


# --- other words of DataLoader ---


@refused("E_BATCH_SIZE")
def no_batch_size(setting: Setting) -> Any:
    return samestep.loader(Points(), world=setting.world)


@refused("E_LOADER")
def an_iterable_dataset_with_a_length(setting: Setting) -> Any:
    class Stream(IterableDataset[Pair]):
        def __iter__(self) -> Iterator[Pair]:
            return iter([Points()[index] for index in range(50)])

        def __len__(self) -> int:
            return 50

    return fit(setting, Stream())


@same
def a_generator_gives_the_seed(setting: Setting) -> Any:
    result = fit(setting, Noisy(), shuffle=True, generator=torch.Generator().manual_seed(8))
    assert digest(result) == digest(fit(setting, Noisy(), shuffle=True, seed=8))
    assert digest(result) != digest(fit(setting, Noisy(), shuffle=True))
    return result


@same
def worker_init_fn_prepares_the_dataset_of_the_worker(setting: Setting) -> Any:
    class Opened(Points):
        opened = False

        def __getitem__(self, index: int) -> Pair:
            assert self.opened
            return super().__getitem__(index)

    def open_file(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.opened = True

    return fit(setting, Opened(), num_workers=1, worker_init_fn=open_file, prefetch_factor=1, pin_memory=True)


@same
def a_collate_function_that_returns_a_dict(setting: Setting) -> Any:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, values: torch.Tensor, scale: torch.Tensor) -> Any:
            return self.linear(values * scale)

    def collate(samples: list[Pair]) -> Any:
        values = torch.stack([inputs for inputs, _ in samples])
        return {"values": values, "scale": values.std()}, torch.stack([target for _, target in samples])

    model = Named()
    engine = samestep.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), world=setting.world
    )
    batches = samestep.loader(Points(), batch_size=16, microbatches=4, collate_fn=collate, world=setting.world)
    return [engine.step(batch).loss for batch in batches], model


@same
def draws_in_the_collate_function(setting: Setting) -> Any:
    def collate(samples: list[Pair]) -> Pair:
        values = torch.stack([inputs for inputs, _ in samples])
        return values + torch.randn(()) + random.random(), torch.stack([target for _, target in samples])

    def run(setting: Setting, **options: Any) -> Any:
        return fit(setting, Points(), shuffle=True, collate_fn=collate, **options)

    return with_workers(setting, run)
