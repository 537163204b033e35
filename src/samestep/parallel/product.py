"""Products of matrices that ranks divide among them, each rank with a part of the weights.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from samestep.errors import InputError


class Product(ParallelStyle):
    """A module whose product is divided: by its results (`column`), or by what it sums over (`row`).

    A result that stays divided is a DTensor, which torch does not let meet a plain tensor; so what is plain is whole,
    and the same on every rank.

    Args:
        name: of the module.
        word: `column`, whose result stays divided; `column_gathered`; `row`, which takes a divided or a whole tensor.
        inside: of a module whose heads are divided: a divided result is this rank's part of it, as a plain tensor.
    """

    def __init__(self, name: str, word: str, *, inside: bool) -> None:
        super().__init__()
        self._name, self._word, self._inside = name, word, inside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._divide, self._take, self._give)

    def _divide(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        axes = _axes(module, self._word)
        for key, parameter in list(module.named_parameters(recurse=False)):
            whole, axis = parameter.detach(), axes.get(key)
            if axis is not None:
                # Cloned: a view would keep the whole in memory.
                whole = whole.chunk(mesh.size(), axis)[mesh.get_local_rank()].clone(
                    memory_format=torch.contiguous_format
                )
            placement = Replicate() if axis is None else Shard(axis)
            part = DTensor.from_local(whole, mesh, [placement], run_check=False)
            module.register_parameter(key, nn.Parameter(part, parameter.requires_grad))

    def _take(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        if not inputs:
            raise InputError(
                f"the module {self._name!r}, which a tensor axis divides, is called with named arguments alone",
                rule="its input is its first argument",
                do=f"call it as {self._name.rpartition('.')[2]}(x), or leave it out of strategy.plan",
            )
        given, *others = inputs
        if not isinstance(given, DTensor):
            given = DTensor.from_local(given, mesh, [Replicate()], run_check=False)
        wanted = Shard(given.dim() - 1) if self._word == "row" else Replicate()
        if tuple(given.placements) != (wanted,):  # else gradients of several products are added up before they travel
            given = given.redistribute(placements=[wanted])
        return (given, *others)

    def _give(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if self._word == "column":
            return outputs.to_local() if self._inside else outputs
        return outputs.redistribute(placements=[Replicate()]).to_local()


def is_product(module: nn.Module, word: str = "column") -> bool:
    """Whether a module can be divided so; one whose weight is computed from others (`parametrize`) cannot."""
    is_kind = isinstance(module, nn.Linear) or _is_transposed(module)
    is_kind = is_kind or (isinstance(module, nn.Embedding) and word != "row")
    return is_kind and "weight" in dict(module.named_parameters(recurse=False))


def divided_size(module: nn.Module, word: str) -> tuple[str, int]:
    """What of a module ranks divide evenly: its name and how many of it there are."""
    weight = module.get_parameter("weight")
    size = weight.shape[_axes(module, word)["weight"]]
    return ("inputs" if word == "row" else "outputs"), size


def _axes(module: nn.Module, word: str) -> dict[str, int]:
    """The dimension in which each parameter is divided; what is not here is whole on every rank."""
    outputs = 0 if isinstance(module, nn.Linear) else 1
    return {"weight": 1 - outputs} if word == "row" else {"weight": outputs, "bias": 0}


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is the linear layer of the transformers library's GPT-2, whose weight lies the other way round."""
    return any(kind.__name__ == "Conv1D" and hasattr(module, "nf") for kind in type(module).__mro__)
