"""Settings of kernels: TF32, and deterministic kernels up to a step."""

from collections.abc import Callable, Iterator

import pytest
import torch

from samestep.distributed.devices import ACCELERATOR
from samestep.distributed.kernels import KERNEL_SETTINGS, EqualKernels, kernel_settings, set_tf32, tf32_off


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


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Put torch's settings back."""
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def is_deterministic() -> bool:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and warns and not torch.backends.cudnn.benchmark


def test_settings_hold_until_the_step() -> None:
    torch.backends.cudnn.benchmark = True
    before = kernel_settings()
    kernels = EqualKernels(is_needed=True)
    kernels.begin()
    kernels.begin()
    assert is_deterministic()
    kernels.end()
    assert kernel_settings() == before
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_nothing_changes_on_one_rank() -> None:
    before = kernel_settings()
    kernels = EqualKernels(is_needed=False)
    kernels.begin()
    assert kernel_settings() == before
    kernels.end()
    assert kernel_settings() == before


def test_settings_that_a_script_changes_in_between_stay() -> None:
    kernels = EqualKernels(is_needed=True)
    kernels.begin()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    kernels.end()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.benchmark


def test_a_deterministic_script_keeps_its_errors() -> None:
    torch.use_deterministic_algorithms(True)
    kernels = EqualKernels(is_needed=True)
    kernels.begin()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    kernels.end()
    assert torch.are_deterministic_algorithms_enabled()
