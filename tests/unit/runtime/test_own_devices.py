"""Which GPUs are whose, by arithmetic alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import InputError
from samestep.runtime.own_devices import first_gpu, gpus_from


@given(ranks=st.integers(1, 8), width=st.integers(1, 8), more=st.integers(0, 3))
def test_ranks_share_the_gpus_and_none_has_two_ranks(ranks: int, width: int, more: int) -> None:
    there = ranks * width + more
    owned = [number for rank in range(ranks) for number in gpus_from(first_gpu(rank, width, there), width, there)]
    assert owned == list(range(ranks * width))


def test_without_a_number_one_rank_has_all() -> None:
    assert list(gpus_from(first_gpu(0, 1, 4), None, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rank", "width", "there", "rule", "do"),
    [
        (2, 1, 2, "one GPU a rank", "use --processes 2, or --device cpu"),
        (1, 2, 3, "2 GPUs a rank, as strategy.devices has it", "use --processes 1, or --device cpu"),
        (0, 1, 0, "one GPU a rank", "use --device cpu"),
    ],
)
def test_a_rank_for_which_none_are_left_is_refused(rank: int, width: int, there: int, rule: str, do: str) -> None:
    with pytest.raises(InputError) as refused:
        first_gpu(rank, width, there)
    assert f"number {rank}" in refused.value.value
    assert (refused.value.rule, refused.value.do) == (rule, do)


def test_more_devices_than_there_are_refused() -> None:
    with pytest.raises(InputError, match=r"strategy\.devices is 3, but torch sees 1 GPU here"):
        gpus_from(1, 3, 2)
