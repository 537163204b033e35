"""The ranks that run together, as one of them sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import PeerLostError


class World:
    """All ranks of a run: who this one is, what it computes on, and the collectives it takes part in.

    A world of one has a process group like any other, so no code asks whether it is distributed.

    Attributes:
        rank: this process, from 0.
        size: number of ranks.
        device: where this rank computes.
        timeout: how long a collective may wait for the other ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout: timedelta,
        stop_requested: Callable[[], bool],
    ) -> None:
        self.rank, self.size, self.device, self.timeout = rank, size, device, timeout
        self._stop_requested = stop_requested

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes and prints."""
        return self.rank == 0

    @property
    def stop_requested(self) -> bool:
        """Whether somebody asked *this rank* to end; ranks agree on it at the end of a step."""
        return self._stop_requested()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over ranks, in place (the backend's own order of summation)."""
        self.guarded(lambda: dist.all_reduce(tensor))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.guarded(dist.barrier)

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's `value` on every rank; JSON, so that nothing received is ever executed."""
        device = self.device if self.device.type == "cuda" else torch.device("cpu")
        data = json.dumps(value).encode() if self.is_main else b""
        length = torch.tensor([len(data)], device=device)
        self.guarded(lambda: dist.broadcast(length, 0))
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
        if self.is_main:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.guarded(lambda: dist.broadcast(buffer, 0))
        return json.loads(bytes(buffer.cpu().numpy()))

    def guarded(self, communicate: Callable[[], Any]) -> None:
        """Run a collective; a failure of the connection is a lost peer, not a fault of this rank.

        Raises:
            PeerLostError: the backend reports that it cannot reach another rank.
        """
        try:
            communicate()
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank} lost its connection to another rank: {error}") from error
