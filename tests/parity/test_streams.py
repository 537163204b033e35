"""A stream gives one SHA-256 of the weights on any number of processes and workers."""

import sys
from functools import cache
from pathlib import Path

import pytest

from samestep import launch
from samestep.errors import SamestepError
from workers import streams


@cache
def alone() -> set[tuple[str, float]]:
    results: set[tuple[str, float]] = launch(streams.train, 0, processes=1)
    assert len(results) == 1
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "workers"),
    [
        (3, 0),
        (4, 3),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(1, 3), (2, 0), (2, 3), (3, 3), (4, 0)]),
    ],
)
def test_processes_and_workers_change_no_bit(processes: int, workers: int) -> None:
    assert launch(streams.train, workers, processes=processes) == alone()


@pytest.mark.slow
def test_resumption_with_another_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SamestepError):
        launch(streams.train, 0, tmp_path, 4, processes=1)
    with pytest.raises(SamestepError, match="window is 11, and was 10") as failed:
        launch(streams.train, 0, tmp_path, None, 11, processes=1)
    assert failed.value.code == "E_RESUME_CHANGED"


# --- large files ------------------------------------------------------------------------------------------

LIMIT = 40 << 20
FILES, SAMPLES = 80, 100  # 2 GiB


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("workers", [0, pytest.param(3, marks=pytest.mark.long)])
def test_memory_does_not_grow_with_the_data(tmp_path: Path, workers: int) -> None:
    assert FILES * SAMPLES * streams.SAMPLE_BYTES >= 50 * LIMIT
    streams.write_sparse_files(tmp_path / "data", FILES, SAMPLES)
    growth = launch(streams.read_large_files, tmp_path / "data", workers, processes=2)
    assert len(growth) == 2
    assert max(growth) < LIMIT
    # Control: one tenth of the data, all of it in memory.
    streams.write_sparse_files(tmp_path / "small", FILES // 10, SAMPLES)
    growth = launch(streams.read_large_files, tmp_path / "small", workers, True, processes=2)
    assert min(growth) > LIMIT
