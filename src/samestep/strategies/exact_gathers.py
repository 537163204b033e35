"""Gathers of divided parameters under `exact`: all together, for a call and again for a backward.

A hub adds the gradients of the complete parameters in the order of the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samestep.reduce.fast import Reduction
from samestep.strategies.divided_parameters import full_tensor
from samestep.strategies.dtensors import gathered, local_part
from samestep.view.gradient_sums import Hub
from samestep.view.module_tensors import is_in_place


class GatheredHub(Hub):
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
        self._all = [(id(one), one.requires_grad, one.dtype) for one in (*trained, *frozen)]
        divided = [one for one in (*trained, *frozen) if isinstance(one, DTensor)]
        self._complete: dict[torch.Tensor, _Complete] = {one: _Complete(one) for one in divided}
        self._frozen: list[torch.Tensor] = list(frozen)
        self._backward = -1
        self._before_backward = before_reduction
        self._stays = False  # a graph of gradients needs the values at an unknown time
        super().__init__(module, trained, reduction, before_reduction)

    @staticmethod
    def memory_of(tensor: torch.Tensor) -> torch.Tensor:
        return local_part(tensor)

    def _in_graph(self, parameter: torch.Tensor) -> torch.Tensor:
        if isinstance(parameter, DTensor):
            return self._complete[parameter].full
        return parameter

    def _mapping(self, replacements: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        mapping = {one: self._complete[one].full for one in self._frozen}
        return {**mapping, **super()._mapping(replacements)}

    def is_current(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters, in the same places. Their values may be others."""
        present = [(id(one), one.requires_grad, one.dtype) for one in parameters]
        return present == self._all and is_in_place(self._entries[0])

    def gather(self) -> None:
        for one in self._complete.values():
            one.gather()

    def end_forward(self) -> None:
        if not self._stays:
            for one in self._complete.values():
                one.free()

    def begin_backward(self) -> None:
        self._stays |= torch.is_grad_enabled()  # with `create_graph`
        task = torch._C._current_graph_task_id()  # private, as the queue
        if task != self._backward:
            self._backward = task
            self._before_backward()
            self.gather()
            # At the end of the backward: all own slices need the values.
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
        self.full = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device
        )
        if parameter.requires_grad:
            empty = self.full
            self.full = gathered(parameter, lambda _: empty)
        self._storage = self.full.untyped_storage()
        self._bytes = self._storage.nbytes()
        # The own part, and its version when it was gathered.
        self._values: tuple[torch.Tensor, int] | None = None
        self.free()

    def gather(self) -> None:
        """Gather the values. A graph that has saved others raises torch's error in its backward."""
        full = full_tensor(self.parameter)
        self._storage.resize_(self._bytes)
        version = self.full._version
        with torch.no_grad():
            self.full.copy_(full)
        local = self.parameter._local_tensor
        values = local, self.parameter._version + local._version
        # The same values: tensors that a graph saved before they were freed are valid again.
        if self._values is not None and self._values[0] is local and self._values[1] == values[1]:
            torch._C._autograd._unsafe_set_version_counter((self.full,), (version,))  # private
        self._values = values

    def free(self) -> None:
        self._storage.resize_(0)
