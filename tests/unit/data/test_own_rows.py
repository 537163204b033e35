"""Each rank reads its own rows of a batch: batches, reads, draws and failures on several processes."""

from __future__ import annotations

import os
import random
import re
import signal
from collections import deque, namedtuple
from collections.abc import Callable, Iterable
from functools import cache
from io import StringIO
from itertools import count
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

import samestep
from helpers.forked_ranks import Job, run_jobs
from helpers.view_checks import error_code, run_checks
from samestep.data.batch import map_tensors
from samestep.data.batch_structure import content_of, equal
from samestep.data.own_rows import OwnRows, own_iterator
from samestep.distributed.rng import seed_generators
from samestep.launcher.process_state import process_state
from samestep.view.rows_tensor import gathered

# Several ranks, with workers, which can take minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLES, BATCH = 44, 8
Point = namedtuple("Point", ["image", "label"])  # of a script


class Points:
    """Samples of a kind, which count their reads in memory that processes share, and no search finds."""

    def __init__(self, kind: str = "tuple", size: int = SAMPLES) -> None:
        self.reads = RawArray("q", size)
        self._kind = kind
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Any:
        self.reads[index] += 1
        image = torch.arange(30.0).reshape(2, 3, 5) + 100 * index
        if self._kind == "dict":
            return {"image": image, "label": index % 3, "name": f"file {index}", "size": (index, 1.5 * index)}
        if self._kind == "named":
            return Point(image, index)
        if self._kind == "text":
            return [f"word {index} \u00fc\ud800", index]
        if self._kind == "large":
            return image.repeat(200, 10, 3), numpy.float32(index)
        return image, index


class Drawing(Points):
    """Samples with draws of all generators, and of one of their own."""

    def __init__(self, *, owns: bool = False, rarely: bool = False) -> None:
        super().__init__()
        self._rng = numpy.random.default_rng(5) if owns else None
        self._rarely = rarely

    def __getitem__(self, index: int, /) -> Any:
        self.reads[index] += 1
        if self._rarely and index != 33:
            return index, torch.zeros(4, dtype=torch.float64)
        own = 0.0 if self._rng is None else self._rng.random()
        drawn = [random.random(), numpy.random.randn(), float(torch.rand((), dtype=torch.float64)), own]
        return index, torch.tensor(drawn, dtype=torch.float64)


class Counting(Points):
    """Samples with the number of reads before."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __getitem__(self, index: int, /) -> Any:
        self.reads[index] += 1
        self._count += 1
        return index, self._count


class Remembering(Points):
    """Samples that depend on what a function keeps, which is called with what is kept, index and image."""

    def __init__(self, kept: Any, compute: Callable[[Any, int, torch.Tensor], Any]) -> None:
        super().__init__()
        self.kept = kept
        self._compute = compute

    def __getitem__(self, index: int, /) -> Any:
        image, _ = super().__getitem__(index)
        return index, self._compute(self.kept, index, image)


def _mixed_with_seen(kept: list[torch.Tensor], index: int, image: torch.Tensor) -> torch.Tensor:
    other = random.choice(kept) if kept else image
    kept.append(image)
    return image + other


def _mixed_late(kept: deque[torch.Tensor], index: int, image: torch.Tensor) -> torch.Tensor:
    kept.append(image)
    return image + kept[0] if len(kept) == kept.maxlen else image


def _counted_by_tensor(kept: torch.Tensor, index: int, image: torch.Tensor) -> torch.Tensor:
    kept[index % 3] += 1
    return image + kept.sum().clamp(min=20)


def _counted_globally(kept: None, index: int, image: torch.Tensor) -> torch.Tensor:
    CALLS["count"] += 1
    return image + max(CALLS["count"], 30)


def _kept_in_part(kept: dict[int, torch.Tensor], index: int, image: torch.Tensor) -> torch.Tensor:
    drawn = kept.get(index)
    if drawn is None:
        drawn = image + torch.rand(())
    if len(kept) < 5:
        kept[index] = drawn
    return drawn


class InBatches(Points):
    """Samples of a batch with its mean, times a random number."""

    def __getitems__(self, indices: list[int], /) -> list[Any]:
        factor = torch.rand(()) * sum(indices) / len(indices)
        return [(index, factor) for index in indices]


class MixedWithLast:
    """Collation that mixes a batch with the one before."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def __call__(self, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = torch.utils.data.default_collate(samples)
        share = numpy.random.beta(0.4, 0.4)
        if self._last is not None and len(self._last) == len(images):
            images = share * images + (1 - share) * self._last
        self._last = images
        return images, labels


class IntoBuffer:
    """Collation that writes each batch into the same memory."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(BATCH, 2, 3, 5)

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        for number, (image, _) in enumerate(samples):
            self._buffer[number] = image
        return self._buffer[: len(samples)] + 0


def _doubled_in_place(samples: list[Any]) -> torch.Tensor:
    for sample in samples:
        sample["image"] = sample["image"] * 2
    return torch.stack([sample["image"] for sample in samples])


class KeptDicts(Points):
    def __init__(self) -> None:
        super().__init__("dict")
        self._kept: dict[int, Any] = {}

    def __getitem__(self, index: int, /) -> Any:
        if index not in self._kept:
            self._kept[index] = super().__getitem__(index)
        return self._kept[index]


class Hidden(Points):
    """Samples with draws of a generator that only the code of the class names."""

    def __getitem__(self, index: int, /) -> Any:
        self.reads[index] += 1
        return index, GENERATOR.random()


class Caching(Drawing):
    """Samples with draws, which are kept."""

    def __init__(self, *, owns: bool = False) -> None:
        super().__init__(owns=owns)
        self._kept: dict[int, Any] = {}

    def __getitem__(self, index: int, /) -> Any:
        if index not in self._kept:
            self._kept[index] = super().__getitem__(index)
        return self._kept[index]


class Lines(Points):
    """Lists of numbers, whose lengths are equal in the first batch only if they are `late`."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self._late = late

    def __getitem__(self, index: int, /) -> Any:
        self.reads[index] += 1
        return torch.arange(5 if self._late and index < BATCH else 1 + index % 7)


class Several(Points):
    """Samples that are read at once."""

    def __getitems__(self, indices: list[int], /) -> list[Any]:
        return [Points.__getitem__(self, index) for index in indices]

    def __getitem__(self, index: int, /) -> Any:
        raise AssertionError


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(float(SAMPLES)))


class Longer(DataLoader[Any]):
    """Loader of a script, with a batch more."""

    def __iter__(self) -> Any:
        yield "first"
        yield from super().__iter__()


GENERATOR = random.Random(3)
CALLS = {"count": 0}
MEMORIES: dict[str, Callable[[], tuple[Points, Any]]] = {
    "counting": lambda: (Counting(), None),
    "caching": lambda: (Caching(), None),
    "caching with a generator": lambda: (Caching(owns=True), None),
    "seen samples": lambda: (Remembering([], _mixed_with_seen), None),
    "window of samples": lambda: (Remembering(deque(maxlen=20), _mixed_late), None),
    "counts in a tensor": lambda: (Remembering(torch.zeros(3), _counted_by_tensor), None),
    "counts in a global": lambda: (Remembering(None, _counted_globally), None),
    "partial cache": lambda: (Remembering({}, _kept_in_part), None),
    "generator": lambda: (Remembering((x for x in range(999)), lambda kept, *_: next(kept)), None),
    "iterator": lambda: (Remembering(count(), lambda kept, *_: next(kept)), None),
    "file": lambda: (
        Remembering(StringIO("\n".join(map(str, range(999)))), lambda kept, *_: int(kept.readline())),
        None,
    ),
    "batch of samples": lambda: (InBatches(), None),
    "mixed with the last batch": lambda: (Points(), MixedWithLast()),
    "kept samples": lambda: (KeptDicts(), _doubled_in_place),
}


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def mixed(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = torch.utils.data.default_collate(samples)
    return images + images.flip(0), labels


def mixed_at_random(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = torch.utils.data.default_collate(samples)
    return images + images[torch.randperm(len(images))], labels


def popping(samples: list[dict[str, Any]]) -> dict[str, Any]:
    labels = [sample.pop("label") for sample in samples]
    return {"images": torch.stack([sample["image"] for sample in samples]), "labels": labels}


def _epochs(batches: Iterable[Any], number: int = 2) -> list[Any]:
    return [map_tensors(batch, gathered) for _ in range(number) for batch in batches]


def _decision(batches: Any) -> list[Any]:
    decision = batches._state.decision
    return [decision.how, decision.draws, decision.reason]


def _compare(dataset: Points, workers: int, **options: Any) -> dict[str, Any]:
    """Return whether two epochs are those of torch's loader, a hash of them, the decision, and the reads."""
    expected = _epochs(DataLoader(dataset, BATCH, **options))  # type: ignore[arg-type]
    dataset.reads[:] = [0] * len(dataset)
    batches = samestep.loader(dataset, BATCH, num_workers=workers, **options)
    got = _epochs(batches)
    reads = dataset.reads[:]
    return {
        "torch": equal(got, expected),
        "content": content_of(got),
        "decision": _decision(batches),
        "reads": reads,
    }


def _of_torch(dataset: Any, workers: int, loader: Callable[..., DataLoader[Any]], **options: Any) -> dict[str, Any]:
    """Compare a loader of torch, with its own order, given to `samestep.loader`."""
    options |= {"num_workers": workers, "persistent_workers": workers > 0}
    torch.manual_seed(3)
    expected = _epochs(loader(dataset, **options))
    state = torch.get_rng_state()
    if isinstance(dataset, Points):
        dataset.reads[:] = [0] * len(dataset)
    torch.manual_seed(3)
    batches = samestep.loader(loader(dataset, **options))
    got = _epochs(batches)
    batches.close()
    return {
        "torch": equal(got, expected),
        "content": content_of(got),
        "generator": torch.equal(state, torch.get_rng_state()),
        "reads": dataset.reads[:] if isinstance(dataset, Points) else [],
    }


def _weighted(dataset: Any, **options: Any) -> DataLoader[Any]:
    sampler = WeightedRandomSampler([1.0 + index % 3 for index in range(SAMPLES)], SAMPLES)
    return DataLoader(dataset, batch_sampler=BatchSampler(sampler, BATCH, False), **options)


def _weighted_drawing(dataset: Any, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    sampler = WeightedRandomSampler([1.0] * 9, SAMPLES, generator=generator)
    return DataLoader(dataset, BATCH, sampler=sampler, **options)


def _resumed() -> list[Any]:
    """Resume the order of torch in the middle of an epoch."""
    torch.manual_seed(4)
    batches = samestep.loader(DataLoader(Points(), BATCH, shuffle=True))  # type: ignore[arg-type]
    got = _epochs(batches)
    torch.manual_seed(4)
    first = samestep.loader(DataLoader(Points(), BATCH, shuffle=True))  # type: ignore[arg-type]
    for number, _ in enumerate(first):
        if number == 2:
            break
    state, cursor, script = first.state_dict(), first.cursor, torch.get_rng_state()
    torch.manual_seed(9)
    second = samestep.loader(DataLoader(Points(), BATCH, shuffle=True))  # type: ignore[arg-type]
    second.load_state_dict(state)
    second.cursor = cursor
    torch.set_rng_state(script)
    return [[cursor.epoch, cursor.samples], equal(_epochs(second), got[3:])]


class Broken(Points):
    """One sample cannot be read, on one rank or on all; with `once`, it can be read the second time."""

    def __init__(self, index: int, rank: int | None = None, *, once: bool = False, stops: bool = False) -> None:
        super().__init__()
        self._stops = stops
        self._index = index
        self._once = once
        self._is_broken = rank is None or rank == process_state.world.rank  # type: ignore[union-attr]

    def __getitem__(self, index: int, /) -> Any:
        if index == self._index and self._is_broken:
            self._is_broken = not self._once
            if self._stops:
                next(iter(()))
            raise OSError("the file is damaged")
        return super().__getitem__(index)


def _failing(workers: int, dataset: Broken) -> list[Any]:
    """Return what a script sees of a sample that cannot be read, and that other batches follow."""
    iterator = iter(samestep.loader(dataset, BATCH, num_workers=workers))
    seen: list[Any] = [len(next(iterator)[1]) for _ in range(2)]
    try:
        next(iterator)
    except Exception as error:
        seen.append([type(error).__name__, str(error), getattr(error, "__notes__", [])])
    return seen


class Unequal(Points):
    def __getitem__(self, index: int, /) -> Any:
        return index + process_state.world.rank  # type: ignore[union-attr]


def _other_samples() -> Any:
    sampler = [*range(16), 16 + process_state.world.rank]  # type: ignore[union-attr]
    return _epochs(samestep.loader(DataLoader(Points(), BATCH, sampler=sampler)), 1)  # type: ignore[arg-type]


def _error(compute: Callable[[], Any]) -> str:
    try:
        compute()
    except Exception as error:
        return str(error).splitlines()[0]
    return "none"


def _made_again() -> list[int]:
    """Return the reads of loaders that one line makes in each epoch."""
    dataset = Points()
    for _ in range(3):
        for _ in samestep.loader(dataset, BATCH, collate_fn=lambda samples: torch.stack([one[0] for one in samples])):
            pass
    return dataset.reads[:]


def run(workers: int) -> dict[str, list[Any]]:
    """Return the results of all checks on each rank."""
    shuffled: dict[str, Any] = {"shuffle": True}
    checks: dict[str, Callable[[], Any]] = {
        kind: lambda kind=kind: _compare(Points(kind), workers)  # type: ignore[misc]
        for kind in ("tuple", "dict", "named", "text", "large")
    }
    checks |= {
        "several": lambda: _compare(Several(), workers),
        "popping": lambda: _compare(Points("dict"), workers, collate_fn=popping),
        "padding": lambda: _compare(Lines(), workers, collate_fn=padded),
        "late padding": lambda: _compare(Lines(late=True), workers, collate_fn=padded),
        "mixing": lambda: _compare(Points(), workers, collate_fn=mixed),
        "mixing at random": lambda: _compare(Points(), workers, collate_fn=mixed_at_random),
        "drawing": lambda: _compare(Drawing(), workers),
        "drawing rarely": lambda: _compare(Drawing(rarely=True), workers),
        "owning": lambda: _compare(Drawing(owns=True), workers),
        "global generator": lambda: _compare(Hidden(), workers),
        "shuffled": lambda: _of_torch(Points(), workers, DataLoader, batch_size=BATCH, **shuffled),
        "subset": lambda: _of_torch(Subset(Points(), range(30)), workers, DataLoader, batch_size=BATCH),  # type: ignore[arg-type]
        "weighted": lambda: _of_torch(Points("dict"), workers, _weighted),
        "weighted drawing": lambda: _of_torch(Drawing(), workers, _weighted_drawing),
        "subclass": lambda: _of_torch(Points(), workers, Longer, batch_size=BATCH, drop_last=True),
        "iterable": lambda: _of_torch(Stream(), 0, DataLoader, batch_size=BATCH),
        "single": lambda: _of_torch(Points(), workers, DataLoader, batch_size=None),
        "short": lambda: _of_torch(Points(size=6), workers, DataLoader, batch_size=4),
        "batches of one": lambda: _of_torch(Points(size=3), workers, DataLoader, batch_size=1),
        "batch sampler": lambda: _of_torch(
            Points(),
            workers,
            DataLoader,
            batch_sampler=BatchSampler(RandomSampler(range(SAMPLES), generator=None), 5, False),  # type: ignore[arg-type]
        ),
        "sequential": lambda: _of_torch(
            Points(), workers, DataLoader, sampler=SequentialSampler(range(SAMPLES)), batch_size=7
        ),
        "resumed": _resumed,
        "broken": lambda: _failing(workers, Broken(19)),
        "broken once": lambda: _failing(workers, Broken(22, process_state.world.size - 1, once=True)),  # type: ignore[union-attr]
        "broken on the last rank": lambda: _failing(workers, Broken(22, process_state.world.size - 1)),  # type: ignore[union-attr]
        "unequal": lambda: _error(lambda: _epochs(samestep.loader(Unequal(), BATCH), 1)),
        "other samples": lambda: _error(_other_samples),
        "made again": _made_again,
    }
    checks |= {name: lambda name=name: _stopping(workers, **STOPS[name]) for name in STOPS}  # type: ignore[misc]
    if workers:
        checks = {name: checks[name] for name in [*WITH_WORKERS, *STOPS]}
    else:
        checks |= {name: lambda make=make: _compare_with_memory(make) for name, make in MEMORIES.items()}  # type: ignore[misc]
        checks["into a buffer"] = lambda: _compare(Points(), workers, collate_fn=IntoBuffer())
    return run_checks(checks)


def _compare_with_memory(make: Callable[[], tuple[Points, Any]]) -> dict[str, Any]:
    """Compare a data set with a memory with another one of its kind."""
    results: list[Any] = []
    batches: Any = None
    for _ in range(2):
        CALLS["count"] = 0
        seed_generators(3)
        dataset, collate = make()
        batches = DataLoader(dataset, BATCH, collate_fn=collate)  # type: ignore[arg-type]
        if results:
            batches = samestep.loader(batches)
        results.append([*_epochs(batches), random.random(), float(torch.rand(()))])
    return {"torch": equal(*results), "content": content_of(results[1]), "decision": _decision(batches)}


STOPS: dict[str, dict[str, Any]] = {
    "stop in a sample": {"dataset": Broken(19, stops=True)},
    "stop in a single sample": {"dataset": Broken(19, stops=True), "batch_size": None},
    "stop in collation": {"dataset": Points(), "collate_fn": lambda samples: next(iter(()))},
    "stop in collation of a stream": {"dataset": Stream(), "collate_fn": lambda samples: next(iter(()))},
}


def _stopping(workers: int, **options: Any) -> str:
    batches = samestep.loader(DataLoader(**{"batch_size": BATCH, "num_workers": workers, **options}))
    return error_code(lambda: _epochs(batches, 1))


Found = dict[str, list[Any]]
# Each check with workers starts eight processes.
WITH_WORKERS = [
    *("tuple", "large", "late padding", "mixing at random", "drawing", "drawing rarely"),
    *("shuffled", "weighted", "subclass", "single", "resumed"),
    *("broken", "broken once", "broken on the last rank"),
]


def settings(*kinds: str) -> Any:
    """Return the parameters kind, number of ranks, and workers of each rank."""
    frequent = [(kind, *setting) for setting in ((2, 2), (3, 0)) for kind in kinds]
    rare = [(kind, *setting) for setting in ((1, 0), (1, 2), (2, 0), (3, 2)) for kind in kinds]
    parameters = [*frequent, *(pytest.param(*one, marks=pytest.mark.long) for one in rare)]
    chosen = [one for one in parameters if _has(*getattr(one, "values", one))]
    return pytest.mark.parametrize(("kind", "size", "workers"), chosen)


def _has(kind: str, _: int, workers: int) -> bool:
    return workers == 0 or kind in WITH_WORKERS


KINDS = ["tuple", "dict", "named", "text", "large", "several", "popping"]
DRAWING = ["drawing", "drawing rarely", "owning", "global generator"]
WHOLE = ["padding", "late padding", "mixing", "mixing at random"]
PADS = "the collate function does not keep samples apart"
OF_TORCH = [
    "shuffled",
    "subset",
    "weighted",
    "subclass",
    "iterable",
    "single",
    "short",
    "batches of one",
    "batch sampler",
]
BROKEN = ["OSError", "the file is damaged", ["while loading sample {} of the dataset"]]


@cache
def found(size: int, workers: int) -> Found:
    (results,) = run_jobs("unit.data.test_own_rows", Job("run", size, {"workers": workers}))
    failed = {name: value for name, value in results.items() if any(str(one).startswith("failed") for one in value)}
    assert not failed
    return results


def reads_of(by_rank: list[Any]) -> list[int]:
    """Return the reads of each sample, over all ranks, without the first batch."""
    return [sum(reads) for reads in zip(*(one["reads"] for one in by_rank), strict=True)][BATCH:]


@settings(*KINDS)
def test_batches_are_those_of_torch_and_each_sample_is_read_once(kind: str, size: int, workers: int) -> None:
    by_rank = found(size, workers)[kind]
    assert [one["torch"] for one in by_rank] == [True] * size
    assert [one["decision"] for one in by_rank] == [["own", False, ""]] * size
    assert reads_of(by_rank) == [2] * (SAMPLES - BATCH)  # in two epochs
    if size > 1:
        assert any(0 in one["reads"] for one in by_rank)


@settings(*DRAWING)
def test_draws_are_a_function_of_the_sample(kind: str, size: int, workers: int) -> None:
    by_rank = found(size, workers)[kind]
    other = found(2, 0)[kind]
    assert [one["content"] for one in by_rank] == [other[0]["content"]] * size
    assert [one["decision"] for one in by_rank] == [["own", True, ""]] * size
    late = 8 if kind == "drawing rarely" else 0  # the batch with the first draw is read again
    assert sum(reads_of(by_rank)) <= 2 * (SAMPLES - BATCH) + late * size


@settings(*WHOLE)
def test_batches_are_whole_if_samples_are_not_apart(kind: str, size: int, workers: int) -> None:
    by_rank = found(size, workers)[kind]
    assert [one["content"] for one in by_rank] == [found(2, 0)[kind][0]["content"]] * size
    assert [one["torch"] for one in by_rank] == [kind != "mixing at random"] * size
    if kind == "late padding":
        how = ["own", False, ""] if size == 1 else ["whole", False, "a batch was not made of its rows"]
    elif kind == "mixing at random":
        how = ["whole", True, "the collate function draws random numbers"]
    else:
        how = ["whole", False, PADS]
    assert [one["decision"] for one in by_rank] == [how] * size


@settings(*OF_TORCH)
def test_loaders_of_torch_keep_their_order_and_generator(kind: str, size: int, workers: int) -> None:
    by_rank = found(size, workers)[kind]
    assert [(one["torch"], one["generator"]) for one in by_rank] == [(True, True)] * size
    if kind == "shuffled":
        assert min(reads_of(by_rank)) == 2
        assert sum(sum(one["reads"]) for one in by_rank) == 2 * SAMPLES + (size - 1) * BATCH + (BATCH + 3) * size


def test_an_index_that_comes_twice_is_drawn_twice() -> None:
    contents = [
        one["content"] for size, workers in ((2, 0), (3, 0)) for one in found(size, workers)["weighted drawing"]
    ]
    assert len(set(contents)) == 1


@pytest.mark.parametrize("size", [2, 3, pytest.param(1, marks=pytest.mark.long)])
def test_data_sets_with_a_memory_are_read_as_by_torch(size: int) -> None:
    reason = "samples depend on those that were read before"
    results = found(size, 0)
    for kind in [*MEMORIES, "into a buffer"]:
        assert (kind, [one["torch"] for one in results[kind]]) == (kind, [True] * size)
        if kind in MEMORIES:
            assert (kind, [one["decision"] for one in results[kind]]) == (kind, [["plain", False, reason]] * size)


@pytest.mark.parametrize(("size", "workers"), [(2, 0), (2, 2)])
def test_end_of_an_iterator_in_a_sample_is_an_error(size: int, workers: int) -> None:
    assert {name: found(size, workers)[name] for name in STOPS} == dict.fromkeys(STOPS, ["E_DATA"] * size)


@settings("resumed")
def test_order_of_torch_resumes_within_an_epoch(kind: str, size: int, workers: int) -> None:
    assert found(size, workers)[kind] == [[[0, 3 * BATCH], True]] * size


@pytest.mark.parametrize(("size", "workers"), [(2, 0), (2, 2)])
def test_error_of_a_sample_is_raised_on_all_ranks(size: int, workers: int) -> None:
    results = found(size, workers)
    error = [*BROKEN[:2], [BROKEN[2][0].format(19)]]
    assert results["broken"] == [[BATCH, BATCH, error]] * size
    first, last = results["broken on the last rank"]
    assert last == [BATCH, BATCH, [*BROKEN[:2], [BROKEN[2][0].format(22)]]]
    assert first[2][1].startswith("rank 1 cannot read a sample that this rank can read [E_RANK_BATCH]")
    first, last = results["broken once"]
    assert (last[:2], last[2][0]) == ([BATCH, BATCH], "OSError")
    assert "the file is damaged" in last[2][1]
    assert first[2][:2] == results["broken on the last rank"][0][2][:2]


@pytest.mark.long
def test_error_of_a_worker_names_the_sample() -> None:
    ((*sizes, (kind, text, _)),) = found(1, 2)["broken"]
    assert (sizes, kind) == ([BATCH, BATCH], "OSError")
    assert "while loading sample 19 of the dataset" in text


@pytest.mark.parametrize(
    ("is_killed", "error", "text"),
    # Torch's handler of the signal that a child has ended can be the first to report the worker.
    [
        (True, RuntimeError, "DataLoader worker .*{}.* (exited unexpectedly|is killed by signal)"),
        (False, ConnectionResetError, "the connection was closed"),
    ],
)
def test_lost_connection_to_a_killed_worker_names_the_worker(
    monkeypatch: pytest.MonkeyPatch, is_killed: bool, error: type[Exception], text: str
) -> None:
    iterator: Any = own_iterator(DataLoader(Points(), BATCH, num_workers=1), OwnRows(None))
    next(iterator)
    (worker,) = iterator._workers

    def lost(timeout: float) -> None:
        if is_killed:
            os.kill(worker.pid, signal.SIGKILL)
        raise ConnectionResetError("the connection was closed")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(iterator._data_queue, "get", lost)
            with pytest.raises(error, match=text.format(worker.pid)):
                next(iterator)
    finally:
        iterator._shutdown_workers()  # or the handler would raise its error in other tests


def test_ranks_that_read_different_samples_are_told() -> None:
    results = found(2, 0)
    assert results["unequal"] == ["ranks 0 and 1 read different data for the same samples [E_RANK_BATCH]"] * 2
    first, second = results["other samples"]
    assert first == second
    assert re.fullmatch(r"ranks 0 and 1 differ in: samples of a batch, at \S+own_rows\.py:\d+ \[E_RANK_BATCH\]", first)


def test_loader_that_is_made_again_reads_own_rows_at_once() -> None:
    reads = [sum(samples) for samples in zip(*found(2, 0)["made again"], strict=True)]
    assert reads[BATCH:] == [3] * (SAMPLES - BATCH)
    # By each rank in the first batch and twice in a copy of the process, which reads the samples 0, 3 and 7 again; then
    # once in each later epoch.
    assert reads[:BATCH] == [8, 6, 6, 8, 6, 6, 6, 8]
