"""Environment variables: settings of launchers, devices and torch."""

import os
import subprocess
import sys

import pytest

from samestep.distributed.env import (
    RANK_VARIABLES,
    all_variables,
    prepare_shared_nccl,
    prepare_torch_environment,
    read_environment,
    read_rank_place,
    relevant_variables,
    sharing_variables,
    visible_devices_kept,
)
from samestep.errors import EXIT_INPUT, InputError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
TORCH = (
    *("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_NVML_BASED_CUDA_CHECK", "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_ORDER"),
    *("TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"),
)
NCCL = (
    *("NCCL_HOSTID", "NCCL_NET", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_MNNVL_ENABLE", "NCCL_NVLS_ENABLE"),
    *("NCCL_RAS_ENABLE", "NCCL_MAX_CTAS", "NCCL_PROTO"),
)


@pytest.fixture(autouse=True)
def unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset all variables in question, and restore them afterwards."""
    for name in (*RANK_VARIABLES, *TORCH, *NCCL, "SAMESTEP_TOKEN", "SAMESTEP_SHARE_GPU", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_rank_place() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    rank_place = read_rank_place()
    assert rank_place is not None
    assert (rank_place.rank, rank_place.world_size, rank_place.address) == (3, 4, "node-0")


def test_token_and_devices_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    environment = read_environment()
    assert (environment.token, environment.visible_devices) == ("secret", "2,3")
    monkeypatch.setenv("SAMESTEP_TOKEN", "")
    with pytest.raises(InputError, match="SAMESTEP_TOKEN is empty"):
        read_environment()


@pytest.mark.parametrize(("value", "sharing"), [(None, None), ("0", None), ("1", "gloo"), ("nccl", "nccl")])
def test_sharing(value: str | None, sharing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("SAMESTEP_SHARE_GPU", value)
    assert read_environment().sharing == sharing
    assert sharing_variables(is_requested=False) == {}
    # A request does not replace NCCL by gloo.
    assert sharing_variables(is_requested=True) == ({} if sharing else {"SAMESTEP_SHARE_GPU": "1"})


@pytest.mark.parametrize("value", ["", "2", "true", "NCCL", "gloo"])
def test_other_values_of_sharing_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_SHARE_GPU", value)
    with pytest.raises(InputError) as error:
        read_environment()
    assert (error.value.code, error.value.exit_code) == ("E_VALUE", EXIT_INPUT)
    assert repr(value) in error.value.value


def test_each_rank_that_shares_by_nccl_is_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = []
    for rank in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", os.environ.copy())
            prepare_shared_nccl(rank, loopback=rank > 0)
            hosts.append(os.environ["NCCL_HOSTID"])
            assert ("NCCL_SOCKET_IFNAME" in os.environ) == (rank > 0)
            assert set(NCCL) - set(os.environ) <= {"NCCL_SOCKET_IFNAME"}
    assert len(set(hosts)) == 3
    for name in NCCL:
        monkeypatch.setenv(name, "custom")
    prepare_shared_nccl(0, loopback=True)
    assert [os.environ[name] for name in NCCL] == ["custom"] * len(NCCL)


def test_relevant_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "TORCHDYNAMO_DISABLE", "WORLD_SIZE", "SAMESTEP_SHARE_GPU", "HF_TOKEN"):
        monkeypatch.setenv(name, "1")
    variables = relevant_variables()
    assert {"NCCL_DEBUG", "TORCHDYNAMO_DISABLE", "WORLD_SIZE", "SAMESTEP_SHARE_GPU"} <= set(variables)
    assert "HF_TOKEN" not in variables
    assert all_variables()["HF_TOKEN"] == "1"


def test_variables_of_torch_are_set() -> None:
    prepare_torch_environment(loopback=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "250"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    prepare_torch_environment(loopback=True)
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCH:
        monkeypatch.setenv(name, "custom")
    prepare_torch_environment(loopback=True)
    assert [os.environ[name] for name in TORCH] == ["custom"] * len(TORCH)


def test_visible_devices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    ignored: list[str | None] = []
    with visible_devices_kept(ignored.append):
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        seen = [os.environ["CUDA_VISIBLE_DEVICES"]]
        os.environ.update(CUDA_VISIBLE_DEVICES="1")
        command = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
        seen.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        monkeypatch.setenv("SOMETHING_ELSE", "set")
        assert os.environ["SOMETHING_ELSE"] == "set"
    assert seen == ["3", "3", "3"]
    assert ignored == ["0", "1", None]
    os.environ["CUDA_VISIBLE_DEVICES"] = "2"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
