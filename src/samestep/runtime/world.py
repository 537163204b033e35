"""The ranks that run together, as one of them sees it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from samestep.config import StrategyPart, settle
from samestep.errors import PeerLostError
from samestep.runtime.board import Pulse, own_pulse
from samestep.runtime.roll_call import RollCall


class World:
    """All ranks of a run: who this one is, what it computes on, and the collectives it takes part in.

    A world of one has a process group like any other, so no code asks whether it is distributed.

    Attributes:
        rank: this process, from 0.
        size: number of ranks.
        device: where this rank computes.
        roll_call: in which ranks say what they are about to do together; silent until it is begun.
        pulse: what this rank does, for who watches it.
        group: the ranks of it as torch has them; None for all there are.
        strategy: how the model lives on these ranks.
        layout: the sizes of the axes that follow from it.
        mesh: the same as torch has it; None where there is but one axis of copies.
        timeout: how long a collective waits for the other ranks.
        data: the ranks that divide the data among them, this one in its place: all, unless some see the same samples.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        stop_requested: Callable[[], bool],
        roll_call: RollCall | None = None,
        pulse: Pulse | None = None,
        stop_signal: Callable[[], int | None] = lambda: None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.size, self.device, self.group = rank, size, device, group
        self.strategy, self.layout = StrategyPart(), settle(StrategyPart(), size)
        self.mesh: DeviceMesh | None = None
        self.timeout: timedelta = dist.default_pg_timeout
        self.data = self
        self._stop_requested, self._stop_signal = stop_requested, stop_signal
        self.pulse = pulse or own_pulse()
        self.roll_call = roll_call or RollCall(dist.HashStore(), self.pulse, rank=0, size=1, timeout=timedelta())

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes and prints."""
        return self.rank == 0

    @property
    def stop_requested(self) -> bool:
        """Whether somebody asked *this rank* to end; ranks agree on it at the end of a step."""
        return self._stop_requested()

    @property
    def stop_signal(self) -> int | None:
        """The signal by which somebody asked *this rank* to end, if one did."""
        return self._stop_signal()

    def part(self, group: dist.ProcessGroup) -> World:
        """The ranks of `group`, of which this is one, as a world of their own."""
        return World(
            rank=dist.get_rank(group),
            size=dist.get_world_size(group),
            device=self.device,
            stop_requested=self._stop_requested,
            roll_call=self.roll_call,
            pulse=self.pulse,
            stop_signal=self._stop_signal,
            group=group,
        )

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over ranks, in place (the backend's own order of summation)."""
        self.guarded(lambda: dist.all_reduce(tensor, group=self.group), "an all-reduce")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.guarded(lambda: dist.barrier(group=self.group), "a barrier")

    def guarded(self, communicate: Callable[[], Any], what: str) -> None:
        """Run a collective; a failure of the connection is a lost peer, not a fault of this rank.

        Args:
            what: its name, for who finds this rank waiting in it.

        Raises:
            PeerLostError: the backend reports that it cannot reach another rank.
        """
        try:
            with self.pulse.waiting(what):
                communicate()
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank} lost its connection to another rank: {error}") from error
