"""Messages between the ranks of one machine, without the threads of the backend.

A message of gloo passes through two threads of every rank. With more ranks than processor cores,
their switches take most of the time of a small message. Here the calling thread sends and receives.
"""

from __future__ import annotations

import errno
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from samestep.errors import PeerLostError

Messages = Sequence[tuple[torch.Tensor, int]]  # with the rank of the peer

# A rank is at most one piece ahead of another: two pieces fit into the smallest usual buffer of a
# socket.
_PIECE_BYTES = 64 * 1024
_BUFFER_BYTES = 2**22  # the kernel reduces this to its limit
_RANK = struct.Struct("<q")


class LocalSockets:
    """Connections of a rank to all others, over Unix sockets. One thread at a time may use them.

    After an error they are closed, so that no other rank waits for a message of this one.
    `timeout` limits the time of a message, `peers` are connected sockets by rank.
    """

    def __init__(self, rank: int, timeout: timedelta, peers: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._timeout = timeout
        self._peers = peers
        seconds = timeout.total_seconds()
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for peer in peers.values():
            # Limits of the kernel: `settimeout` would add a call of `poll` to each message.
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            # SO_RCVBUF has no effect on Unix sockets (unix(7)).
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)

    def exchange(self, sent: Messages, received: Messages) -> None:
        """Send and receive contiguous tensors on the CPU.

        The messages from one rank to another arrive in order. Ranks call this in one common order.

        Raises:
            PeerLostError: another rank ended, or sent nothing within the time limit.
        """
        outgoing = self._streams(sent)
        incoming = self._streams(received)
        while outgoing or incoming:
            # All send a piece before any receives it, so no rank waits for one that waits for it.
            for streams, transfer in ((outgoing, self._send), (incoming, self._receive)):
                for peer, pieces in list(streams.items()):
                    if (piece := next(pieces, None)) is None:
                        del streams[peer]
                    else:
                        transfer(peer, piece)

    def all_gather(self, own: torch.Tensor, rows: torch.Tensor, ranks: Sequence[int]) -> None:
        """Write the tensors of all `ranks`, this one among them, to `rows`; each of them calls it.

        Args:
            own: contiguous tensor on the CPU, of the same size on each of `ranks`.
            rows: contiguous, with one row like `own` for each of `ranks`, in their order.
            ranks: in the same order on each of them.

        Raises:
            PeerLostError: another rank ended, or sent nothing within the time limit.
        """
        others = [(number, rank) for number, rank in enumerate(ranks) if rank != self._rank]
        rows[ranks.index(self._rank)].copy_(own)
        if 0 < own.nbytes <= _PIECE_BYTES:  # most messages are small, and their number decides
            data = _bytes(own)
            for _, rank in others:
                self._send(rank, data)
            for number, rank in others:
                self._receive(rank, _bytes(rows[number]))
            return
        received = [(rows[number], rank) for number, rank in others]
        self.exchange([(own, rank) for _, rank in others], received)

    def _streams(self, messages: Messages) -> dict[int, Iterator[memoryview]]:
        """Return the pieces of the messages of each peer."""
        data: dict[int, list[memoryview]] = {}
        for tensor, rank in messages:
            data.setdefault(rank, []).append(_bytes(tensor))
        # Each rank begins with the next one, so that no rank receives all messages at once.
        count = len(self._peers) + 1
        return {
            rank: _pieces(data[rank])
            for rank in sorted(data, key=lambda rank: (rank - self._rank) % count)
        }

    def _send(self, rank: int, data: memoryview) -> None:
        try:
            self._peers[rank].sendall(data)
        except OSError as error:
            raise self._lost(rank, error) from error

    def _receive(self, rank: int, target: memoryview) -> None:
        # A read that a signal interrupts returns fewer bytes in spite of MSG_WAITALL.
        while target:
            try:
                length = self._peers[rank].recv_into(target, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise self._lost(rank, error) from error
            if length == 0:
                reset = ConnectionResetError(errno.ECONNRESET, "the connection was closed")
                raise self._lost(rank, reset)
            target = target[length:]

    def _lost(self, rank: int, error: OSError) -> PeerLostError:
        self.close()
        reason = str(error)
        # EAGAIN of a socket that blocks: the time limit has passed.
        if isinstance(error, BlockingIOError):
            reason = f"no message within {self._timeout}"
        return PeerLostError(f"rank {self._rank} lost its connection to rank {rank}: {reason}")

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # of numpy


def _pieces(messages: Sequence[memoryview]) -> Iterator[memoryview]:
    """Divide messages into pieces, of which the last one of a message may be shorter."""
    for data in messages:
        for start in range(0, len(data), _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES]


def connect_locally(
    rank: int, size: int, timeout: timedelta, all_gather: Callable[[Any], list[Any]]
) -> LocalSockets | None:
    """Connect every rank with every other one; None if some pair has no common file system.

    A collective. `all_gather` returns the JSON values of all ranks, by rank.
    """
    peers: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        address = None
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="samestep-"))
            path = str(Path(folder) / "rank")  # other accounts have no access to the folder
            listener.bind(path)
            listener.listen(size)
            address = path
        except OSError:  # no folder can be written, it has no sockets, or the path is too long
            pass
        addresses = all_gather(address)
        is_connected = None not in addresses
        if not is_connected:
            addresses = []
        # One connection for each pair: a rank connects to all lower ones.
        for peer, other in enumerate(addresses[:rank]):
            peers[peer] = socket.socket(socket.AF_UNIX)
            try:
                peers[peer].connect(other)
            except OSError:  # another machine or container
                is_connected = False
                break
            peers[peer].sendall(_RANK.pack(rank))
        if all(all_gather(is_connected)):
            for _ in range(rank + 1, size):  # each is in the queue of the listener
                connection, _ = listener.accept()
                peers[_RANK.unpack(connection.recv(_RANK.size, socket.MSG_WAITALL))[0]] = connection
            return LocalSockets(rank, timeout, peers)
    for connection in peers.values():
        connection.close()
    return None
