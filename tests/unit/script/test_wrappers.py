"""Wrappers for several devices are the module itself."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from samestep.script.wrappers import transparent_wrappers


@pytest.fixture
def wrappers() -> Iterator[None]:
    owners = (nn.DataParallel, nn.SyncBatchNorm)
    before = [dict(vars(owner)) for owner in owners]
    with transparent_wrappers():
        yield
    assert [dict(vars(owner)) for owner in owners] == before


def test_data_parallel_is_the_module_itself(wrappers: None, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Linear(3, 2)
    batch = torch.rand(5, 3)
    with caplog.at_level(logging.INFO, logger="samestep"):
        wrapped = nn.DataParallel(module, device_ids=[0, 1, 2, 3], output_device=2)
    assert wrapped.module is module
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    assert torch.equal(wrapped(input=batch), module(batch))
    assert isinstance(wrapped, nn.DataParallel)
    (message,) = (record.message for record in caplog.records)
    assert message.startswith(f"{__file__}:")
    assert message.endswith(": DataParallel is the module itself: Samestep divides its calls")


def test_data_parallel_moves_inputs_to_the_device_of_the_module(
    wrappers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.script.wrappers.is_accelerator", lambda device: device.type == "meta")
    wrapped = nn.DataParallel(nn.Bilinear(3, 2, 4)).to("meta")
    output = wrapped(torch.rand(5, 3), input2=torch.rand(5, 2))
    assert (output.device.type, output.shape) == ("meta", (5, 4))


def test_batch_norm_is_not_converted(wrappers: None, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    with caplog.at_level(logging.INFO, logger="samestep"):
        assert nn.SyncBatchNorm.convert_sync_batchnorm(module) is module
    assert type(module[0]) is nn.BatchNorm1d
    assert len(caplog.records) == 1
    assert "batch norm uses statistics of the whole batch" in caplog.text
