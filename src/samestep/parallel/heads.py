"""Attention whose heads are divided: each rank computes its own, of queries, keys and values that are `column`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from samestep.errors import InputError
from samestep.parallel.divided import whole_mask
from samestep.parallel.drawing import draws

_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_HEADS = 1  # the dimension of heads in scores `(N, heads, T, T)`


class Heads(ParallelStyle):
    """A module inside of which a rank has its heads as plain tensors; what it returns is divided.

    Its forward must take the number of heads from the size of its tensors, as those of BERT do.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if "forward" in vars(module):
            raise InputError(
                f"{self._name} is computed again in backward, and strategy.plan divides its heads",
                rule="what is computed again has all of an attention in it",
                do=f"set step.recompute to a module around {self._name}",
            )
        module.forward = partial(self._computed, module, module.forward, device_mesh)
        return module

    def _computed(self, module: nn.Module, forward: Any, mesh: DeviceMesh, *arguments: Any, **named: Any) -> Any:
        if arguments and not isinstance(arguments[0], DTensor):
            # Once for queries, keys and values: so the gradients of all three travel as one.
            arguments = (DTensor.from_local(arguments[0], mesh, [Replicate()], run_check=False), *arguments[1:])
        with _OwnHeads(self._name, heads_of(module) or 0, mesh):
            outputs = forward(*arguments, **named)
        if isinstance(outputs, torch.Tensor):
            return _divided(outputs, mesh)
        return tuple(_divided(each, mesh) if isinstance(each, torch.Tensor) else each for each in outputs)


def heads_of(module: nn.Module) -> int | None:
    """How many heads an attention has; None where it does not say."""
    found = (getattr(module, name, None) for name in _COUNTS)
    return next((count for count in found if isinstance(count, int)), None)


class _OwnHeads(TorchFunctionMode):
    """Draws for the scores of all heads what one process draws, and takes this rank's part."""

    def __init__(self, name: str, heads: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self._name, self._heads, self._mesh = name, heads, mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is functional.dropout:
            return self._dropout(*args, **options)
        if draws(func, args, options):
            raise self._drawn(func.__name__)
        return func(*args, **options)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            return input
        if input.dim() != 4 or input.shape[_HEADS] * self._mesh.size() != self._heads:
            raise self._drawn(f"dropout of a tensor {tuple(input.shape)}")
        return input * whole_mask(_divided(input, self._mesh), p).to_local()

    def _drawn(self, what: str) -> InputError:
        return InputError(
            f"{what} in {self._name}, whose heads are divided",
            rule="of what draws numbers there, only torch.nn.functional.dropout of the scores (N, heads, T, T) draws "
            "what one process does",
            do="attention that is written out (attn_implementation: eager), or strategy.plan: column_gathered for its "
            "products",
        )


def _divided(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    axis = _HEADS if tensor.dim() == 4 else tensor.dim() - 1
    return DTensor.from_local(tensor, mesh, [Shard(axis)], run_check=False)
