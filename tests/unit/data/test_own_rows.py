"""Each rank reads its own rows of a batch: batches, reads, draws and failures on several processes."""

import re
from functools import cache
from typing import Any

import pytest

from helpers.forked_ranks import Job, run_jobs
from workers.own_rows import BATCH, SAMPLES

Found = dict[str, list[Any]]
SETTINGS = [
    (2, 0),
    (2, 2),
    *(pytest.param(*setting, marks=pytest.mark.slow) for setting in ((1, 0), (1, 2), (3, 0), (3, 2))),
]
KINDS = ["tuple", "dict", "named", "text", "large", "several", "popping"]
DRAWING = ["drawing", "drawing rarely", "owning"]
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
    (results,) = run_jobs("workers.own_rows", Job("run", size, {"workers": workers}))
    failed = {name: value for name, value in results.items() if any(str(one).startswith("failed") for one in value)}
    assert not failed
    return results


def reads_of(by_rank: list[Any]) -> list[int]:
    """Return the reads of each sample, over all ranks, without the first batch."""
    return [sum(reads) for reads in zip(*(one["reads"] for one in by_rank), strict=True)][BATCH:]


@pytest.mark.parametrize(("size", "workers"), SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_torch_and_each_sample_is_read_once(kind: str, size: int, workers: int) -> None:
    by_rank = found(size, workers)[kind]
    assert [one["torch"] for one in by_rank] == [True] * size
    assert [one["decision"] for one in by_rank] == [["own", False, ""]] * size
    assert reads_of(by_rank) == [2] * (SAMPLES - BATCH)  # in two epochs
    if size > 1:
        assert any(0 in one["reads"] for one in by_rank)


@pytest.mark.parametrize(("size", "workers"), SETTINGS)
@pytest.mark.parametrize("kind", DRAWING)
def test_draws_are_a_function_of_the_sample(kind: str, size: int, workers: int) -> None:
    by_rank = found(size, workers)[kind]
    other = found(2, 0)[kind]
    assert [one["content"] for one in by_rank] == [other[0]["content"]] * size
    assert [one["decision"] for one in by_rank] == [["own", True, ""]] * size
    late = 8 if kind == "drawing rarely" else 0  # the batch with the first draw is read again
    assert sum(reads_of(by_rank)) <= 2 * (SAMPLES - BATCH) + late * size


@pytest.mark.parametrize(("size", "workers"), SETTINGS)
@pytest.mark.parametrize("kind", WHOLE)
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


@pytest.mark.parametrize(("size", "workers"), SETTINGS)
@pytest.mark.parametrize("kind", OF_TORCH)
def test_loaders_of_torch_keep_their_order_and_generator(kind: str, size: int, workers: int) -> None:
    by_rank = found(size, workers)[kind]
    assert [(one["torch"], one["generator"]) for one in by_rank] == [(True, True)] * size
    if kind == "shuffled":
        assert min(reads_of(by_rank)) == 2
        assert sum(sum(one["reads"]) for one in by_rank) == 2 * SAMPLES + (size - 1) * BATCH + 3 * size


def test_an_index_that_comes_twice_is_drawn_twice() -> None:
    contents = [
        one["content"] for size, workers in ((2, 0), (1, 0)) for one in found(size, workers)["weighted drawing"]
    ]
    assert len(set(contents)) == 1


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_data_sets_with_a_memory_are_read_as_by_torch(size: int) -> None:
    reason = "samples depend on those that were read before"
    results = found(size, 0)
    assert [one["torch"] for one in results["counting"]] == [True] * size
    assert [one["decision"] for one in results["counting"] + results["hidden"]] == [["plain", False, reason]] * 2 * size
    assert [one["content"] for one in results["hidden"]] == [found(2, 0)["hidden"][0]["content"]] * size


@pytest.mark.parametrize(("size", "workers"), SETTINGS)
def test_order_of_torch_resumes_within_an_epoch(size: int, workers: int) -> None:
    assert found(size, workers)["resumed"] == [[[0, 3 * BATCH], True]] * size


@pytest.mark.parametrize(("size", "workers"), SETTINGS)
def test_unusable_samples_are_left_out(size: int, workers: int) -> None:
    usable = [index for index in range(SAMPLES) if index not in (3, 17) and not 24 <= index < 32]
    labels = [[index for index in usable if index // BATCH == batch] for batch in range(6) if batch != 3]
    assert found(size, workers)["skipping"] == [[labels, [1, 0], 10]] * size


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


def test_error_of_a_worker_names_the_sample() -> None:
    ((*sizes, (kind, text, _)),) = found(1, 2)["broken"]
    assert (sizes, kind) == ([BATCH, BATCH], "OSError")
    assert "while loading sample 19 of the dataset" in text


def test_ranks_that_read_different_samples_are_told() -> None:
    results = found(2, 0)
    assert results["unequal"] == ["ranks 0 and 1 read different data for the same samples [E_RANK_BATCH]"] * 2
    first, second = results["other samples"]
    assert first == second
    assert re.fullmatch(r"ranks 0 and 1 differ in: samples of a batch, at \S+own_rows\.py:\d+ \[E_RANK_BATCH\]", first)


def test_loader_that_is_made_again_reads_own_rows_at_once() -> None:
    reads = [sum(samples) for samples in zip(*found(2, 0)["made again"], strict=True)]
    assert reads[BATCH:] == [3] * (SAMPLES - BATCH)
    # Once by each rank in the first batch, whose samples 0, 3 and 7 are read again, and once in each later epoch.
    assert reads[:BATCH] == [6, 4, 4, 6, 4, 4, 4, 6]
