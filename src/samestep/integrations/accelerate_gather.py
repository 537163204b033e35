"""Values of all processes, with each sample once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from samestep.data.batch import map_tensors, with_items
from samestep.data.structure import TensorSpec
from samestep.distributed.world import World, all_gather
from samestep.engine.nested_data import Packed, pack, unpack
from samestep.errors import InputError
from samestep.integrations.torch_loader import integration_error


def gather_samples(value: Any, world: World, *, is_counted: bool, by_sample: bool = False) -> Any:
    """Return the values of all processes whose samples count. Two collectives, for any value.

    Args:
        value: tensors, lists, numbers, text or None, nested in tuples and mappings. Tensors are concatenated along
            dimension 0, or stacked if they have no dimensions. Lists are concatenated: they have one item per sample,
            such as a number, a text or a mapping of tensors. Another value becomes a list with one item per process.
        world: the ranks.
        is_counted: the samples of this rank count.
        by_sample: lists of tensors have one tensor per sample.

    Raises:
        InputError: a list of tensors without `by_sample`, a value of another type, or tuples and mappings with other
            structures on another rank.
    """
    leaves = map_tensors(list(_leaves(value)), torch.Tensor.detach)
    if not by_sample and any(isinstance(leaf, list) and _has_tensors(leaf) for leaf in leaves):
        raise integration_error(
            "accelerator.gather of a list of tensors, which are values of all samples, or one for each sample",
            "a tuple of tensors with the rows of all samples, or lists with one item per sample",
            "a tuple in place of the list, or gather_for_metrics(values, use_gather_object=True) for one per sample",
        )
    packed = pack(leaves, torch.device("cpu"))
    unknown = next((tensor.path for tensor in packed.tensors if not tensor.dtype), None)
    if unknown is not None:
        raise integration_error(
            f"accelerator.gather of {unknown}",
            "tensors, numbers, text and None, in lists, tuples and mappings",
            "convert the value, such as an array by torch.from_numpy or tolist",
        )
    rows = all_gather([is_counted, _structure(value), packed.structure, packed.tensors, packed.strides], world)
    data = all_gather(packed.data, world)
    for rank, (_, structure, *_) in enumerate(rows):
        if structure != rows[0][1]:
            raise integration_error(
                f"accelerator.gather of {structure} on rank {rank}, and of {rows[0][1]} on rank 0",
                "tuples and mappings with the same structure on every process",
                "a list with one mapping per sample, or the same keys on every process",
            )
    counted = [
        unpack(Packed(structure, [TensorSpec(*spec) for spec in specs], strides, tensors))
        for (is_real, _, structure, specs, strides), tensors in zip(rows, data, strict=True)
        if is_real
    ]
    return _with_leaves(value, map(_joined, zip(*counted, strict=True)))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested tuples and mappings."""
    if isinstance(value, Mapping | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    else:
        yield value


def _with_leaves(value: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(value, Mapping):
        return with_items(value, {key: _with_leaves(item, leaves) for key, item in value.items()})
    if isinstance(value, tuple):
        items = [_with_leaves(item, leaves) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(leaves)


def _structure(value: Any) -> Any:
    """Return keys and kinds of the values in nested tuples and mappings, as JSON."""
    if isinstance(value, Mapping):
        return [[repr(key), _structure(item)] for key, item in value.items()]
    if isinstance(value, tuple):
        return [_structure(item) for item in value]
    return "tensor" if isinstance(value, torch.Tensor) else "list" if isinstance(value, list) else "value"


def _has_tensors(items: list[Any]) -> bool:
    return any(isinstance(item, torch.Tensor) for item in items)


def _joined(rows: tuple[Any, ...]) -> Any:
    """Return the values of one leaf on all ranks as one."""
    if isinstance(rows[0], torch.Tensor):
        return torch.stack(rows) if rows[0].dim() == 0 else torch.cat(rows)
    return [item for row in rows for item in row] if isinstance(rows[0], list) else list(rows)


def after_loop_error(collective: str, place: str) -> InputError:
    """Return the error of a collective after a loop.

    The value can be a sum over the loop, which counts samples that were computed a second time.
    """
    return integration_error(
        f"accelerator.{collective} {place}",
        "values of the current samples: processes that compute samples a second time are left out",
        "accelerator.gather_for_metrics in the loop with the samples; other values before the loop, or by "
        "accelerate.utils.gather and reduce",
    )
