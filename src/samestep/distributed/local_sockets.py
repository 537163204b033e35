"""Small messages between the ranks of one machine, without the threads of the backend.

A collective of gloo passes each message through two threads of every rank. With more ranks than processor cores, their
switches take most of the time of a small message. Here the calling thread sends and receives.
"""

from __future__ import annotations

import errno
import socket
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from samestep.distributed.world import World, all_gather
from samestep.errors import PeerLostError

# A rank is at most one piece ahead of another: two pieces fit into the smallest usual buffer of a socket.
_PIECE_BYTES = 32 * 1024
_RANK = struct.Struct("<q")


class LocalSockets:
    """Connections of this rank to all others, over Unix sockets in a folder of this account.

    Args:
        world: the ranks.
        peers: connected sockets by rank.
    """

    def __init__(self, world: World, peers: dict[int, socket.socket]) -> None:
        self._world, self._peers = world, peers
        seconds = world.timeout.total_seconds()
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for peer in peers.values():
            # Limits of the kernel: `settimeout` would add a call of `poll` to each message.
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def all_gather(self, own: torch.Tensor, rows: torch.Tensor, ranks: Sequence[int]) -> None:
        """Write the tensors of all `ranks`, this rank among them, to `rows`; each of `ranks` calls this.

        Args:
            own: contiguous tensor on the CPU, of the same size on each of `ranks`.
            rows: contiguous, with one row like `own` for each of `ranks`, in their order.
            ranks: in the same order on each of them.

        Raises:
            PeerLostError: another rank ended, or sent nothing within the time limit of a collective.
        """
        index = ranks.index(self._world.rank)
        rows[index].copy_(own)
        sent = _bytes(own)
        # Each rank begins with the next one, so that no rank receives all messages at once.
        others = [(index + offset) % len(ranks) for offset in range(1, len(ranks))]
        received = [_bytes(rows[other]) for other in others]
        peers = [self._peers[ranks[other]] for other in others]
        with self._world.context.status.waiting("an all-gather"):
            for start in range(0, len(sent), _PIECE_BYTES):
                stop = min(start + _PIECE_BYTES, len(sent))
                for other, peer in zip(others, peers, strict=True):
                    self._send(ranks[other], peer, sent[start:stop])
                for other, peer, target in zip(others, peers, received, strict=True):
                    self._receive(ranks[other], peer, target[start:stop])

    def _send(self, rank: int, peer: socket.socket, data: memoryview) -> None:
        try:
            peer.sendall(data)
        except OSError as error:
            raise self._lost(rank, error) from error

    def _receive(self, rank: int, peer: socket.socket, target: memoryview) -> None:
        while target:
            try:
                length = peer.recv_into(target, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise self._lost(rank, error) from error
            if length == 0:
                raise self._lost(rank, ConnectionResetError(errno.ECONNRESET, "the connection was closed"))
            target = target[length:]

    def _lost(self, rank: int, error: OSError) -> PeerLostError:
        reason = f"no message within {self._world.timeout}" if isinstance(error, BlockingIOError) else str(error)
        return PeerLostError(f"rank {self._world.rank} lost its connection to rank {rank}: {reason}")

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # of numpy's annotations


def connect_locally(world: World) -> LocalSockets | None:
    """Connect every rank with every other one; None on all ranks if some pair has no common file system. Collective."""
    peers: dict[int, socket.socket] = {}
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "rank"  # other accounts have no access to the folder
        address: str | None = str(path)
        try:
            listener.bind(str(path))
        except OSError:  # longer than the addresses of Unix sockets, or a file system without sockets
            address = None
        else:
            listener.listen(world.size)
        addresses = all_gather(address, world)
        is_connected = None not in addresses
        for rank, other in enumerate(addresses[: world.rank] if is_connected else []):
            peers[rank] = socket.socket(socket.AF_UNIX)
            try:
                peers[rank].connect(other)
            except OSError:  # another machine or container
                is_connected = False
                break
            peers[rank].sendall(_RANK.pack(world.rank))
        if all(all_gather(is_connected, world)):
            for _ in range(world.rank + 1, world.size):  # each is in the queue of the listener
                peer, _ = listener.accept()
                peers[_RANK.unpack(peer.recv(_RANK.size, socket.MSG_WAITALL))[0]] = peer
            return LocalSockets(world, peers)
    for peer in peers.values():
        peer.close()
    return None
