"""Small messages between the ranks of one machine."""

from pathlib import Path
from typing import Any

import pytest

from samestep import launch
from workers import local_sockets

RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder: Path = tmp_path_factory.mktemp("long") / ("x" * 120)
    folder.mkdir()
    results: dict[str, list[Any]] = launch(local_sockets.run_checks, str(folder), processes=RANKS)
    return results


@pytest.mark.parametrize("size", ["small", "large"])
def test_every_rank_receives_all_values(results: dict[str, list[Any]], size: str) -> None:
    assert len(results[size]) == RANKS
    assert all(all(each) for each in results[size])


def test_some_ranks_exchange_without_the_others(results: dict[str, list[Any]]) -> None:
    assert results["some"] == [None, True, True, True]


def test_values_are_combined_over_sockets_and_by_the_backend(results: dict[str, list[Any]]) -> None:
    ranks = len(results["combined"])
    total, last = 2.0**ranks - 1, float(ranks - 1)
    few_and_many = [[[total, total], [last, 0.0], last]] * 2
    assert results["combined"] == [few_and_many] * ranks


def test_closed_connection_is_the_loss_of_a_rank(results: dict[str, list[Any]]) -> None:
    assert results["closed"] == ["E_PEER_LOST"] * RANKS


def test_missing_message_is_an_error_after_the_time_limit(results: dict[str, list[Any]]) -> None:
    codes, seconds = zip(*results["missing"], strict=True)
    assert codes == ("E_PEER_LOST",) * RANKS
    assert 0.4 < max(seconds[:-1]) < 10  # others end with the first


def test_no_rank_is_connected_if_one_cannot_be(results: dict[str, list[Any]]) -> None:
    assert results["long folder"] == [False] * RANKS
