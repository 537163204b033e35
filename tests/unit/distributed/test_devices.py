"""Selection and division of GPUs: computed from text and numbers, without any GPU."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep.distributed import devices
from samestep.distributed.devices import (
    ACCELERATOR,
    first_gpu_index,
    gpu_range,
    own_devices,
    require_own_gpus,
    select_devices,
    set_tf32,
)
from samestep.distributed.env import read_environment
from samestep.errors import InputError
from samestep.session import start


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


@pytest.mark.parametrize("text", ["", "0,", "a", "-1", "0 1", "GPU-8932f937", "0,1,", "\uff11"])
def test_invalid_list_of_positions_is_rejected(text: str) -> None:
    with pytest.raises(InputError) as error:
        select_devices(text, None, 4)
    assert error.value.value == f"--devices {text}"
    assert error.value.code == "E_DEVICES"


def test_repeated_and_missing_devices_are_rejected() -> None:
    for text, setting, count in (("0,1,0", None, 4), ("2", "4,5", 2), ("0", None, 0)):
        with pytest.raises(InputError, match=f"torch sees {count}") as error:
            select_devices(text, setting, count)
        assert error.value.code == "E_DEVICES"


@given(ranks=st.integers(1, 8), per_rank=st.integers(1, 8), more=st.integers(0, 3))
def test_gpus_are_divided_without_overlap(ranks: int, per_rank: int, more: int) -> None:
    available = ranks * per_rank + more
    ranges = [gpu_range(first_gpu_index(rank, per_rank, available), per_rank, available) for rank in range(ranks)]
    assert [index for indices in ranges for index in indices] == list(range(ranks * per_rank))


@pytest.mark.parametrize(
    ("rank", "per_rank", "available", "fix"),
    [
        (2, 1, 2, "use --processes 2, --share-gpu, or --device cpu"),
        (1, 2, 3, "use --processes 1, --share-gpu, or --device cpu"),
        (0, 1, 0, "use --device cpu"),
    ],
)
def test_rank_without_gpus_is_rejected(rank: int, per_rank: int, available: int, fix: str) -> None:
    with pytest.raises(InputError) as error:
        first_gpu_index(rank, per_rank, available)
    assert error.value.value.startswith(f"rank {rank} of")
    assert (error.value.code, error.value.fix) == ("E_DEVICES", fix)


def test_shared_gpus_are_filled_by_turns() -> None:
    assert [first_gpu_index(rank, 1, 2, share=True) for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [first_gpu_index(rank, 2, 5, share=True) for rank in range(4)] == [0, 2, 0, 2]
    with pytest.raises(InputError) as error:
        first_gpu_index(0, 2, 1, share=True)
    assert error.value.code == "E_DEVICES"


def test_rank_sees_its_own_devices_alone() -> None:
    assert [own_devices(rank, 1, None, 3, share=False) for rank in range(3)] == ["0", "1", "2"]
    assert [own_devices(rank, 2, "4,GPU-a,6,7", 4, share=False) for rank in range(2)] == ["4,GPU-a", "6,7"]
    assert [own_devices(rank, 1, "5", 1, share=True) for rank in range(2)] == ["5", "5"]
    with pytest.raises(InputError) as error:
        own_devices(1, 2, None, 3, share=False)
    assert error.value.code == "E_DEVICES"


def own_gpus_error(uuids: list[list[str]]) -> list[str]:
    """Call `require_own_gpus` as every rank, with one store; return the messages."""
    store, messages = dist.HashStore(), []
    for rank, own in enumerate(uuids):
        store.set(f"gpus/{rank}", ",".join(own))
    for rank, own in enumerate(uuids):
        try:
            require_own_gpus(store, rank, len(uuids), own)
        except InputError as error:
            assert error.code == "E_DEVICES"
            messages.append(error.value)
    return messages


def test_ranks_with_one_gpu_are_refused_by_name() -> None:
    """Also if each rank sees this GPU alone, as under srun and mpirun: UUIDs are equal, numbers need not be."""
    assert own_gpus_error([["GPU-a"], ["GPU-b"], ["GPU-a"]]) == ["ranks 0 and 2 use the same GPU, GPU-a"] * 3
    assert own_gpus_error([["GPU-a", "GPU-b"], ["GPU-b", "GPU-c"]]) == ["ranks 0 and 1 use the same GPU, GPU-b"] * 2
    assert own_gpus_error([["GPU-a"], ["GPU-b"], ["MIG-c"]]) == []


def sharing_of_ranks() -> list[str | None]:
    with start() as world:
        assert not world.stages_messages  # on a CPU
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "ACCELERATOR", "cpu")
            assert replace(world).stages_messages  # gloo on an accelerator
        return samestep.all_gather(read_environment().sharing, world)


@pytest.mark.parametrize("share_gpu", [False, True])
def test_launch_lets_every_rank_share(share_gpu: bool) -> None:
    """On a GPU: tests/gpu/test_divided_calls.py."""
    sharing = "gloo" if share_gpu else None
    assert samestep.launch(sharing_of_ranks, processes=2, share_gpu=share_gpu) == [sharing] * 2


def test_tf32_is_that_of_the_configuration() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for allowed, precision in ((True, "high"), (False, "highest")):
            set_tf32(torch.device(ACCELERATOR), allowed=allowed)
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (precision, allowed)
        set_tf32(torch.device("cpu"), allowed=True)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


class Stream:
    """Stream that records for which others it waits."""

    def __init__(self) -> None:
        self.waits: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(other)


def test_another_default_device_than_the_cpu_is_refused() -> None:
    message = "torch's default device is meta"
    with torch.device("meta"), pytest.raises(InputError, match=message) as refusal, start():
        pass
    assert refusal.value.code == "E_DEVICES"
