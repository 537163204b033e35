"""Tests of the GPU checks with recorded output of nvidia-smi."""

from collections.abc import Iterable

import pytest
import torch

from samestep.tools.doctor import doctor
from samestep.tools.doctor.findings import Finding
from samestep.tools.doctor.gpus import (
    Gpu,
    Nvidia,
    TorchDevices,
    check_gpu_memory,
    check_gpus,
    check_visible_devices,
    parse_gpus,
    parse_processes,
)

GIB = 1 << 30
QUERY = """\
GPU-aaaa, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 4
GPU-bbbb, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 40960
"""
APPS = "4242, GPU-bbbb\n[N/A], GPU-bbbb\n"
A100 = Gpu("GPU-a", "NVIDIA A100-SXM4-80GB", 80 * GIB, 0)
TWO_GPUS = Nvidia("550.54.15", (A100, A100))


def verdicts(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}


def test_parse_nvidia_smi() -> None:
    driver, gpus = parse_gpus(QUERY)
    assert driver == "550.54.15"
    assert gpus[0] == Gpu("GPU-aaaa", "NVIDIA A100-SXM4-80GB", 81920 << 20, 4 << 20)
    assert gpus[1].memory_used == 40 * GIB
    assert parse_processes(APPS) == ((4242, "GPU-bbbb"),)


def test_parse_empty_output_of_nvidia_smi() -> None:
    assert parse_gpus("No devices were found\n") == (None, ())
    assert parse_processes("") == ()


@pytest.mark.parametrize(
    ("setting", "verdict"),
    [("0,1", "pass"), ("1", "pass"), ("GPU-aaaa", "pass"), ("0,2", "fail"), ("1,1", "fail"), (" ", "warn")],
)
def test_visible_devices(setting: str, verdict: str) -> None:
    findings = check_visible_devices({"CUDA_VISIBLE_DEVICES": setting}, TWO_GPUS)
    assert verdicts(findings) == {"CUDA_VISIBLE_DEVICES": verdict}


@pytest.mark.parametrize(
    ("nvidia", "devices", "name", "verdict"),
    [
        (Nvidia(), None, "GPUs", "info"),
        (TWO_GPUS, None, "GPUs", "info"),
        (TWO_GPUS, TorchDevices(("A100", "A100")), "GPUs", "pass"),
        (TWO_GPUS, TorchDevices(error="no device"), "GPUs", "fail"),
        (Nvidia(), TorchDevices(error="no driver"), "GPUs", "info"),
        (Nvidia("550", error="mismatch"), None, "nvidia-smi", "fail"),
    ],
)
def test_gpus(nvidia: Nvidia, devices: TorchDevices | None, name: str, verdict: str) -> None:
    assert verdicts(check_gpus(nvidia, devices))[name] == verdict


def test_gpu_memory_in_use() -> None:
    assert verdicts(check_gpu_memory(TWO_GPUS)) == {"memory of GPUs": "pass"}
    _, gpus = parse_gpus(QUERY)
    (finding,) = check_gpu_memory(Nvidia("550", gpus, parse_processes(APPS)))
    assert (finding.name, finding.verdict) == ("memory of GPU 1", "warn")
    assert "process 4242" in finding.value
    (finding,) = check_gpu_memory(Nvidia("550", gpus))
    assert "not visible" in finding.value


def test_gpu_on_which_torch_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, device: str) -> torch.Tensor:
        raise RuntimeError(f"no kernel image is available on {device}\nfurther text")

    monkeypatch.setattr(doctor, "_silence_stderr", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {"init": None, "device_count": 2, "get_device_name": "B200"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    with monkeypatch.context() as kernels:
        kernels.setattr(torch, "ones", fail)
        assert doctor.read_devices() == TorchDevices(error="no kernel image is available on cuda:0")
    monkeypatch.setattr(torch, "ones", lambda *_, device: torch.zeros(1))
    assert doctor.read_devices() == TorchDevices(("B200", "B200"))
