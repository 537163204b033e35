"""State of a rank's process: its place in a launch or in the job of another launcher.

Does not import torch, because a worker process imports this module before its output is set up.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.distributed.launcher_variables import RankPlace
from samestep.distributed.status import RankStatus, StatusBoard
from samestep.distributed.stop_request import StopRequest
from samestep.launcher.source_files import SourceFiles
from samestep.launcher.watchdog import StackFile

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from samestep.distributed.world import World


@dataclass(frozen=True)
class WorkerSpec:
    """What the launcher gives to the process of one rank."""

    rank: int
    size: int  # number of ranks
    store_address: tuple[str, int]  # host and port of the store of rank 0
    # Of the store, in rank 0 only; no other process can take the port meanwhile.
    listener: socket.socket | None
    function: Callable[[], Any]  # runs in every rank; the launcher receives rank 0's result
    log: Path | None  # file for the output of this rank; None for the launcher's terminal
    status_board: StatusBoard
    stacks: StackFile
    # Variables, set before other code reads the environment; None removes one.
    environment: Mapping[str, str | None]
    timeout: float  # default time limit of a collective, in seconds
    server: int  # process id of the fork server, the parent
    stop: StopRequest = field(default_factory=StopRequest)

    @cached_property
    def rank_status(self) -> RankStatus:
        """Status slot of this rank."""
        return self.status_board.rank_status(self.rank)


@dataclass(frozen=True)
class Job:
    """One attempt of a job that another launcher started."""

    rank: int
    size: int
    store: dist.Store  # of this attempt alone
    restarts: int  # restarts of the job; equal on every rank
    address: tuple[str, int]  # host and port of the store
    launcher_has_store: bool  # otherwise rank 0 hosts the store
    hang_after: float  # seconds without progress that count as a hang


@dataclass
class ProcessState:
    """State of one rank's process that consecutive worlds share."""

    worker: WorkerSpec | None = None  # from Samestep's launcher; None in any other process
    hosted_store: dist.Store | None = None  # the store of the launch, in the launch's rank 0
    launch_store: dist.Store | None = None  # the launch's part of that store, in every rank
    job: Job | None = None  # the job of another launcher, once joined
    # Of another launcher, whose variables a private world hides.
    rank_place: RankPlace | None = None
    exit_stack: ExitStack = field(default_factory=ExitStack)  # ends the world of `samestep.init()`
    world: World | None = None  # of `samestep.init()`, until its end
    view: Any = None  # `samestep.view.view.View` of this world
    worlds: int = 0  # number of worlds that this process has entered with other ranks
    # Process groups of finished worlds. They are never released in a launched rank: when a model
    # under DDP is released later, and its group with it, torch waits for gloo threads that may wait
    # for the GIL in turn.
    finished_groups: list[dist.ProcessGroup | None] = field(default_factory=list)
    source_files: SourceFiles = field(default_factory=SourceFiles)  # the user's modules
    # Called with each world that this process enters.
    on_world: list[Callable[[World], None]] = field(default_factory=list)
    # Called with each module and the options that a script gives to `samestep.parallel`, for
    # `samestep verify`.
    observe_module: Callable[[torch.nn.Module, dict[str, Any]], None] | None = None
    is_experiment: bool = False  # `samestep verify` and `profile`: scripts write no run directory
    is_script: bool = False  # the launched function is a script, which can be started again
    # Absolute path of the folder for all checkpoints of a script in an experiment; None outside.
    checkpoint_root: Path | None = None

    @property
    def external_job(self) -> Job | None:
        """Job of another launcher with several ranks, if this process is one of them."""
        if self.job is not None and self.job.size > 1:
            return self.job
        return None


# The only instance: a process has one place in one job.
process_state = ProcessState()


def rank_and_size() -> tuple[int, int]:
    """Return rank and number of ranks from Samestep's launcher; 0 and 1 in any other process."""
    worker = process_state.worker
    if worker is not None:
        return (worker.rank, worker.size)
    return (0, 1)
