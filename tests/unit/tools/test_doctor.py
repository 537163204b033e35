"""Tests of the checks of `samestep doctor` with constructed facts."""

from collections.abc import Iterable

import pytest
import torch

from samestep.tools import doctor
from samestep.tools.doctor import (
    Finding,
    Gpu,
    Nvidia,
    TorchDevices,
    check_gpus,
    check_variables,
    parse_nvidia_smi,
)

GIB = 1 << 30
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 * GIB, 0)
TWO_GPUS = Nvidia("550.54.15", (A100, A100))


def verdicts(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}


@pytest.mark.parametrize(
    ("name", "value", "is_warned"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", False),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", False),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8", True),
        ("NVIDIA_TF32_OVERRIDE", "0", True),
        ("SAMESTEP_SHARE_GPU", "1", False),
        ("SAMESTEP_SHARE_GPU", "nccl", True),
        ("OMP_NUM_THREADS", "8,2", False),
        ("OMP_NUM_THREADS", "9", True),
        ("OMP_NUM_THREADS", "all", True),
    ],
)
def test_variable(name: str, value: str, is_warned: bool) -> None:
    expected = {name: "warn"} if is_warned else {"environment variables": "pass"}
    assert verdicts(check_variables({name: value}, processors=8)) == expected


def test_nvidia_smi_output() -> None:
    text = "NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 40960\nNVIDIA A100-SXM4-80GB, 550.54.15, 81920, [N/A]\n"
    nvidia = parse_nvidia_smi(text)
    assert nvidia == Nvidia("550.54.15", (Gpu(A100.name, 80 * GIB, 40 * GIB), A100))
    found = verdicts(check_gpus(nvidia, None))
    assert found == {"GPUs": "info", "memory of GPU 0": "warn", "memory of GPU 1": "pass"}
    assert parse_nvidia_smi("No devices were found\n") == Nvidia()


@pytest.mark.parametrize(
    ("nvidia", "devices", "expected"),
    [
        (Nvidia(), TorchDevices(), {"GPUs": "pass"}),
        (TWO_GPUS, TorchDevices(("A100", "A100")), {"GPUs": "pass", "GPU links": "pass"}),
        (TWO_GPUS, TorchDevices(("A100", "A100"), unlinked=((0, 1),)), {"GPUs": "pass", "GPU links": "warn"}),
        (TWO_GPUS, TorchDevices(("A100",)), {"GPUs": "fail"}),
        (TWO_GPUS, TorchDevices(error="no kernel image"), {"GPUs": "fail"}),
        (Nvidia(error="mismatch"), TorchDevices(), {"nvidia-smi": "fail", "GPUs": "pass"}),
    ],
)
def test_gpus(nvidia: Nvidia, devices: TorchDevices, expected: dict[str, str]) -> None:
    found = verdicts(check_gpus(nvidia, devices))
    assert {name: verdict for name, verdict in found.items() if not name.startswith("memory")} == expected


def test_devices_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, device: str) -> torch.Tensor:
        raise RuntimeError(f"no kernel image is available on {device}\nfurther text")

    monkeypatch.setattr(doctor, "redirect_to_null", lambda descriptors: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    answers = {"init": None, "device_count": 2, "get_device_name": "B200", "can_device_access_peer": False}
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    with monkeypatch.context() as kernels:
        kernels.setattr(torch, "ones", fail)
        assert doctor.read_devices() == TorchDevices(error="no kernel image is available on cuda:0")
    monkeypatch.setattr(torch, "ones", lambda *_, device: torch.zeros(1))
    assert doctor.read_devices() == TorchDevices(("B200", "B200"), unlinked=((0, 1),))
