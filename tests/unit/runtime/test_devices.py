"""A choice among the GPUs that this process may use: a computation on text, tried without any."""

import pytest

from samestep.errors import InputError
from samestep.runtime.devices import chosen, visible


def test_positions_among_all_devices() -> None:
    devices = chosen("0,2", None, 4)
    assert devices.positions == (0, 2)
    assert devices.variables() == {"CUDA_VISIBLE_DEVICES": "0,2"}


@pytest.mark.parametrize(
    ("setting", "text", "names"),
    [
        ("4,5,6", "0,2", "4,6"),
        ("4, 5", "1", "5"),
        ("GPU-8932f937,GPU-1234", "1,0", "GPU-1234,GPU-8932f937"),
        ("MIG-GPU-89/1/0,MIG-a", "1", "MIG-a"),
    ],
)
def test_positions_among_those_that_are_visible(setting: str, text: str, names: str) -> None:
    devices = chosen(text, setting, len(setting.split(",")))
    assert devices.variables() == {"CUDA_VISIBLE_DEVICES": names}


def test_what_cuda_does_not_count_is_not_there() -> None:
    assert visible("3,-1,4", 1) == ("3",)
    assert visible("", 0) == ()
    with pytest.raises(InputError, match="no device 1: torch sees 1"):
        chosen("0,1", "3,-1,4", 1)


@pytest.mark.parametrize("text", ["", "0,", "a", "-1", "0 1", "GPU-8932f937", "0,1,", "\uff11"])
def test_what_is_no_list_of_positions_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="positions among the devices"):
        chosen(text, None, 4)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="names a device twice"):
        chosen("0,1,0", None, 4)
    with pytest.raises(InputError, match=r"counted within CUDA_VISIBLE_DEVICES=4,5"):
        chosen("2", "4,5", 2)
    with pytest.raises(InputError, match="torch sees no GPU"):
        chosen("0", None, 0)
