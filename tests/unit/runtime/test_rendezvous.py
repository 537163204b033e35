"""Who started this process, and where its ranks meet."""

import pytest

from samestep.errors import InputError
from samestep.runtime.rendezvous import FIRST_PORT, PORTS, find_rendezvous, is_loopback

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
# What it sets in a batch script.
BATCH = {"SLURM_JOB_ID": "123", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1610416129",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURMS_PMI = {"PMI_RANK": "3", "PMI_SIZE": "4"}


def test_nobody() -> None:
    assert find_rendezvous({}) is None
    assert find_rendezvous({"MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "HOME": "/root"}) is None


def test_torchrun() -> None:
    found = find_rendezvous(TORCHRUN)
    assert found is not None
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("torchrun", 3, 4, 1)
    assert (found.address, found.port, found.has_store, found.restarts) == ("node-0", 29500, False, 0)
    assert "RANK 3 of WORLD_SIZE 4" in found.why
    assert not found.is_on_one_machine


def test_torchruns_agent_hosts_the_store_and_counts_restarts() -> None:
    more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2", "LOCAL_WORLD_SIZE": "4"}
    found = find_rendezvous({**TORCHRUN, **more})
    assert found is not None
    assert (found.has_store, found.restarts, found.is_on_one_machine) == (True, 2, True)


def test_an_address_that_only_this_machine_reaches_means_one_machine() -> None:
    for address, expected in (("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.1", False)):
        found = find_rendezvous({**TORCHRUN, "MASTER_ADDR": address})
        assert found is not None
        assert found.is_on_one_machine is expected
    found = find_rendezvous({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"})
    assert found is not None
    assert not found.is_on_one_machine


@pytest.mark.parametrize("missing", TORCHRUN)
def test_a_group_in_part_is_refused(missing: str) -> None:
    variables = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(InputError, match=f"{missing} is not") as caught:
        find_rendezvous(variables)
    assert f"set {missing} too" in str(caught.value)


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
def test_values_that_cannot_be_are_refused(name: str, value: str) -> None:
    with pytest.raises(InputError, match="a whole number"):
        find_rendezvous({**TORCHRUN, name: value})


def test_slurm_over_two_nodes_meets_on_the_first_of_the_step() -> None:
    found = find_rendezvous(SLURM)
    assert found is not None
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("Slurm", 3, 4, 0)
    assert found.address == "gpu003"
    assert found.port is not None
    assert FIRST_PORT <= found.port < FIRST_PORT + PORTS
    assert not found.is_on_one_machine


def test_ports_of_neighbouring_jobs_and_steps_differ() -> None:
    ports = set()
    for job in range(9990, 10040):
        for step in range(5):
            found = find_rendezvous({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
            assert found is not None
            ports.add(found.port)
    assert len(ports) == 250


def test_slurm_on_one_node_publishes_a_port() -> None:
    found = find_rendezvous({**SLURM_ONE_NODE, "MASTER_ADDR": "gpu003", "SLURM_RESTART_COUNT": "2"})
    assert found is not None
    assert (found.address, found.port, found.job, found.restarts) == (None, None, "slurm-123.4-2", 2)
    assert found.is_on_one_machine


def test_what_is_given_wins() -> None:
    given = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}
    for variables in (SLURM, SLURM_ONE_NODE, OPEN_MPI, PMI):
        found = find_rendezvous({**variables, **given})
        assert found is not None
        assert (found.address, found.port) == ("10.0.0.7", 1234)
    found = find_rendezvous({**OPEN_MPI, "MASTER_PORT": "1234"})
    assert found is not None
    assert found.address == "127.0.0.1"


def test_older_slurm_says_the_number_of_tasks_and_nodes_of_the_job() -> None:
    variables = {n: v for n, v in SLURM.items() if n not in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")}
    found = find_rendezvous(variables)
    assert found is not None
    assert (found.world_size, found.address) == (4, "gpu001")


def test_slurm_without_nodes_is_told_to_set_an_address() -> None:
    variables = {n: v for n, v in SLURM.items() if not n.endswith("NODELIST")}
    with pytest.raises(InputError, match="MASTER_ADDR"):
        find_rendezvous(variables)


def test_a_batch_script_is_no_rank() -> None:
    assert find_rendezvous(BATCH) is None


def test_a_step_of_one_task_is_no_world() -> None:
    assert find_rendezvous({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_open_mpi() -> None:
    found = find_rendezvous(OPEN_MPI)
    assert found is not None
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("Open MPI", 1, 2, 1)
    assert (found.address, found.port, found.job) == (None, None, "mpi-1610416129")


def test_mpich_and_intel() -> None:
    found = find_rendezvous(PMI)
    assert found is not None
    assert (found.launcher, found.rank, found.world_size, found.local_size, found.job) == ("MPI", 1, 2, 2, "")


@pytest.mark.parametrize("variables", [OPEN_MPI, PMI])
def test_mpi_over_machines_needs_an_address(variables: dict[str, str]) -> None:
    local_size = next(name for name in variables if "LOCAL_SIZE" in name or "LOCALNRANKS" in name)
    local_rank = next(name for name in variables if "LOCAL_RANK" in name or "LOCALRANKID" in name)
    apart = {**variables, local_size: "1", local_rank: "0"}
    with pytest.raises(InputError, match="MASTER_ADDR and MASTER_PORT are not set"):
        find_rendezvous(apart)
    found = find_rendezvous({**apart, "MASTER_ADDR": "node-0", "MASTER_PORT": "1234"})
    assert found is not None
    assert not found.is_on_one_machine


@pytest.mark.parametrize("variables", [OPEN_MPI, PMI])
def test_mpi_in_part_is_refused(variables: dict[str, str]) -> None:
    *_, last = [name for name in variables if name != "PMIX_NAMESPACE"]
    with pytest.raises(InputError, match=f"{last} is not set"):
        find_rendezvous({name: value for name, value in variables.items() if name != last})


def test_mpi_of_one_is_no_world() -> None:
    one = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert (
        find_rendezvous(
            {**OPEN_MPI, **one, **dict.fromkeys(["OMPI_COMM_WORLD_LOCAL_RANK"], "0"), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
        )
        is None
    )


def test_the_first_launcher_wins_and_the_others_are_named() -> None:
    found = find_rendezvous({**TORCHRUN, **SLURM, **OPEN_MPI})
    assert found is not None
    assert found.launcher == "torchrun"
    assert [other.partition(":")[0] for other in found.also] == ["Slurm", "Open MPI"]


def test_slurms_own_pmi_is_slurm() -> None:
    found = find_rendezvous({**SLURM, **SLURMS_PMI})
    assert found is not None
    assert (found.launcher, found.also) == ("Slurm", ())


def test_mpirun_in_a_slurm_job_starts_its_daemons_by_srun() -> None:
    found = find_rendezvous({**SLURM, **OPEN_MPI})
    assert found is not None
    assert (found.launcher, found.rank, found.world_size) == ("Open MPI", 1, 2)
    assert [other.partition(":")[0] for other in found.also] == ["Slurm"]


def test_loopback() -> None:
    assert [is_loopback(a) for a in ("127.0.0.1", "127.3.2.1", "::1", "localhost", "10.0.0.1", "vm")] == [True] * 4 + [
        False
    ] * 2
