"""Fully sharded data parallel under `exact`: parameters are divided between calls, and complete in calls and backwards.

The slices of a rank are computed one after another with complete parameters, and a hub adds their
gradients in the order of the reduction, as if every rank held all parameters; then each rank keeps
its part of the sums. Ranks can have different numbers of slices, so layers cannot be gathered one
by one for each slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samestep.reduce.fast import Reduction
from samestep.strategies.divided_parameters import full_tensor
from samestep.strategies.gathering import gathered
from samestep.strategies.sharded import Sharded
from samestep.view.hub import Hub
from samestep.view.slots import is_in_place
from samestep.view.strategy import Call, CallParameters


class Gathered(Sharded):
    """Parameters divided between ranks, gathered together for a call, and again for a backward."""

    _hub: _GatheredHub | None = None

    def parameters(self, call: Call) -> CallParameters:
        """Return the hub of the present parameters, with complete values."""
        trained = call.parameters()
        frozen = [
            one
            for one in call.module.parameters()
            if isinstance(one, DTensor) and not one.requires_grad
        ]
        if self._hub is None or not self._hub.is_current([*trained, *frozen]):
            with torch.inference_mode(False), torch.enable_grad():
                self._hub = _GatheredHub(
                    call.module, trained, frozen, self.reduction, self._before_reduction
                )
        self._hub.gather()
        return self._hub


class _GatheredHub(Hub):
    """Hub of complete parameters, whose memory is freed after each call and backward.

    Args:
        module: the module.
        trained: its parameters that require gradients.
        frozen: its other divided parameters.
        reduction: sums over all slices.
        before_reduction: called once in each backward before the first sum.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: Sequence[nn.Parameter],
        frozen: Sequence[DTensor],
        reduction: Reduction,
        before_reduction: Callable[[], None],
    ) -> None:
        self._all = [(id(one), one.requires_grad) for one in (*trained, *frozen)]
        complete = [_Complete(one) for one in (*trained, *frozen) if isinstance(one, DTensor)]
        self._complete = {one.parameter: one for one in complete}
        self._parameters = {one.full: one.parameter for one in complete}
        self._backward = -1
        self._before_backward = before_reduction
        self._stays = False  # a graph of gradients needs the values at an unknown time
        whole = [self._complete[one].full if isinstance(one, DTensor) else one for one in trained]
        super().__init__(module, whole, reduction, before_reduction)

    def _mapping(self, replacements: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        mapping: dict[torch.Tensor, torch.Tensor] = {
            one.parameter: one.full for one in self._complete.values()
        }
        for full, replacement in super()._mapping(replacements).items():
            mapping[self._parameters.get(full, full)] = replacement
        return mapping

    def is_current(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters of the hub, in the same places. Their values are gathered for each call."""
        present = [(id(one), one.requires_grad) for one in parameters]
        return present == self._all and is_in_place(self._entries[0])

    def gather(self) -> None:
        """Gather the present values of the parameters."""
        for one in self._complete.values():
            one.gather()

    def end_forward(self) -> None:
        """Free the memory of complete parameters."""
        if not self._stays:
            for one in self._complete.values():
                one.free()

    def begin_backward(self) -> None:
        """Gather the parameters once more, until the end of the backward."""
        self._stays |= torch.is_grad_enabled()
        task = torch._C._current_graph_task_id()  # private, as the queue
        if task != self._backward:
            self._backward = task
            self._before_backward()
            self.gather()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_forward)


class _Complete:
    """A divided parameter and its full tensor, whose memory comes and goes.

    Attributes:
        parameter: the parameter.
        full: the full tensor; its gradient is divided and becomes that of the parameter.
    """

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter
        device = parameter.device_mesh.device_type
        empty = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device
        )
        self.full = gathered(parameter, None, lambda _: empty) if parameter.requires_grad else empty
        self._storage = self.full.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._values: tuple[torch.Tensor, int] | None = (
            None  # the own part, and its version when it was gathered
        )
        self.free()

    def gather(self) -> None:
        """Gather the values. A graph that has saved others raises an error of torch in its backward."""
        full = full_tensor(self.parameter)
        self._storage.resize_(self._bytes)
        version = self.full._version
        with torch.no_grad():
            self.full.copy_(full)
        local = self.parameter._local_tensor
        values = local, self.parameter._version + local._version
        if self._values is not None and self._values[0] is local and self._values[1] == values[1]:
            torch._C._autograd._unsafe_set_version_counter((self.full,), (version,))  # private
        self._values = values

    def free(self) -> None:
        """Free the memory."""
        self._storage.resize_(0)
