"""This rank's parts of DTensors in divided calls, which compute with plain tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from samestep.strategies.divided_parameters import is_divided
from samestep.strategies.dtensors import local_in_graph, local_part
from samestep.view.gradient_sums import Hub
from samestep.view.module_tensors import Entry, ParameterSlots, is_in_place
from samestep.view.strategy import Call


class LocalHub(Hub):
    """Hub of this rank's parts of DTensors, whose gradients become DTensors."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], *others: Any) -> None:
        super().__init__(module, parameters, *others)
        self._divided = [one for one in parameters if is_divided(one)]
        self._versions = [one._version for one in self._divided]

    def note_writes(self) -> None:
        """Let torch see writes into DTensors, as of an optimizer, in graphs that use their parts.

        Operations of DTensors count no version of the part: a backward of a graph from before a
        step would use the new values without an error.
        """
        versions = [one._version for one in self._divided]
        if versions == self._versions:
            return
        for one, before, now in zip(self._divided, self._versions, versions, strict=True):
            if now != before:
                part = local_part(one)
                # Private, in torch 2.11 and 2.13.
                torch._C._autograd._unsafe_set_version_counter((part,), (part._version + 1,))
        self._versions = versions

    def begin_backward(self) -> None:
        self.note_writes()

    @staticmethod
    def memory_of(tensor: torch.Tensor) -> torch.Tensor:
        return local_part(tensor)

    def _in_graph(self, parameter: torch.Tensor) -> torch.Tensor:
        if is_divided(parameter):
            return local_in_graph(parameter)
        return parameter


class LocalParts:
    """Parts of DTensors that have no hub: those of frozen ones, and all without gradients."""

    def __init__(self) -> None:
        self._facts: list[tuple[int, int, bool]] = []
        self._entries: list[Entry] = []

    def entries(self, call: Call, others: Collection[nn.Parameter]) -> list[Entry]:
        """Return the places of DTensors in the module of a call, and this rank's parts.

        Args:
            call: the call.
            others: parameters of a hub.
        """
        seen = {id(one) for one in others}
        divided: list[nn.Parameter] = []
        for part in call.parts:
            for one in part._parameters.values():
                if one is not None and id(one) not in seen and is_divided(one):
                    seen.add(id(one))
                    divided.append(one)
        facts = [(id(one), id(local_part(one)), one.requires_grad) for one in divided]
        if facts != self._facts or not is_in_place(self._entries):
            # Tensors of inference mode cannot be used by later calls.
            with torch.inference_mode(False):
                # Kernels of recurrent layers ask whether a weight needs a gradient.
                parts: dict[torch.Tensor, torch.Tensor] = {
                    one: local_part(one).detach().requires_grad_(one.requires_grad)
                    for one in divided
                }
            self._entries = ParameterSlots(call.module).entries(parts)
            self._facts = facts
        return self._entries
