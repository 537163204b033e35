"""Dataset of a stream: samples in order of the files on any number of ranks, and refusals."""

import pytest
import torch

import samestep
from helpers.number_files import NumberFiles
from samestep.data.streams.dataset import StreamDataset
from samestep.errors import DataError, InputError
from samestep.microbatches import Cursor

FILES = [10, 0, 17, 9, 30, 3]


def used(loader: object) -> list[list[object]]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]  # type: ignore[attr-defined]


def test_iteration_resumes_at_any_batch() -> None:
    def made() -> samestep.loader:  # type: ignore[valid-type]
        dataset = StreamDataset(NumberFiles(FILES), window=8)
        return samestep.loader(dataset, 16, shuffle=True, seed=5)

    whole = used(made())
    assert len(whole) == 5
    resumed = made()
    resumed.cursor = Cursor(0, 32)
    assert used(resumed) == whole[2:]


def test_stream_without_samples_or_window_is_refused() -> None:
    for files in ([], [0, 0]):
        with pytest.raises(DataError) as empty:
            StreamDataset(NumberFiles(files))
        assert empty.value.code == "E_DATA"
    with pytest.raises(InputError) as caught:
        StreamDataset(NumberFiles(FILES), window=0)
    assert caught.value.code == "E_VALUE"
