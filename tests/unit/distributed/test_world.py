"""Collectives of a world: lost connections, and values that arrive unchanged on every rank."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import samestep
from samestep.distributed.torch_errors import MEMORY_FIX
from samestep.distributed.world import World
from samestep.errors import EXIT_INPUT, InputError, PeerLostError
from samestep.launcher.failure import Failure, RankError
from samestep.launcher.launch import launch
from samestep.session import start

NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
SYSTEM = (
    f"{NCCL}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclSystemError: "
    "System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\n"
)
USAGE = (
    f"{NCCL}invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\nncclInvalidUsage: This usually "
    "reflects invalid usage of NCCL library.\nLast error:\n"
)
CUDA = (
    f"{NCCL}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclUnhandledCudaError: "
    "Call to CUDA function failed.\nLast error:\n"
)
LOST = [
    dist.DistNetworkError("The client socket has timed out after 5000ms"),
    dist.DistBackendError("NCCL communicator was aborted on rank 0"),
    dist.DistBackendError(
        f"{NCCL}remote process exited or there was a network error, NCCL version 2.28.9\nncclRemoteError: A call "
        "failed possibly due to a network error or a remote process exiting prematurely."
    ),
    dist.DistBackendError(f"{SYSTEM}socketProgress: Connection closed by remote peer node-1<50000>"),
    dist.DistBackendError(f"{SYSTEM}Call to recv from 10.0.0.2<50000> failed : Connection reset by peer"),
    dist.DistBackendError(
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    ),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
    RuntimeError("Application timeout caused pair closure"),
]
SEGMENT = (
    "Error while creating shared memory segment /dev/shm/nccl-Ab3dEf (size 96), error: No space left on device (28)"
)
DUPLICATE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
# Errors that are no loss of a rank, with the title and a part of the fix, or None.
OTHER = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 25.00 MiB"), "CUDA out of memory", "bf16"),
    (torch.AcceleratorError("CUDA error: device-side assert triggered"), "CUDA error: device-side", None),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "[enforce fail]", MEMORY_FIX),
    (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), "The size of tensor a", None),
    (dist.DistBackendError(SYSTEM + SEGMENT), SEGMENT, "--shm-size=8g"),
    (dist.DistBackendError(USAGE + DUPLICATE), DUPLICATE, "--share-gpu"),
    (dist.DistBackendError(USAGE + "Broadcast : root 9 out of range"), "Broadcast : root 9 out of range", None),
    (dist.DistBackendError(f"{SYSTEM}Bootstrap : no socket interface found"), "Bootstrap", "NCCL_SOCKET_IFNAME"),
    (dist.DistBackendError(f"{SYSTEM}Call to ibv_create_qp failed"), "Call to ibv_create_qp", "NCCL_IB_DISABLE"),
    (dist.DistBackendError(SYSTEM.replace("\nLast error:\n", "")), NCCL, "NCCL_DEBUG=INFO"),
    (dist.DistBackendError(f"{CUDA}Cuda failure 'no kernel image'"), "Cuda failure 'no kernel image'", "CUDA error"),
    (dist.DistBackendError(f"{CUDA}Cuda failure 2 'out of memory'"), "Cuda failure 2 'out of memory'", "bf16"),
]


def failing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", LOST, ids=str)
def test_lost_connection_is_named(error: Exception) -> None:
    world = World(0, 1, torch.device("cpu"))
    with pytest.raises(PeerLostError) as lost:
        world.run_collective(lambda: failing(error), "a test")
    assert lost.value.__cause__ is error
    # Errors of NCCL come from collectives of torch, too.
    assert Failure.of_exception(0, error).is_consequence == isinstance(error, dist.DistBackendError)


@pytest.mark.parametrize(("error", "title", "fix"), OTHER, ids=lambda value: str(value)[-30:])
def test_other_errors_are_causes_with_their_own_text_and_a_fix(error: Exception, title: str, fix: str | None) -> None:
    world = World(0, 1, torch.device("cpu"))
    with pytest.raises(type(error)) as raised:
        world.run_collective(lambda: failing(error), "a test")
    assert raised.value is error
    failure = Failure.of_exception(0, raised.value)
    assert not failure.is_consequence
    assert failure.title.startswith(f"rank 0 failed: {type(error).__name__}: {title}")
    assert str(error).splitlines()[0] in failure.text
    fixes = [line for line in failure.text.splitlines() if line.startswith("  fix: ")]
    assert len(fixes) == (fix is not None)
    assert fix is None or fix in fixes[0]


# Values of rank 0, 1 and 2, from short to long.
VALUES: dict[str, list[Any]] = {
    "numbers": [0, -(2**70), 0.1 + 0.2],
    "nothing": [None, None, None],
    "empty": ["", [], {}],
    "text": ["", "ein Fuß 中文 \U0001f98a \x00", "a" * 100_000],
    "lists and mappings": [[], {"a": [1, {"b": None}]}, [[True], "x", 1e-300]],
}


def run_all() -> dict[str, list[Any]]:
    """Return the results of every rank, by name and rank."""
    with start(device="cpu") as world:
        results: dict[str, Any] = {
            name: samestep.all_gather(values[world.rank], world) for name, values in VALUES.items()
        }
        results["tensors"] = gathered_tensors(world)
        all_results = samestep.all_gather(results, world)
        return {name: [row[name] for row in all_results] for name in results}


def gathered_tensors(world: World) -> list[Any]:
    """Return gathered tensors as lists."""
    kinds = (torch.float32, torch.bfloat16, torch.int64)
    own = torch.arange(2 * world.rank, dtype=kinds[world.rank], requires_grad=world.rank < 2).reshape(world.rank, 2)
    received = samestep.all_gather(own, world)
    assert [(tensor.dtype, tensor.requires_grad) for tensor in received] == [(kind, False) for kind in kinds]
    return [tensor.tolist() for tensor in received]


def gather_a_set() -> None:
    """Gather an invalid value on rank 1 only, while the others wait."""
    with start(device="cpu") as world:
        samestep.all_gather({1} if world.rank == 1 else 0, world)


RANKS = 3


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = launch(run_all, processes=RANKS)
    return results


@pytest.mark.parametrize("name", VALUES)
def test_every_rank_receives_the_values_of_all_ranks(results: dict[str, list[Any]], name: str) -> None:
    assert results[name] == [VALUES[name]] * RANKS


def test_tensors_are_gathered(results: dict[str, list[Any]]) -> None:
    assert results["tensors"] == [[[], [[0.0, 1.0]], [[0, 1], [2, 3]]]] * RANKS, "the same on every rank"


def test_invalid_value_of_one_rank_ends_the_run() -> None:
    with pytest.raises(RankError, match="E_NOT_PICKLABLE") as failed:
        launch(gather_a_set, processes=RANKS)
    assert failed.value.exit_code == EXIT_INPUT


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value", [CYCLE, {1}, b"x", object(), [torch.ones(2)], {(1, 2): 3}, {1: 2}, [({"a": {None: 0}},)]]
)
def test_values_other_than_json_are_rejected(alone: World, value: Any) -> None:
    with pytest.raises(InputError, match="E_NOT_PICKLABLE"):
        samestep.all_gather(value, alone)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
plain = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the world has no state between examples
@given(value=plain)
def test_json_values_arrive_unchanged(alone: World, value: Any) -> None:
    (received,) = samestep.all_gather(value, alone)
    assert json.dumps(received) == json.dumps(value)
