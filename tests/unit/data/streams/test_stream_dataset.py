"""Dataset of a stream in a loader: samples, order on any ranks, settings of checkpoints, and refusals."""

from typing import Any

import pytest

from helpers.number_files import NumberFiles
from samestep.data.loader import Loader
from samestep.data.streams.dataset import StreamDataset
from samestep.distributed.world import World
from samestep.errors import DataError, InputError
from samestep.microbatches import Cursor
from unit.data.test_loader import start_world

FILES = [10, 0, 17, 9, 30, 3]


def loader_of(rank: int = 0, ranks: int = 1, source: Any = None, window: int = 8, **options: Any) -> Loader:
    dataset = StreamDataset(source or NumberFiles(FILES), window=window)
    world: World = start_world(rank, ranks)
    return Loader(dataset, world=world, **{"batch_size": 16, "microbatches": 4, "seed": 5, "shuffle": True, **options})


def used(loader: Loader) -> list[tuple[int, ...]]:
    """Return the samples of this rank with position and microbatch."""
    return [
        (batch.begin.samples, microbatch.number, *sample)
        for batch in loader
        for microbatch in batch.local_microbatches
        for sample in microbatch.data.tolist()
    ]


@pytest.mark.parametrize("drop_last", [False, True])
def test_order_does_not_depend_on_ranks(drop_last: bool) -> None:
    alone = used(loader_of(drop_last=drop_last))
    assert len({sample[2:] for sample in alone}) == len(alone) == (64 if drop_last else 69)
    for ranks in (2, 3, 4):
        together = [used(loader_of(rank, ranks, drop_last=drop_last)) for rank in range(ranks)]
        assert sorted(sample for part in together for sample in part) == sorted(alone)


def test_iteration_resumes_at_any_batch() -> None:
    alone = used(loader_of())
    resumed = loader_of(1, 2)
    resumed.cursor = Cursor(0, 32)
    assert used(resumed) == [sample for sample in alone if sample[0] >= 32 and sample[1] in (2, 3)]


def test_a_rank_reads_files_of_its_slots_alone() -> None:
    by_rank = []
    for rank in range(2):
        source = NumberFiles([10] * 60)
        used(loader_of(rank, 2, source, window=20))
        by_rank.append(set(source.reads))
    assert [len(files) for files in by_rank] == [30, 30]
    assert len(set.union(*by_rank)) == 60


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("window", {"window": 9}),
        ("files", {"source": NumberFiles([10, 0, 17, 9, 30, 3], "other")}),
        ("files", {"source": NumberFiles([11, 0, 17, 9, 30, 2])}),
        ("order", {"order": "keyed"}),
    ],
)
def test_settings_of_a_checkpoint_have_the_inputs_of_the_order(name: str, change: dict[str, Any]) -> None:
    before, after = loader_of().settings_of(0), loader_of(**change).settings_of(0)
    assert before.get(name) != after[name]
    assert before == loader_of(1, 2).settings_of(0)


@pytest.mark.parametrize("keeps", [True, False])
def test_fewer_samples_than_microbatches(keeps: bool) -> None:
    for total in range(1, 16):
        loader = loader_of(
            source=NumberFiles([0, total]), batch_size=8, microbatches=8, keeps_microbatch_size=keeps, window=3
        )
        assert sorted(int(index) for batch in loader for index in batch.indices) == list(range(total))


def test_stream_without_samples_or_window_is_refused() -> None:
    for files in ([], [0, 0]):
        with pytest.raises(DataError) as empty:
            StreamDataset(NumberFiles(files))
        assert empty.value.code == "E_EMPTY_DATASET"
    with pytest.raises(InputError) as caught:
        StreamDataset(NumberFiles(FILES), window=0)
    assert caught.value.code == "E_VALUE"
