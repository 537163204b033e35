"""Changes of parameters, optimizer groups and norm layers after an engine was made."""

from __future__ import annotations

from itertools import chain
from operator import is_

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.config import StepConfig
from samestep.distributed.world import World
from samestep.errors import InputError


class ModelState:
    """Parameters and norm layers for which components were built, to detect changes by the script.

    Attributes:
        sync_batch_norm: norm layers use statistics of the global batch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: StepConfig,
        sync_batch_norm: bool,
        *,
        is_divided: bool,
    ) -> None:
        self.sync_batch_norm = sync_batch_norm
        self._optimizer, self._is_divided = optimizer, is_divided
        modules = list(model.modules())
        # The present values of these tables are all modules and parameters, as long as no value changes.
        self._modules = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        is_watched = config.batch_norm == "sync" and not sync_batch_norm
        self._norms = [module for module in modules if is_watched and isinstance(module, _BatchNorm)]
        self._objects, self._attributes = self._read()

    def is_current(self) -> bool:
        """Return whether parameters, the optimizer's groups and the use of batch statistics are unchanged."""
        objects, attributes = self._read()
        is_same = len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
        return is_same and attributes == self._attributes

    def require_whole_model(self, world: World) -> None:
        """Refuse a change of parameters that are divided among ranks or devices.

        Raises:
            InputError: they are.
        """
        if self._is_divided or world.strategy.name == "device_map":
            raise InputError(
                "trained parameters, the optimizer's groups or the use of batch statistics changed after the engine "
                "was made",
                expected=f"under {world.mesh_shape.name}, they stay as they were when the engine was made",
                fix="change them before samestep.Engine(...), or use --strategy ddp",
                code="E_PARAMETERS_CHANGED",
            )

    def _read(self) -> tuple[list[object], list[object]]:
        parameters = [p for table in self._parameters for p in table.values() if p is not None]
        optimized = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        modules = chain.from_iterable(table.values() for table in self._modules)
        uses_batch = any(norm.training for norm in self._norms)
        if self._is_divided:  # FSDP exchanges the parameters themselves
            return [*modules, *optimized], [uses_batch, *(p.requires_grad for p in parameters)]
        attributes = [(p.requires_grad, p.dtype, p.shape) for p in parameters]
        return [*modules, *parameters, *optimized], [uses_batch, *attributes]
