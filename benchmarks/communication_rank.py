"""Ranks of `communication.py`: some steps under a layout, with the traffic and the memory of a rank."""

from __future__ import annotations

import json
import os
import socket
import struct
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import samestep
from samestep.config import Reduction, StrategyConfig
from samestep.distributed.local_sockets import LocalSockets, Messages
from samestep.distributed.world import all_gather
from samestep.zoo.models import GPT

CLASSES, CONTEXT, WIDTH, BATCH = 257, 64, 256, 8
_WARMUP, _STEPS = 3, 2
# Where the kernel's `struct tcp_info` has `tcpi_notsent_bytes`, `tcpi_bytes_sent` and, behind it, `tcpi_bytes_retrans`.
_NOT_SENT, _BYTES_SENT = 144, 200


@dataclass(frozen=True)
class Case:
    """One layout to be measured."""

    name: str
    processes: int
    strategy: StrategyConfig
    reduction: Reduction = "fast"


@dataclass(frozen=True)
class Traffic:
    """Traffic of one rank, and its memory at the end.

    Attributes:
        sent: bytes a step: TCP connections as the kernel counts them, and Unix sockets.
        messages: collectives, and messages to one other rank, a step.
        held: bytes of parameters, gradients and optimizer state.
    """

    sent: float
    messages: float
    held: int


def model() -> GPT:
    """A GPT of 3.2 M parameters."""
    return GPT(num_classes=CLASSES, n_embd=WIDTH, n_head=4, n_layer=4, block_size=CONTEXT)


def measure(case: Case) -> Traffic:
    """Return the traffic of the rank that sends most; called in each rank."""
    torch.manual_seed(0)
    # The logits of this model are a view; nothing writes to them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    count = MessageCount()
    options: dict[str, Any] = {"reduction": case.reduction, "strategy": case.strategy}
    with samestep.init(device="cpu", **options) as world:
        net = samestep.parallel(model(), microbatches=world.size, **options)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(CLASSES, (BATCH, CONTEXT + 1), generator=draw)

        def step() -> None:
            optimizer.zero_grad()
            cross_entropy(net(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()

        for _ in range(_WARMUP):
            step()
        before = (bytes_sent() + count.local_bytes, count.now())
        for _ in range(_STEPS):
            step()
        after = (bytes_sent() + count.local_bytes, count.now())
        state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
        parameters = [parameter for parameter in net.parameters() if not parameter.is_meta]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sent, messages = ((now - then) / _STEPS for now, then in zip(after, before, strict=True))
        held = sum(map(_size, [*parameters, *gradients, *state]))
        most = [max(values) for values in zip(*all_gather([sent, messages, held], world), strict=True)]
        return Traffic(most[0], most[1], int(most[2]))


class MessageCount:
    """Counts collectives by torch's flight recorder, and messages between two ranks, which are not in it.

    Attributes:
        local_bytes: sent over Unix sockets.
    """

    def __init__(self) -> None:
        self._sent = self.local_bytes = 0
        exchange = LocalSockets.exchange

        def counted_exchange(sockets: LocalSockets, sent: Messages, received: Messages) -> None:
            self._sent += len(sent)
            self.local_bytes += sum(tensor.nbytes for tensor, _ in sent)
            exchange(sockets, sent, received)

        LocalSockets.exchange = counted_exchange  # type: ignore[method-assign]
        self._send = dist.batch_isend_irecv

        def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
            self._sent += sum(operation.op is dist.isend for operation in operations)
            return self._send(operations)

        dist.batch_isend_irecv = counted

    def now(self) -> int:
        recorded = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))
        ids = [entry["record_id"] for entry in recorded.get("entries", [])]
        return self._sent + (max(ids) + 1 if ids else 0)


def bytes_sent() -> int:
    """Return the bytes that this process has sent over its open TCP connections."""
    return sum(_sent_by(int(name)) for name in os.listdir("/proc/self/fd") if _is_socket(name))


def _is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except FileNotFoundError:
        return False  # the folder's own


def _sent_by(number: int) -> int:
    with socket.socket(fileno=os.dup(number)) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return 0
        facts = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(facts) < _BYTES_SENT + 16:
            raise SystemExit("error: this kernel does not count the bytes of a connection (Linux 4.19 does)")
        # Bytes that wait in the kernel would belong to the next count; repeated transmissions are not the layout's.
        (waiting,) = struct.unpack_from("I", facts, _NOT_SENT)
        sent, again = struct.unpack_from("QQ", facts, _BYTES_SENT)
        return int(waiting + sent - again)


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes that this rank holds of a tensor."""
    own = getattr(tensor, "_local_tensor", tensor)
    return own.numel() * own.element_size()


def parameter_bytes() -> int:
    """Of the whole model."""
    with torch.device("meta"):
        return sum(map(_size, model().parameters()))
