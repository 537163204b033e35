"""Distributed data parallel (`ddp`): all parameters on each rank, and a hub of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from samestep.view.gradient_sums import Hub
from samestep.view.strategy import Call, Strategy


class HubStrategy(Strategy):
    """Strategy with one hub, which sums the gradients of the parameters of this rank."""

    hub_class: type[Hub] = Hub
    _hub: Hub | None = None
    _is_deferred = False

    @property
    def is_deferred(self) -> bool:
        return self._is_deferred

    @is_deferred.setter
    def is_deferred(self, value: bool) -> None:
        self._is_deferred = value
        if self._hub is not None:
            self._hub.is_deferred = value

    def hub(
        self, call: Call, own: Sequence[nn.Parameter], before_reduction: Callable[[], None]
    ) -> Hub:
        """Return the hub of the present parameters of this rank."""
        # The script may have replaced, moved or frozen parameters since the last call.
        if self._hub is None or not self._hub.is_current(own):
            if self._hub is not None:
                self._hub.require_no_pending()
            self._hub = self.hub_class(call.module, own, self.reduction, before_reduction)
            self._hub.is_deferred = self._is_deferred
        return self._hub

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._hub is not None:
            self._hub.require_no_pending()


class Replicated(HubStrategy):
    """Complete parameters on every rank."""

    def parameters(self, call: Call) -> Hub | None:
        # Nothing to sum: the module computes with its own parameters.
        if not torch.is_grad_enabled():
            return None
        return self.hub(call, call.parameters(), self._before_reduction)
