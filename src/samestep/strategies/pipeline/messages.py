"""Messages between stages: memory layouts, and the random states that pass from stage to stage.

Kernels round differently for another order of dimensions in memory, and matrix products for another alignment. Messages
are contiguous, so the receiver restores the layout that a tensor has in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from samestep.distributed.rng import passed_generators
from samestep.distributed.world import World, all_gather

Layout = tuple[tuple[int, ...], int]  # strides, and elements after an aligned address

_ALIGNMENT = 64  # bytes; of new memory


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a tensor."""
    return tuple(tensor.stride()), tensor.data_ptr() % _ALIGNMENT // tensor.element_size()


def contiguous_layout(shape: torch.Size) -> Layout:
    """Return the layout of a new contiguous tensor."""
    sizes = [max(1, size) for size in reversed(shape[1:])]
    return tuple(reversed([*accumulate(sizes, int.__mul__, initial=1)][: len(shape)])), 0


def with_layout(tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """Return a copy of `tensor` with a layout; contiguous for None."""
    if layout is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    strides, offset = layout
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    memory = torch.empty(offset + max(0, last) + 1, dtype=tensor.dtype, device=tensor.device).untyped_storage()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    # Elements of a dimension with stride 0 share memory: one of them is written.
    distinct = [min(size, 1) if stride == 0 else size for size, stride in zip(tensor.shape, strides, strict=True)]
    copy.set_(memory, offset, distinct, strides)
    copy.copy_(tensor[tuple(slice(size) for size in distinct)])
    return copy.set_(memory, offset, tensor.shape, strides)


class ReceivedTensor(torch.autograd.Function):
    """Copy of a received tensor, which the stage may change in place; its gradient is contiguous for the backend."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, layout: Layout | None, observe: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Return a copy with a layout; `observe` receives the gradient, in the layout that it has in one process."""
        ctx.observe = observe
        return with_layout(tensor, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.observe(gradients[0])
        return gradients[0].contiguous(), None, None


class SentTensor(torch.autograd.Function):
    """Contiguous copy of a tensor for a message, whose gradient gets the layout that it has in one process."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        ctx.layout = layout
        return tensor.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0] if ctx.layout is None else with_layout(gradients[0], ctx.layout)
        return gradient, None


Key = tuple[str | int, ...]


class MessageFormat:
    """Format of messages, which ranks learn from computed microbatches; equal on every rank of a pipeline.

    A message has a contiguous tensor in memory of its own, and no random states, unless a microbatch has shown another
    layout, or a draw of random numbers before the last stage. If a run of microbatches shows something new, its results
    differ from those of one process, and it is computed again.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._generators = passed_generators(world.device)
        self._sizes = [generator.state().numel() for generator in self._generators]
        self._known: dict[Key, Any] = {}
        self._new: dict[Key, Any] = {}

    def layout(self, key: Key) -> Layout | None:
        """Return the layout of a tensor, None for a contiguous one."""
        return self._known.get(key)

    def observe_layout(self, key: Key, tensor: torch.Tensor) -> None:
        """Record the layout of a tensor if it is new."""
        layout = layout_of(tensor)
        if layout != (self._known.get(key) or contiguous_layout(tensor.shape)):
            self._new[key] = layout

    def passed(self, stage: int, *, training: bool) -> list[int]:
        """Return the generators whose states a stage sends to the next one: a stage up to this one draws from them."""
        numbers = range(len(self._generators))
        return [n for n in numbers if self._known.get(("draw", n, int(training)), stage + 1) <= stage]

    def empty_states(self, stage: int, *, training: bool) -> torch.Tensor | None:
        """Return memory for the states that a stage sends; None if it sends none."""
        size = sum(self._sizes[number] for number in self.passed(stage, training=training))
        return torch.empty(size, dtype=torch.uint8, device=self._world.device) if size else None

    def set_states(self, stage: int, states: torch.Tensor, *, training: bool) -> None:
        """Set the generators to the states that a stage sent."""
        numbers = self.passed(stage, training=training)
        for number, state in zip(numbers, states.cpu().split([self._sizes[n] for n in numbers]), strict=True):
            self._generators[number].set_state(state)

    def states(self, stage: int, seed: Callable[[], None], *, training: bool) -> torch.Tensor | None:
        """Return the states that a stage sends after its forward, and record draws from other generators.

        `seed` sets all generators as at the beginning of the microbatch.
        """
        passed = self.passed(stage, training=training)
        states = [self._generators[number].state() for number in passed]
        others = [number for number in range(len(self._generators)) if number not in passed]
        after = [self._generators[number].fingerprint() for number in others]
        seed()
        for number, fingerprint in zip(others, after, strict=True):
            if self._generators[number].fingerprint() != fingerprint:
                key = "draw", number, int(training)
                self._new[key] = min(stage, self._new.get(key, stage))
        return torch.cat(states).to(self._world.device) if states else None

    def agree(self) -> bool:
        """Share new entries with the other ranks; return whether there were any. A collective."""
        is_new = torch.tensor([float(bool(self._new))], device=self._world.device)
        self._world.combine(is_new)
        if not is_new.item():
            return False
        self.learn()
        return True

    def learn(self) -> None:
        """Add the new entries of all ranks to the format. A collective."""
        own, self._new = [[list(key), value] for key, value in self._new.items()], {}
        for rows in all_gather(own, self._world):
            for names, value in rows:
                key = tuple(names)
                if key[0] == "draw":
                    self._known[key] = min(value, self._known.get(key, value))
                else:
                    strides, offset = value
                    self._known[key] = tuple(strides), offset
