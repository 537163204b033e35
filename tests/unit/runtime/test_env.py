"""The environment is read once, in one place, and torch's own settings are only made where nobody made them."""

import os

import pytest

from samestep.errors import InputError
from samestep.runtime.env import (
    all_values,
    launch_variables,
    prepare_torch_environment,
    read_environment,
    read_rendezvous,
    watched_variables,
)
from samestep.runtime.rendezvous import READ

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
SET = ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_NVML_BASED_CUDA_CHECK", "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_ORDER")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables in question, and all of them as they were afterwards."""
    for name in (*READ, *SET, "SAMESTEP_TOKEN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_nobody_started_this_process() -> None:
    assert read_rendezvous() is None
    assert launch_variables() == {}


def test_another_launcher_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    found = read_rendezvous()
    assert found is not None
    assert (found.rank, found.world_size, found.address, found.port) == (3, 4, "node-0", 29500)
    assert launch_variables() == TORCHRUN


def test_token_and_devices_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    found = read_environment()
    assert (found.token, found.visible_devices) == ("secret", "2,3")


def test_an_empty_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_TOKEN", "")
    with pytest.raises(InputError, match="SAMESTEP_TOKEN is empty"):
        read_environment()


def test_variables_that_change_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "TORCHDYNAMO_DISABLE", "WORLD_SIZE", "HF_TOKEN"):
        monkeypatch.setenv(name, "1")
    found = watched_variables()
    assert {"NCCL_DEBUG", "TORCHDYNAMO_DISABLE", "WORLD_SIZE"} <= set(found)
    assert "HF_TOKEN" not in found
    assert all_values()["HF_TOKEN"] == "1"


def test_torch_is_told_to_be_reproducible() -> None:
    prepare_torch_environment(loopback=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_ranks_on_one_machine_talk_over_loopback() -> None:
    prepare_torch_environment(loopback=True)
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SET:
        monkeypatch.setenv(name, "mine")
    prepare_torch_environment(loopback=True)
    assert [os.environ[name] for name in SET] == ["mine"] * len(SET)
