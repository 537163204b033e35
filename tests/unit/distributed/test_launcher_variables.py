"""Detection of launchers from environment variables, and Slurm's lists of hosts."""

from dataclasses import replace

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


AGENT = {
    **TORCHRUN,
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "LOCAL_WORLD_SIZE": "4",
}
BY_HAND = RankPlace("torchrun", 3, 4, 1, None, "node-0", 29500)
OF_SLURM = RankPlace("Slurm", 3, 4, 0, None, "gpu003", FIRST_PORT + 123 + 404, ends_with_parent=True)
LOCAL = replace(OF_SLURM, local_rank=3, local_size=4, address="127.0.0.1")
ADDRESS = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, BY_HAND),
        (AGENT, replace(BY_HAND, local_size=4, has_store=True, restarts=2, ends_with_parent=True)),
        ({**TORCHRUN, **SLURM, **OPEN_MPI}, BY_HAND),
        (SLURM, OF_SLURM),  # with the first host of the step
        # Older versions have variables of the job only.
        (without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"), replace(OF_SLURM, address="gpu001")),
        ({**SLURM, **ADDRESS}, replace(OF_SLURM, address="10.0.0.7", port=1234)),
        ({**SLURM_ONE_NODE, "SLURM_RESTART_COUNT": "2"}, replace(LOCAL, restarts=2)),
        ({**SLURM_ONE_NODE, **ADDRESS}, replace(LOCAL, address="10.0.0.7", port=1234)),
        ({**SLURM_ONE_NODE, "MASTER_PORT": "1234"}, replace(LOCAL, port=1234)),
    ],
)
def test_place_of_a_rank(variables: dict[str, str], expected: RankPlace) -> None:
    assert find_rank_place(variables) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, False),
        (AGENT, True),
        (SLURM, False),
        (SLURM_ONE_NODE, True),
        ({**SLURM_ONE_NODE, **ADDRESS}, True),
        *(({**TORCHRUN, "MASTER_ADDR": address}, True) for address in ("127.0.0.1", "localhost", "::1")),
        ({**TORCHRUN, "MASTER_ADDR": "10.0.0.1"}, False),
        ({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}, False),
    ],
)
def test_whether_all_ranks_are_on_one_machine(variables: dict[str, str], expected: bool) -> None:
    place = find_rank_place(variables)
    assert place is not None
    assert place.is_on_one_machine is expected


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


def test_ports_of_neighboring_jobs_and_steps_differ() -> None:
    ports = set()
    for job in range(9990, 10040):
        for step in range(5):
            place = find_rank_place({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
            assert place is not None
            assert FIRST_PORT <= place.port < FIRST_PORT + PORTS
            ports.add(place.port)
    assert len(ports) == 250


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
