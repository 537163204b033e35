"""Statistics of a GPU: `pytest -m gpu` on a machine with one."""

import importlib.util

import pytest
import torch

from samestep.distributed.devices import gpu_stats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
HAS_NVML = importlib.util.find_spec("pynvml") is not None


def test_memory_use_and_temperature() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.ones(2**28, dtype=torch.uint8, device=device)
    found = gpu_stats(device)
    assert found is not None
    assert found["name"] == torch.cuda.get_device_name(device)
    assert held.numel() <= found["memory_bytes"] <= found["memory_total_bytes"]
    assert held.numel() <= found["peak_allocated_bytes"] <= found["memory_bytes"]
    if HAS_NVML:
        assert 0 <= found["use_percent"] <= 100
        assert 10 < found["temperature_c"] < 110
    else:
        assert (found["use_percent"], found["temperature_c"]) == (None, None)
