"""Comparison of the software of ranks: each difference is named on all ranks."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from samestep.errors import InputError, RunError
from samestep.launcher import software
from samestep.launcher.software import require_same_software

LIMIT = timedelta(seconds=20)


def test_equal_ranks_pass_and_a_missing_rank_is_an_error() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda rank: require_same_software(store, rank, 3, LIMIT), range(3)))
    require_same_software(dist.HashStore(), 0, 1, LIMIT)
    with pytest.raises(RunError) as caught:
        require_same_software(dist.HashStore(), 0, 2, timedelta(seconds=0.1))
    assert caught.value.code == "E_RENDEZVOUS"


def test_differences_are_grouped_by_host_and_library() -> None:
    main, other = {"torch": "2.10", "NumPy": "2.0"}, {"torch": "2.9", "NumPy": "2.0"}
    lines = software._differences([("h0", main), ("h0", main), ("h1", other), ("h1", other)])
    assert lines == ["ranks 2 and 3 on host h1: torch 2.9; rank 0 on host h0: torch 2.10"]
    many = software._differences([("h0", main), *((f"h{number}", other) for number in range(1, 9))])
    assert len(many) == 6
    assert many[-1] == "and 3 more"


def test_a_difference_is_an_error_with_hosts_and_ranks() -> None:
    store = dist.HashStore()
    dist.PrefixStore("software", store).set("1", '["h1", {"torch": "2.9"}]')  # rank 1, another process
    with pytest.raises(InputError) as caught:
        require_same_software(store, 0, 2, LIMIT)
    assert caught.value.code == "E_SOFTWARE_DIFFERS"
    assert "rank 1 on host h1: torch 2.9; rank 0 on host" in str(caught.value)
