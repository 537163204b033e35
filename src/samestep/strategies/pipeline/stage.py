"""One stage under a schedule of torch: random states in its messages, and the end of each backward."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from samestep.distributed.world import World

Tensors = tuple[torch.Tensor, ...]


class StageMethods(Protocol):
    """Computation of the stages of a rank; a chunk is the position of a microbatch in the schedule."""

    world: World

    def forward(self, stage: int, chunk: int, received: Tensors, *, training: bool) -> Tensors:
        """Return the outputs of a stage; of the last stage, the scalar loss."""

    def receive_buffer(self, stage: int, chunk: int, *, training: bool) -> torch.Tensor | None:
        """Return memory for the random states that a stage receives with a microbatch; None for no states."""

    def states_to_send(self, stage: int, chunk: int) -> torch.Tensor | None:
        """Return the random states that a stage sends after the forward of a microbatch; None for no states."""

    def sends_gradients(self, stage: int) -> bool:
        """Return whether an earlier stage needs the gradients of a stage for its own backward."""

    def begin_backward(self, stage: int, chunk: int) -> None:
        """Prepare the backward of a microbatch that computes the gradients of weights."""

    def end_backward(self, stage: int, chunk: int) -> None:
        """Take the gradients of a microbatch."""


class Stage(PipelineStage):
    """A stage of this rank. Random states travel next to activations, in the same order on both ranks."""

    def __init__(
        self,
        methods: StageMethods,
        weights: list[nn.Parameter],
        stage: int,
        count: int,
        metadata: tuple[Tensors, Tensors],
        *,
        training: bool,
    ) -> None:
        """Metadata are the inputs and outputs on the meta device."""
        inputs, outputs = metadata
        super().__init__(
            _StageModule(methods, weights, stage, is_last=stage == count - 1, training=training),
            stage,
            count,
            methods.world.device,
            input_args=inputs,
            output_args=outputs,
            group=methods.world.group,
        )
        self._methods, self._training = methods, training

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive operations of a forward."""
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        states = self._methods.receive_buffer(self.stage_index, fwd_chunk_id, training=self._training)
        return operations if states is None else [*operations, self._operation(dist.irecv, states, -1)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the send operations of a forward."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        states = self._methods.states_to_send(self.stage_index, fwd_chunk_id)
        return operations if states is None else [*operations, self._operation(dist.isend, states, 1)]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Compute the backward of a microbatch; without `full_backward`, the gradients of inputs alone."""
        if not self._training:  # some schedules call this method in an evaluation too
            return
        # Not in two halves: a rank that waits for a second half could block the first halves of others.
        full = full_backward or self._methods.sends_gradients(self.stage_index)
        if full:
            self._methods.begin_backward(self.stage_index, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full, last_backward=last_backward)
        if full:
            self._methods.end_backward(self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of weights, the second half of a backward."""
        if self._methods.sends_gradients(self.stage_index):
            return
        self._methods.begin_backward(self.stage_index, bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self._methods.end_backward(self.stage_index, bwd_chunk_id)

    def _operation(self, operation: Any, tensor: torch.Tensor, offset: int) -> dist.P2POp:
        peer = (self.stage_index + offset) % self.group_size
        return dist.P2POp(operation, tensor, group=self.group, group_peer=peer)


class _StageModule(nn.Module):
    """One stage as a module for torch's schedules, with the parameters that the stage uses."""

    def __init__(
        self, methods: StageMethods, weights: list[nn.Parameter], stage: int, *, is_last: bool, training: bool
    ) -> None:
        super().__init__()
        self._methods, self._stage, self._is_last, self._is_training = methods, stage, is_last, training
        self.weights = nn.ParameterList(weights)

    def forward(self, *received: torch.Tensor, chunk: torch.Tensor) -> Tensors | torch.Tensor:
        outputs = self._methods.forward(self._stage, int(chunk), received, training=self._is_training)
        return outputs[0] if self._is_last else outputs
