"""`samestep.loader` without a world: whole batches in an order that does not depend on ranks."""

import logging
import random
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import samestep
from samestep.cursor import Cursor
from samestep.data.whole_batches import WholeBatches
from samestep.errors import InputError
from workers import sessions


def data(size: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(float(size)))


def rows(batches: WholeBatches) -> list[list[float]]:
    return [batch[0].tolist() for batch in batches]


class Mappings(Dataset[dict[str, Any]]):
    """Samples with names and random numbers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "text": f"sample {index}", "random": random.random()}


def test_batches_are_those_of_torch() -> None:
    batches = samestep.loader(data(), batch_size=4)
    expected = list(torch.utils.data.DataLoader(data(), batch_size=4))
    assert len(batches) == len(expected) == 3
    for batch, other in zip(batches, expected, strict=True):
        assert type(batch) is type(other) is list
        assert torch.equal(batch[0], other[0])
    assert rows(samestep.loader(data(), batch_size=4, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("workers", [0, 2])
def test_mappings(workers: int) -> None:
    got = list(samestep.loader(Mappings(), batch_size=2, num_workers=workers))
    assert [batch["text"] for batch in got] == [
        ["sample 0", "sample 1"],
        ["sample 2", "sample 3"],
        ["sample 4", "sample 5"],
    ]
    other = list(samestep.loader(Mappings(), batch_size=3))
    numbers = [number for batch in got for number in batch["random"].tolist()]
    assert numbers == [number for batch in other for number in batch["random"].tolist()]


def test_order_does_not_depend_on_ranks() -> None:
    rows = samestep.launch(sessions.orders, 2, processes=1)
    assert samestep.launch(sessions.orders, 2, processes=3) == rows
    first, second = [sum(map(tuple, epoch), ()) for epoch in (rows[:6], rows[6:])]
    assert sorted(first) == sorted(second) == list(range(sessions.SAMPLES))
    assert first != second


def test_each_iteration_is_an_epoch() -> None:
    batches = samestep.loader(data(), batch_size=4, shuffle=True)
    complete = [rows(batches) for _ in range(3)]
    assert complete[0] != complete[1]
    other = samestep.loader(data(), batch_size=4, shuffle=True)
    assert [batch[0].tolist() for batch in islice(other, 2)] == complete[0][:2]  # left early
    assert rows(other) == complete[1]
    assert other.cursor == Cursor(2)


def test_cursor_resumes_within_an_epoch() -> None:
    batches = samestep.loader(data(), batch_size=4, shuffle=True)
    expected = rows(batches) + rows(batches)
    other = samestep.loader(data(), batch_size=4, shuffle=True)
    other.cursor = Cursor(0, 8)
    assert rows(other) + rows(other) == expected[2:]


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    rows(samestep.loader(data(), batch_size=4, shuffle=True, num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_epochs_count_epochs_that_were_left_early() -> None:
    batches = samestep.loader(data(), batch_size=4)
    seen = []
    for epoch in samestep.epochs(batches, 3):
        for number, _ in enumerate(batches):
            if number == epoch:
                break
        seen.append(epoch)
    assert seen == [0, 1, 2]
    with pytest.raises(InputError, match="no batch of the loader was read in epoch 3"):
        list(samestep.epochs(batches, 4))


class Counting(torch.utils.data.Dataset[int]):
    """Samples with the number of reads before."""

    reads = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int, /) -> int:
        self.reads += 1
        return self.reads


@pytest.mark.parametrize("samples", [0, 4])
def test_resumed_data_with_a_memory_are_reported(samples: int, caplog: pytest.LogCaptureFixture) -> None:
    batches = samestep.loader(Counting(), 4)
    batches.cursor = Cursor(0, samples)
    assert next(iter(batches)).tolist() == [1, 2, 3, 4]
    reported = [record.levelname for record in caplog.records]
    assert reported == ["WARNING"] * (samples > 0)


def test_finished_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    batches = samestep.loader(data(), batch_size=4)
    batches.cursor = Cursor(2)
    with caplog.at_level(logging.INFO, logger="samestep"):
        assert list(samestep.epochs(batches, 2)) == []
    assert caplog.messages == ["this run is complete: 2 of 2 epochs were trained by earlier starts"]


def test_arguments_are_those_of_torch() -> None:
    batches = samestep.loader(data(), 4, False, None, None, 0, len)
    assert list(batches) == [4, 4, 2]
    assert (batches.batch_size, batches.num_workers, len(batches.dataset)) == (4, 0, 10)
    assert rows(samestep.loader(data(2))) == [[0.0], [1.0]]
    assert [float(sample[0]) for sample in samestep.loader(data(2), None)] == [0.0, 1.0]
    with pytest.raises(InputError, match="no argument colour"):
        samestep.loader(data(), colour=1)
    with pytest.raises(InputError, match="a DataLoader and batch_size"):
        samestep.loader(torch.utils.data.DataLoader(data()), 4)


def test_loader_of_torch_stays_as_it_is() -> None:
    original = torch.utils.data.DataLoader(data(), 4)
    batches = samestep.loader(original)
    assert rows(batches) == [batch[0].tolist() for batch in original]
    assert "_get_iterator" not in vars(original)


class Spawned(Dataset[float]):
    """Draws, and knows the data set of its worker."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        info = torch.utils.data.get_worker_info()
        assert info is None or type(info.dataset) is Spawned
        return index + random.random()


@pytest.mark.slow
def test_spawned_workers_read_the_same() -> None:
    expected = list(samestep.loader(Spawned(), 4))
    batches = samestep.loader(Spawned(), 4, num_workers=2, multiprocessing_context="spawn")
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch, other)


def test_worker_init_function_sees_the_data_set_of_the_script() -> None:
    def change(number: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        info.dataset.tensors[0].fill_(7)

    batches = samestep.loader(data(4), 2, num_workers=1, worker_init_fn=change)
    assert rows(batches) == [[7, 7], [7, 7]]


def test_samples_of_a_shared_generator_are_seeded_and_the_generator_is_left_alone() -> None:
    rng = random.Random(5)
    state = rng.getstate()

    class Shared(Spawned):
        def __getitem__(self, index: int) -> float:
            return index + rng.random()

    class Owning(Spawned):
        def __init__(self) -> None:
            self.rng = rng

        def __getitem__(self, index: int) -> float:
            return index + self.rng.random()

    first = torch.cat(list(samestep.loader(Owning(), 4)))
    assert rng.getstate() == state
    assert torch.equal(first, torch.cat(list(samestep.loader(Owning(), 5))))
    assert rng.getstate() == state
    assert samestep.loader(Shared(), 4)._state.decision is None


def test_stop_request_ends_a_loop_over_epochs_before_its_next_batch() -> None:
    seen = []
    with pytest.raises(SystemExit) as raised, samestep.init(device="cpu"):
        batches = samestep.loader(list(range(6)), 2)
        for epoch in samestep.epochs(batches, 2):
            for batch in batches:
                seen.append((epoch, batch.tolist()))
                if len(seen) == 2:
                    samestep.request_stop()
    assert raised.value.code == 130
    assert seen == [(0, [0, 1]), (0, [2, 3])]


def test_a_generator_of_the_loader_continues_after_a_resumption() -> None:
    def loader() -> WholeBatches:
        generator = torch.Generator().manual_seed(3)
        return samestep.loader(torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True, generator=generator))

    plain = loader()
    orders = [rows(plain) for _ in range(3)]
    for complete in (False, True):
        first = loader()
        assert rows(first) == orders[0]
        iterator = iter(first)
        taken = list(islice(iterator, 3 if complete else 2))
        if complete:
            assert list(iterator) == []
        resumed = loader()
        resumed.cursor = first.cursor
        resumed.load_state_dict(first.state_dict())
        assert [*(batch[0].tolist() for batch in taken), *rows(resumed)][-3:] == orders[2 if complete else 1]
        assert rows(resumed) == orders[2] or complete


def test_an_argument_that_comes_twice_is_refused() -> None:
    with pytest.raises(InputError) as error:
        samestep.loader(data(), 3, batch_size=6)
    assert error.value.code == "E_LOADER"
