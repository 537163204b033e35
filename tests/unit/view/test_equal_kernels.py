"""Deterministic kernels while several ranks compute the same."""

from collections.abc import Iterator

import pytest
import torch

from samestep.distributed.devices import kernel_settings
from samestep.view.equal_kernels import EqualKernels
from samestep.view.region import Region, inside


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


def test_calls_inside_of_a_divided_call_change_nothing() -> None:
    before = kernel_settings()
    kernels = EqualKernels(is_needed=True)
    with inside(Region(4, 0, 2, exchange=None, draw_factors=())):  # type: ignore[arg-type]
        kernels.begin()
    assert kernel_settings() == before
