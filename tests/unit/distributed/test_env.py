"""Environment variables: settings of launchers, devices and torch."""

import os

import pytest

from samestep.distributed.env import (
    environment_copy,
    prepare_torch_environment,
    read_environment,
    read_rendezvous,
    relevant_variables,
)
from samestep.distributed.launcher_detection import LAUNCH_VARIABLES
from samestep.errors import InputError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
TORCH = ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_NVML_BASED_CUDA_CHECK", "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_ORDER")


@pytest.fixture(autouse=True)
def unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset all variables in question, and restore them afterwards."""
    for name in (*LAUNCH_VARIABLES, *TORCH, "SAMESTEP_TOKEN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_rendezvous() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    rendezvous = read_rendezvous()
    assert rendezvous is not None
    assert (rendezvous.rank, rendezvous.world_size, rendezvous.address) == (3, 4, "node-0")


def test_token_and_devices_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    environment = read_environment()
    assert (environment.token, environment.visible_devices) == ("secret", "2,3")
    monkeypatch.setenv("SAMESTEP_TOKEN", "")
    with pytest.raises(InputError, match="SAMESTEP_TOKEN is empty"):
        read_environment()


def test_relevant_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "TORCHDYNAMO_DISABLE", "WORLD_SIZE", "HF_TOKEN"):
        monkeypatch.setenv(name, "1")
    variables = relevant_variables()
    assert {"NCCL_DEBUG", "TORCHDYNAMO_DISABLE", "WORLD_SIZE"} <= set(variables)
    assert "HF_TOKEN" not in variables
    assert environment_copy()["HF_TOKEN"] == "1"


def test_variables_of_torch_are_set() -> None:
    prepare_torch_environment(loopback=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    prepare_torch_environment(loopback=True)
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCH:
        monkeypatch.setenv(name, "custom")
    prepare_torch_environment(loopback=True)
    assert [os.environ[name] for name in TORCH] == ["custom"] * len(TORCH)
