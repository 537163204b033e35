"""Selection and division of GPUs: computed from text and numbers, without any GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.distributed.devices import first_gpu_index, gpu_range, gpu_stats, select_devices, visible_devices
from samestep.errors import InputError


def test_positions_among_all_devices() -> None:
    assert select_devices("0,2", None, 4) == ("0", "2")


@pytest.mark.parametrize(
    ("setting", "text", "names"),
    [
        ("4,5,6", "0,2", "4,6"),
        ("4, 5", "1", "5"),
        ("GPU-8932f937,GPU-1234", "1,0", "GPU-1234,GPU-8932f937"),
        ("MIG-GPU-89/1/0,MIG-a", "1", "MIG-a"),
    ],
)
def test_positions_among_visible_devices(setting: str, text: str, names: str) -> None:
    assert ",".join(select_devices(text, setting, len(setting.split(",")))) == names


def test_entries_that_cuda_ignores_do_not_exist() -> None:
    assert visible_devices("3,-1,4", 1) == ("3",)
    assert visible_devices("", 0) == ()
    with pytest.raises(InputError, match="no device 1: torch sees 1"):
        select_devices("0,1", "3,-1,4", 1)


@pytest.mark.parametrize("text", ["", "0,", "a", "-1", "0 1", "GPU-8932f937", "0,1,", "\uff11"])
def test_invalid_list_of_positions_is_rejected(text: str) -> None:
    with pytest.raises(InputError) as error:
        select_devices(text, None, 4)
    assert error.value.value == f"--devices {text}"
    assert error.value.code == "E_DEVICES"


def test_repeated_and_missing_devices_are_rejected() -> None:
    with pytest.raises(InputError, match="names a device twice"):
        select_devices("0,1,0", None, 4)
    with pytest.raises(InputError, match=r"counted within CUDA_VISIBLE_DEVICES=4,5"):
        select_devices("2", "4,5", 2)
    with pytest.raises(InputError, match="torch sees no GPU"):
        select_devices("0", None, 0)


@given(ranks=st.integers(1, 8), per_rank=st.integers(1, 8), more=st.integers(0, 3))
def test_gpus_are_divided_without_overlap(ranks: int, per_rank: int, more: int) -> None:
    available = ranks * per_rank + more
    ranges = [gpu_range(first_gpu_index(rank, per_rank, available), per_rank, available) for rank in range(ranks)]
    assert [index for indices in ranges for index in indices] == list(range(ranks * per_rank))


def test_without_a_number_one_rank_has_all_gpus() -> None:
    assert list(gpu_range(first_gpu_index(0, 1, 4), None, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rank", "per_rank", "available", "fix"),
    [
        (2, 1, 2, "use --processes 2, or --device cpu"),
        (1, 2, 3, "use --processes 1, or --device cpu"),
        (0, 1, 0, "use --device cpu"),
    ],
)
def test_rank_without_gpus_is_rejected(rank: int, per_rank: int, available: int, fix: str) -> None:
    with pytest.raises(InputError) as error:
        first_gpu_index(rank, per_rank, available)
    assert f"number {rank}" in error.value.value
    assert (error.value.code, error.value.fix) == ("E_DEVICES", fix)


def test_too_many_devices_are_rejected() -> None:
    with pytest.raises(InputError, match=r"strategy\.devices is 3, but torch sees 1 GPU here"):
        gpu_range(1, 3, 2)


def test_cpu_has_no_gpu_stats() -> None:
    """On a GPU: tests/gpu/test_gpu_numbers.py."""
    assert gpu_stats(torch.device("cpu")) is None
