"""Selection and division of GPUs: computed from text and numbers, without any GPU."""

from collections.abc import Callable, Iterator
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
    KERNEL_SETTINGS,
    first_gpu_index,
    gpu_range,
    kernel_settings,
    own_devices,
    parse_devices,
    select_first_device,
    set_tf32,
    tf32_off,
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


@pytest.fixture
def tf32_restored() -> Iterator[None]:
    older = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision(older[0])
    torch.backends.cudnn.allow_tf32 = older[1]


def by_operation() -> tuple[str, str, str]:
    return (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision,
    )


@pytest.mark.usefixtures("tf32_restored")
def test_tf32_is_that_of_the_configuration() -> None:
    gpu = torch.device(ACCELERATOR)
    for allowed, precision in ((True, "high"), (False, "highest")):
        set_tf32(gpu, allowed=allowed)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (precision, allowed)
    torch.set_float32_matmul_precision("high")
    before = kernel_settings()
    set_tf32(torch.device("cpu"), allowed=False)
    set_tf32(gpu, allowed=None)
    assert kernel_settings() == before
    torch.backends.fp32_precision = "tf32"  # of all backends
    set_tf32(gpu, allowed=False)
    assert by_operation() == ("ieee", "ieee", "ieee")


SETTINGS: dict[str, Callable[[], None]] = {
    "of torch": lambda: None,
    "older": lambda: torch.set_float32_matmul_precision("medium"),
    "newer": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "newer, of one operation": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "newer, of all backends": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.mark.usefixtures("tf32_restored")
@pytest.mark.parametrize("setting", SETTINGS)
def test_tf32_is_off_inside_a_block_and_as_before_after_it(setting: str) -> None:
    SETTINGS[setting]()
    before = kernel_settings()
    with tf32_off():
        assert "tf32" not in by_operation()
        torch.backends.cudnn.allow_tf32 = True  # code of the script
    assert kernel_settings() == before
    if not setting.startswith("newer"):
        assert torch.get_float32_matmul_precision() == ("medium" if setting == "older" else "highest")


@pytest.mark.usefixtures("tf32_restored")
def test_kernel_settings_are_read_after_older_and_newer_ones() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with pytest.raises(RuntimeError):
        _ = torch.backends.cudnn.allow_tf32
    named = dict(zip(KERNEL_SETTINGS, kernel_settings(), strict=True))
    assert named["fp32_precision of cuda.matmul"] == "tf32"
    assert named["fp32_precision of cuda.conv"] == "ieee"


def test_another_default_device_than_the_cpu_is_refused() -> None:
    message = "torch's default device is meta"
    with torch.device("meta"), pytest.raises(InputError, match=message) as refusal, start():
        pass
    assert refusal.value.code == "E_DEVICES"
