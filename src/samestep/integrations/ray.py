"""Ranks as workers of Ray Train: a backend for `DataParallelTrainer`, and a training function.

    scaling = ScalingConfig(num_workers=4)
    trainer = DataParallelTrainer(train, backend_config=SamestepConfig(), scaling_config=scaling)

`train` calls `samestep.init()`. The number of workers may be a range, because it does not change
the result.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.collective import broadcast_from_rank_zero

from samestep.distributed.env import set_environment
from samestep.errors import EXIT_DONE, EXIT_STOPPED, RunError

_POLL_SECONDS = 0.5
# A process that the kernel kills with the worker, and that becomes the rank (prctl(2) outlives
# execve(2)).
_START = (
    "import os, sys; from samestep.distributed.signals import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


class SamestepConfig(BackendConfig):  # type: ignore[misc]  # Ray's classes have no types here
    """Configuration of a trainer with ranks as workers; Ray creates no process group."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Class that sets the variables of the workers."""
        return SamestepBackend


class SamestepBackend(Backend):  # type: ignore[misc]
    """Sets the variables of torchrun, by which `samestep.init()` joins the other workers."""

    # NCCL and the local rank select among all GPUs of a node.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Select the address of rank 0, and set the variables in all workers."""
        worker_group.execute(_set_variables, *worker_group.execute_single(0, _free_address))


def run_rank(config: Mapping[str, Any]) -> None:
    """Run a Python command as the rank of this worker; the training function of a script for Ray.

    The notice of a preemption stops the ranks after a step, with a checkpoint; Ray then starts
    other workers, which resume the run.

    Args:
        config: `arguments` of Python, and the current `folder` of the command.

    Raises:
        RunError: the command failed, or ended because of a preemption.
    """
    command = [sys.executable, "-c", _START, str(os.getpid()), *config["arguments"]]
    rank = subprocess.Popen(command, cwd=config["folder"])
    is_stopped = False
    # Both calls are collectives: all workers leave the loop together.
    while broadcast_from_rank_zero(rank.poll()) is None:
        preemption = ray.train.get_preemption_info()
        if preemption is not None and not is_stopped:
            rank.send_signal(signal.SIGUSR1)
            is_stopped = True
        time.sleep(_POLL_SECONDS)
    code = rank.wait()
    if is_stopped and code == EXIT_STOPPED:
        raise RunError(
            "the run stopped with a checkpoint before a preemption",
            expected="other workers, which Ray Train starts",
            fix="FailureConfig(max_preemption_failures=-1)",
            code="E_STOPPED",
        )
    if code not in (EXIT_DONE, EXIT_STOPPED):
        raise RunError(
            f"the rank ended with exit code {code}",
            expected=f"exit code {EXIT_DONE}",
            fix="see the error in the log of the first rank that failed",
        )


def _free_address() -> tuple[str, int]:
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        return address, listener.getsockname()[1]


def _set_variables(address: str, port: int) -> None:
    context = ray.train.get_context()
    set_environment(
        {
            "RANK": str(context.get_world_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
    )
