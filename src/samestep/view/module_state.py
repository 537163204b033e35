"""Numbers and tensors of a module that must be equal on all ranks, with their names."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from samestep.distributed.device_reads import device_reads
from samestep.view.leaves import hash_of, sample_of

NUMBERS = (bool, int, float)


class Tensors(NamedTuple):
    """Tensors by dictionaries that hold them, and their names."""

    places: list[tuple[dict[str, Any], str]]
    names: list[str]

    def versions(self) -> array[int]:
        """Return the number of writes of each."""
        return array("q", [tensors[name]._version for tensors, name in self.places])

    def contents(self) -> dict[str, int]:
        """Return a hash of all values of each."""
        tensors = [values[name] for values, name in self.places]
        samples = [sample_of(tensor, max(2, tensor.numel())) for tensor in tensors]
        pairs = zip(self.names, samples, strict=True)
        return {name: hash_of(device_reads.copy(one)) for name, one in pairs if one is not None}


class Lists(NamedTuple):
    """Compared facts of a module: dictionaries that hold numbers and tensors, with their names."""

    attributes: list[tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[Any, ...]]]]
    attribute_names: list[str]
    buffers: Tensors
    parameters: Tensors
    tensors: Tensors  # in other attributes
    versions: array[int]  # of the parameters in the call before


class ModuleState:
    """Place of the lists of one module, which are made in its first call.

    The lists refer to attributes of the module, and these can refer to the module. So the state of
    its divided calls has the place; that of `samestep.parallel` ends with the module.
    """

    def __init__(self) -> None:
        self.lists: Lists | None = None


def lists_of(module: nn.Module) -> Lists:
    """Return the numbers and tensors that a module has now."""
    every = [Tensors([], []) for _ in range(3)]
    lists = Lists([], [], every[0], every[1], every[2], array("q"))
    for prefix, one in module.named_modules():
        values = vars(one)
        names = [name for name, value in values.items() if type(value) in NUMBERS]
        names = [name for name in names if name[0] != "_"] or ["training"]  # two give a tuple
        lists.attributes.append((values, itemgetter("training", *names)))
        lists.attribute_names.extend(
            f"{prefix}.{name}".lstrip(".") for name in ["training", *names]
        )
        held: tuple[dict[str, Any], ...] = (one._buffers, one._parameters, values)
        for place, tensors in zip(held, every, strict=True):
            for name, tensor in place.items():
                is_tensor = type(tensor) in (Tensor, nn.Parameter)
                if is_tensor and not tensor.is_inference():
                    tensors.places.append((place, name))
                    tensors.names.append(f"{prefix}.{name}".lstrip("."))
    lists.versions.extend(lists.parameters.versions())
    return lists
