"""Messages between the stages of a pipeline, as nodes of autograd.

A value goes forward, and its gradient comes back. A message has a header for the host (failure,
shapes, values that are no tensors, states of the generators) and then its tensors. Each slice has
one message from a stage to the next, whatever happens, so that ranks never lose step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from samestep.distributed.local_sockets import Messages
from samestep.distributed.rng import passed_generators
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.reduce.exact import communicate, gather_equal
from samestep.strategies.tensor_slices import ALIGNMENT

_LENGTH_BYTES = 8  # of the number of bytes of the text, at the beginning of a header
_TEXT_BYTES = 2048  # of the text in a header; the rest of a longer one is sent alone
_TEXT = slice(_LENGTH_BYTES, _LENGTH_BYTES + _TEXT_BYTES)
_STATES = slice(_LENGTH_BYTES + _TEXT_BYTES, None)


@dataclass(frozen=True)
class Message:
    """Message of one rank of a pipeline to another in a forward.

    Attributes:
        tensors: sent tensors, without a graph.
        have_gradients: which of them need gradients.
        values: other values, as JSON.
        has_failed: the sender could not compute them.
    """

    tensors: Sequence[torch.Tensor] = ()
    have_gradients: Sequence[bool] = ()
    values: Any = None
    has_failed: bool = False


class Links:
    """Connections of the ranks of one pipeline.

    Args:
        world: the ranks, that of the first stage first.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._generators = passed_generators(world.device)
        self._sizes = [generator.state().numel() for generator in self._generators]

    def send(self, message: Message, peers: Sequence[int], *, backward: bool = False) -> None:
        """Send a message to some ranks; in a forward, with the states of the generators."""
        # Memory alone is sent: a conjugate that is only a mark of the tensor would be lost.
        tensors = [tensor.detach().resolve_conj().resolve_neg() for tensor in message.tensors]
        rows = []
        for tensor, needs in zip(tensors, message.have_gradients, strict=True):
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows.append((dtype, tuple(tensor.shape), *layout_of(tensor), needs))
        try:
            text = json.dumps([message.has_failed, message.values, rows]).encode()
        except TypeError as error:
            raise InputError(
                f"a value between stages, or an output of the model, is not plain: {error}",
                expected="stages send tensors, and models return tensors and numbers",
                fix="set other strategy.stages, or return plain values",
                code="E_PIPELINE",
            ) from error
        header = self._header(backward)
        # Of one length, so that the receiver knows it: mostly one message has the whole text.
        first = text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        header[: _STATES.start] = _as_bytes(len(text).to_bytes(_LENGTH_BYTES, "little") + first)
        if not backward:
            header[_STATES] = torch.cat([one.state() for one in self._generators])
        self._communicate([(header, peer) for peer in peers])
        if len(text) > _TEXT_BYTES:
            self._communicate([(_as_bytes(text[_TEXT_BYTES:]), peer) for peer in peers])
        # In the order of elements; the receiver restores the layout.
        self._communicate([(tensor.contiguous(), peer) for peer in peers for tensor in tensors])

    def receive(self, peer: int, *, backward: bool = False) -> Message:
        """Receive a message; in a forward, set the generators to the states of its sender.

        Tensors have the layout that they have in one process: kernels round differently for another
        one.
        """
        header = self._header(backward)
        self._communicate([], [(header, peer)])
        length = int.from_bytes(header[:_LENGTH_BYTES].numpy().tobytes(), "little")
        text = header[_TEXT].numpy().tobytes()[:length]
        if length > _TEXT_BYTES:
            rest = torch.empty(length - _TEXT_BYTES, dtype=torch.uint8)
            self._communicate([], [(rest, peer)])
            text += rest.numpy().tobytes()
        has_failed, values, rows = json.loads(text)
        if not backward:
            states = header[_STATES].split(self._sizes)
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state.clone())
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=self.world.device)
            for dtype, shape, *_ in rows
        ]
        self._communicate([], [(tensor, peer) for tensor in tensors])
        placed = [with_layout(one, *row[2:4]) for one, row in zip(tensors, rows, strict=True)]
        return Message(placed, [bool(row[4]) for row in rows], values, has_failed)

    def _header(self, backward: bool) -> torch.Tensor:
        states = 0 if backward else sum(self._sizes)
        return torch.zeros(_STATES.start + states, dtype=torch.uint8)

    def _communicate(self, sent: Messages, received: Messages = ()) -> None:
        self.world.run_collective(
            lambda: communicate(self.world, sent, received), "a message between stages"
        )


def _as_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def layout_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Return the strides of a tensor, and the elements between an aligned address and its own."""
    return tuple(tensor.stride()), tensor.data_ptr() % ALIGNMENT // tensor.element_size()


def with_layout(tensor: torch.Tensor, strides: Sequence[int], offset: int) -> torch.Tensor:
    """Return a tensor of new memory with a layout."""
    if tuple(tensor.stride()) == tuple(strides) and not offset:
        return tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    memory = tensor.new_empty(offset + max(0, last) + 1)
    # `data`: stages change received tensors in place, which autograd restricts for views.
    placed = memory.as_strided(tensor.shape, strides, offset).data
    # Elements of a dimension with stride 0 share memory: one of them is written.
    distinct = tuple(slice(None) if stride else slice(1) for stride in strides)
    placed[distinct] = tensor[distinct]
    return placed


class Received(torch.autograd.Function):
    """Tensors of a message; their gradients go back to the sender."""

    @staticmethod
    def forward(
        ctx: Any, links: Links, peer: int, message: Message, anchor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.links = links
        ctx.peer = peer
        # An absent gradient stays absent in the stage before, as in one process.
        ctx.set_materialize_grads(False)
        tensors = zip(message.tensors, message.have_gradients, strict=True)
        ctx.mark_non_differentiable(*[tensor for tensor, needs in tensors if not needs])
        return tuple(message.tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        present = [gradient for gradient in gradients if gradient is not None]
        are_present = [gradient is not None for gradient in gradients]
        message = Message(present, [False] * len(present), are_present)
        ctx.links.send(message, [ctx.peer], backward=True)
        return None, None, None, None


class Sent(torch.autograd.Function):
    """Tensors that were sent; their gradients are received."""

    @staticmethod
    def forward(ctx: Any, links: Links, peer: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.links = links
        ctx.peer = peer
        # A token stands for the tensors in this graph: the next stage computes with them.
        return torch.zeros((), device=links.world.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        message = ctx.links.receive(ctx.peer, backward=True)
        received = iter(message.tensors)
        gradients = [next(received) if is_present else None for is_present in message.values]
        return None, None, *gradients


class Outputs(torch.autograd.Function):
    """Outputs of the last stage on some rank; the first node of a stage's backward.

    Their gradients are equal on all ranks of a pipeline. That of the last stage uses them; the
    others give zeros to their tokens, so that their parts of the backward run.
    """

    @staticmethod
    def forward(
        ctx: Any, begin: Callable[[], None], needs: Sequence[bool], own: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        count = len(needs)
        ctx.begin = begin
        ctx.own = own
        ctx.outputs = count
        ctx.tokens = [tensor.device for tensor in tensors[count:]]
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.view_as(tensor) for tensor in tensors[:count])
        constant = [one for one, need in zip(outputs, needs, strict=True) if not need]
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.begin()
        own = [*gradients[: ctx.own], *[None] * (ctx.outputs - ctx.own)]
        return None, None, None, *own, *[torch.zeros((), device=device) for device in ctx.tokens]


class Shared(torch.autograd.Function):
    """A weight of several stages: its gradient is the sum of those of all, the last one first."""

    @staticmethod
    def forward(
        ctx: Any, links: Links, ranks: Sequence[int], weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.links = links
        ctx.ranks = ranks
        ctx.shape = weight.shape
        ctx.dtype = weight.dtype
        ctx.device = weight.device
        ctx.set_materialize_grads(False)
        return weight.detach(), torch.zeros((), device=weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None, token: torch.Tensor | None) -> Any:
        if gradient is None:
            # Other stages wait for a gradient of this one.
            gradient = torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        name = "gradients of a shared weight"
        *others, total = gather_equal(ctx.links.world, gradient, ctx.ranks, name)
        # The order of a backward in one process, which begins with the last stage.
        for part in reversed(others):
            total = total + part
        return None, None, total
