"""The environment is read once, in one place, and torch's own settings are only made where nobody made them."""

import os

import pytest

from samestep.runtime.env import Rendezvous, prepare_torch_environment, read_environment

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
SET = ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_NVML_BASED_CUDA_CHECK", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables in question, and all of them as they were afterwards."""
    for name in (*TORCHRUN, *SET, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_nobody_started_this_process() -> None:
    assert read_environment().rendezvous is None


def test_another_launcher_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    expected = Rendezvous(rank=3, world_size=4, local_rank=1, address="node-0", port=29500, has_store=False)
    assert read_environment().rendezvous == expected


@pytest.mark.parametrize(("value", "has_store"), [("True", True), ("False", False)])
def test_torchruns_agent_may_host_the_store(monkeypatch: pytest.MonkeyPatch, value: str, has_store: bool) -> None:
    for name, given in {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": value}.items():
        monkeypatch.setenv(name, given)
    found = read_environment().rendezvous
    assert found is not None
    assert found.has_store is has_store


def test_cores_are_those_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(before)])
        assert read_environment().cores == 1
    finally:
        os.sched_setaffinity(0, before)
    assert read_environment().cores == len(before)


def test_torch_is_told_to_be_reproducible() -> None:
    prepare_torch_environment(loopback=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_ranks_on_one_machine_talk_over_loopback() -> None:
    prepare_torch_environment(loopback=True)
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SET:
        monkeypatch.setenv(name, "mine")
    prepare_torch_environment(loopback=True)
    assert [os.environ[name] for name in SET] == ["mine"] * 3
