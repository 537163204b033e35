"""Detection of launchers from environment variables, and Slurm's lists of hosts."""

import pytest

from samestep.distributed.launcher_variables import (
    FIRST_PORT,
    PORTS,
    RankPlace,
    find_rank_place,
    first_host,
)
from samestep.errors import InputError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
# As Slurm 22.05 sets them in a task of `srun -N2 -n4`.
SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_JOB_NODELIST": "gpu[001-004]",
}
SLURM_ONE_NODE = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "3"}
# As Slurm sets them in a batch script.
BATCH = {"SLURM_JOB_ID": "123", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


def detected(variables: dict[str, str]) -> RankPlace:
    rank_place = find_rank_place(variables)
    assert rank_place is not None
    return rank_place


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="no variables"),
        pytest.param({"MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "HOME": "/root"}, id="address"),
        pytest.param(BATCH, id="batch script of Slurm"),
        pytest.param({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, id="step of one task"),
        pytest.param({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, id="one MPI rank"),
    ],
)
def test_no_launcher(variables: dict[str, str]) -> None:
    assert find_rank_place(variables) is None


def test_torchrun() -> None:
    rank_place = detected(TORCHRUN)
    assert (rank_place.launcher, rank_place.rank, rank_place.world_size, rank_place.local_rank) == ("torchrun", 3, 4, 1)
    assert (rank_place.address, rank_place.port, rank_place.has_store) == ("node-0", 29500, False)
    assert not rank_place.is_on_one_machine
    more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2", "LOCAL_WORLD_SIZE": "4"}
    rank_place = detected({**TORCHRUN, **more})
    assert (rank_place.has_store, rank_place.restarts, rank_place.is_on_one_machine) == (True, 2, True)


def test_loopback_address_means_one_machine() -> None:
    for address, expected in (("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.1", False)):
        rank_place = detected({**TORCHRUN, "MASTER_ADDR": address})
        assert rank_place.is_on_one_machine is expected
    rank_place = detected({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"})
    assert not rank_place.is_on_one_machine


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        *((without(TORCHRUN, name), f"but not {name}") for name in TORCHRUN),
        (without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "MASTER_ADDR"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE is set, and torchrun's variables are not"),
        ({**SLURM, **OPEN_MPI}, "OMPI_COMM_WORLD_SIZE is set"),
    ],
)
def test_incomplete_variables_are_rejected(variables: dict[str, str], missing: str) -> None:
    with pytest.raises(InputError, match=missing):
        find_rank_place(variables)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", ""),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "4"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "http"),
        ("TORCHELASTIC_RESTART_COUNT", "some"),
    ],
)
def test_invalid_values_are_rejected(name: str, value: str) -> None:
    with pytest.raises(InputError, match="a whole number"):
        find_rank_place({**TORCHRUN, name: value})


def test_slurm_on_two_nodes_uses_the_first_host_of_the_step() -> None:
    rank_place = detected(SLURM)
    assert (rank_place.launcher, rank_place.rank, rank_place.world_size, rank_place.local_rank) == ("Slurm", 3, 4, 0)
    assert rank_place.address == "gpu003"
    assert rank_place.port is not None
    assert FIRST_PORT <= rank_place.port < FIRST_PORT + PORTS
    assert not rank_place.is_on_one_machine


def test_ports_of_neighboring_jobs_and_steps_differ() -> None:
    ports = set()
    for job in range(9990, 10040):
        for step in range(5):
            rank_place = detected({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
            ports.add(rank_place.port)
    assert len(ports) == 250


def test_slurm_on_one_node_uses_the_loopback_interface() -> None:
    rank_place = detected({**SLURM_ONE_NODE, "SLURM_RESTART_COUNT": "2"})
    assert (rank_place.address, rank_place.port, rank_place.restarts) == ("127.0.0.1", FIRST_PORT + 123 + 404, 2)
    assert rank_place.is_on_one_machine


def test_master_address_and_port_take_precedence() -> None:
    address = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}
    for variables in (SLURM, SLURM_ONE_NODE):
        rank_place = detected({**variables, **address})
        assert (rank_place.address, rank_place.port) == ("10.0.0.7", 1234)
    rank_place = detected({**SLURM_ONE_NODE, "MASTER_PORT": "1234"})
    assert rank_place.address == "127.0.0.1"


def test_older_slurm_has_variables_of_the_job_only() -> None:
    rank_place = detected(without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"))
    assert (rank_place.world_size, rank_place.address) == (4, "gpu001")


def test_first_launcher_takes_precedence() -> None:
    rank_place = detected({**TORCHRUN, **SLURM, **OPEN_MPI})
    assert rank_place.launcher == "torchrun"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("gpu[9,003-006]", "gpu9"),
        ("login1,gpu[003-006]", "login1"),
        ("rack[01-02]n[3,5]-ib", "rack01n3-ib"),
        ("node-a.example.org", "node-a.example.org"),
        ("a[0]", "a0"),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
