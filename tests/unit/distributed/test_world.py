"""Errors of collectives: only a lost connection means that another rank has ended."""

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.errors import PeerLostError
from samestep.launcher.failure import Failure
from samestep.strategies.ddp import _CommStream

LOST = [
    dist.DistNetworkError("The client socket has timed out after 5000ms"),
    dist.DistBackendError("NCCL communicator was aborted on rank 0"),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
    RuntimeError("Application timeout caused pair closure"),
]
OTHER = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 25.00 MiB"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:120] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
]


def failing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", LOST, ids=str)
def test_lost_connection_is_named(error: Exception) -> None:
    world = samestep.World(0, 1, torch.device("cpu"))
    with pytest.raises(PeerLostError) as lost:
        world.run_collective(lambda: failing(error), "a test")
    assert lost.value.__cause__ is error


@pytest.mark.parametrize("error", OTHER, ids=str)
def test_other_errors_keep_their_names(error: Exception) -> None:
    world = samestep.World(0, 1, torch.device("cpu"))
    with pytest.raises(type(error)) as raised:
        world.run_collective(lambda: failing(error), "a test")
    assert raised.value is error
    failure = Failure.of_exception(0, raised.value)
    assert not failure.is_consequence
    assert failure.is_out_of_memory == ("memory" in str(error))


@pytest.mark.parametrize("error", OTHER, ids=str)
def test_error_of_the_communication_thread_is_raised_with_its_type(error: Exception) -> None:
    stream = _CommStream(torch.device("cpu"))
    try:
        future = stream.submit(lambda: failing(error))  # type: ignore[arg-type, return-value]
        with pytest.raises(RuntimeError):
            future.wait()
        with pytest.raises(type(error)) as raised:
            stream.raise_failure()
        assert raised.value is error
    finally:
        stream.end()
