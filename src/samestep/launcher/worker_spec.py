"""What the launcher gives to the process of one rank."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from samestep.distributed.signals import StopRequest
from samestep.distributed.status import RankStatus, StatusBoard
from samestep.launcher.watchdog import StackFile


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of one worker process."""

    rank: int
    size: int  # number of ranks
    store_address: tuple[str, int]  # host and port of the store of rank 0
    listener: (
        socket.socket | None
    )  # of the store, in rank 0 only; no other process can take the port meanwhile
    function: Callable[[], Any]  # runs in every rank; the launcher receives rank 0's result
    log: Path | None  # file for the output of this rank; None for the launcher's terminal
    status_board: StatusBoard
    stacks: StackFile
    environment: Mapping[str, str]  # variables, set before other code reads the environment
    timeout: float  # default time limit of a collective, in seconds
    server: int  # process id of the fork server, the parent
    stop: StopRequest = field(default_factory=StopRequest)

    @cached_property
    def rank_status(self) -> RankStatus:
        """Status slot of this rank."""
        return self.status_board.rank_status(self.rank)
