"""Marks of waits for a device, with the CPU in place of an accelerator."""

from typing import Any

import pytest
import torch

from samestep.distributed import devices
from samestep.distributed.device_reads import DeviceReads
from samestep.distributed.status import RankStatus, local_rank_status


class Observed(torch.Tensor):
    """Tensor that records, when it is read, whether its rank waits."""

    status: RankStatus
    waits: list[bool]

    def tolist(self) -> Any:
        self.waits.append(self.status.snapshot.is_waiting)
        return super().tolist()

    def cpu(self, *_: Any) -> torch.Tensor:
        self.waits.append(self.status.snapshot.is_waiting)
        return super().cpu()


def observed(status: RankStatus) -> Observed:
    tensor = torch.tensor([1.5, 2.5]).as_subclass(Observed)
    tensor.status = status
    tensor.waits = []
    return tensor


@pytest.mark.parametrize("is_accelerator", [False, True])
def test_reads_of_an_accelerator_are_waits(is_accelerator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_accelerator:
        monkeypatch.setattr(devices, "ACCELERATOR", "cpu")
    reads = DeviceReads()
    status = reads.rank_status = local_rank_status()
    status.is_free = True
    tensor = observed(status)
    assert reads.values(tensor) == [1.5, 2.5]
    assert reads.copy(tensor).sum() == 4
    assert tensor.waits == [is_accelerator] * 2
    with pytest.raises(RuntimeError, match="assert"), reads.waiting(tensor.device):
        # A rank in a plain loop is watched while it waits.
        assert (status.snapshot.is_waiting, status.snapshot.is_resting) == (is_accelerator, False)
        raise RuntimeError("device-side assert triggered")
    assert not status.snapshot.is_waiting


def test_reads_outside_of_ranks_are_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "ACCELERATOR", "cpu")
    assert DeviceReads().values(torch.tensor(3)) == 3
