"""Selection and division of GPUs: computed from text and numbers, without any GPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep.config import MeshConfig, StrategyConfig
from samestep.distributed import devices
from samestep.distributed.devices import (
    ACCELERATOR,
    first_gpu_index,
    gpu_range,
    own_devices,
    parse_devices,
    select_first_device,
)
from samestep.distributed.env import Sharing, read_environment
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
    assert ",".join(parse_devices(text, setting, len(setting.split(",")))) == names


@pytest.mark.parametrize("text", ["", "0,", "a", "-1", "0 1", "GPU-8932f937", "0,1,", "\uff11"])
def test_invalid_list_of_positions_is_rejected(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_devices(text, None, 4)
    assert error.value.value == f"--devices {text}"
    assert error.value.code == "E_DEVICES"


def test_repeated_and_missing_devices_are_rejected() -> None:
    for text, setting, count in (("0,1,0", None, 4), ("2", "4,5", 2), ("0", None, 0)):
        with pytest.raises(InputError, match=f"torch sees {count}") as error:
            parse_devices(text, setting, count)
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


class OneGpu:
    """torch's functions for accelerators on a machine with one."""

    def device_count(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        assert device == torch.device(ACCELERATOR, 0)


@pytest.mark.parametrize(
    ("sharing", "stages", "refusal"),
    [(None, 1, "E_DEVICES"), ("gloo", 1, None), ("gloo", 2, "E_INCOMPATIBLE"), ("nccl", 1, None), ("nccl", 2, None)],
)
def test_refusals_of_ranks_on_one_gpu(
    sharing: Sharing | None, stages: int, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: OneGpu())
    strategy = StrategyConfig(name="pp", mesh=MeshConfig(pipeline=2)) if stages == 2 else StrategyConfig()

    def selected() -> torch.device:
        return select_first_device("cuda", strategy, 2, 1, sharing=sharing, sees_own=False, can_see_own=False)

    if refusal is not None:
        with pytest.raises(InputError) as raised:
            selected()
        assert raised.value.code == refusal
    else:
        assert selected() == torch.device(ACCELERATOR, 0)


def test_rank_sees_its_own_devices_alone() -> None:
    assert [own_devices(rank, 1, None, 3, share=False) for rank in range(3)] == ["0", "1", "2"]
    assert [own_devices(rank, 2, "4,GPU-a,6,7", 4, share=False) for rank in range(2)] == ["4,GPU-a", "6,7"]
    assert [own_devices(rank, 1, "5", 1, share=True) for rank in range(2)] == ["5", "5"]
    with pytest.raises(InputError) as error:
        own_devices(1, 2, None, 3, share=False)
    assert error.value.code == "E_DEVICES"


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


def test_another_default_device_than_the_cpu_is_refused() -> None:
    message = "torch's default device is meta"
    with torch.device("meta"), pytest.raises(InputError, match=message) as refusal, start():
        pass
    assert refusal.value.code == "E_DEVICES"
