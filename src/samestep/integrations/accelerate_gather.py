"""Collectives of Accelerate: `gather`, `gather_for_metrics` and `reduce`, with each sample once.

Processes compute some samples a second time, so that all of them run the body of a loop equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import accelerate
import torch

from samestep.data.batch import map_nested, map_tensors
from samestep.data.structure import TensorSpec
from samestep.distributed.world import World, all_gather
from samestep.engine.nested_data import Packed, pack, unpack
from samestep.errors import InputError
from samestep.integrations.torch_loader import integration_error

if TYPE_CHECKING:
    from samestep.integrations.accelerate_loader import PreparedLoader


@dataclass(eq=False)
class Iteration:
    """An iteration over a prepared loader."""

    loader: PreparedLoader
    is_training: bool  # the iteration computes steps
    length: int = 0  # in an evaluation, the number of iterations of the body on this process
    is_filler: bool = False  # the current samples are computed a second time, and do not count
    has_inner_loop: bool = False  # another iteration has ended since the current samples


class GatheringAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerator whose `gather`, `gather_for_metrics` and `reduce` count each sample once."""

    world: World

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.iterations: list[Iteration] = []  # those that run at present, the innermost one last
        self._has_evaluated = False  # since the last iteration outside of others began

    @contextmanager
    def iteration(self, iteration: Iteration) -> Iterator[None]:
        """Surround an iteration over a prepared loader."""
        self._has_evaluated &= bool(self.iterations)
        self.iterations.append(iteration)
        try:
            yield
        finally:
            self.iterations.remove(iteration)
            self._has_evaluated |= not iteration.is_training
            if self.iterations:
                self.iterations[-1].has_inner_loop = True

    def gather(self, tensor: Any) -> Any:
        """Gather nested tensors from all processes, in the order of the samples of an evaluation.

        Within a loop over a prepared loader, rows of samples that were computed a second time are left out, and the
        first dimension can have another length on every process.
        """
        return self._gathered(tensor) if self.iterations else self._gathered_outside(super().gather, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather nested tensors, or lists with one item per sample, so that each sample occurs once; see `gather`.

        Args:
            input_data: tensors, lists, numbers, text or None, nested in tuples and mappings; see `gather_samples`.
            use_gather_object: a list of tensors has one tensor per sample.
        """
        if self.iterations:
            return self._gathered(input_data, by_sample=use_gather_object)
        return self._gathered_outside(super().gather_for_metrics, input_data, use_gather_object)

    def _gathered(self, value: Any, *, by_sample: bool = False) -> Any:
        current = self.iterations[-1]
        if current.has_inner_loop:
            raise _after_loop_error("gather", "in the body of a loop, after a loop over another prepared loader")
        return gather_samples(value, self.world, is_counted=not current.is_filler, by_sample=by_sample)

    def _gathered_outside(self, collective: Callable[..., Any], *arguments: Any) -> Any:
        if self._has_evaluated:
            raise _after_loop_error(collective.__name__, "after an evaluation")
        return collective(*arguments)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce nested tensors over processes, outside of loops over prepared loaders, and not after an evaluation."""
        if self.iterations:
            fix = "accelerator.gather_for_metrics(values), or accelerator.step_result.loss in training"
            raise integration_error("accelerator.reduce in a loop over a prepared loader", fix)
        return self._gathered_outside(super().reduce, tensor, reduction, scale)


def gather_samples(value: Any, world: World, *, is_counted: bool, by_sample: bool = False) -> Any:
    """Return the values of all processes whose samples count. Two collectives, for any value.

    Args:
        value: tensors, lists, numbers, text or None, nested in tuples and mappings. Tensors are concatenated along
            dimension 0, or stacked if they have no dimensions. Lists are concatenated: they have one item per sample,
            such as a number, a text or a mapping of tensors. Another value becomes a list with one item per process.
        world: the ranks.
        is_counted: the samples of this rank count.
        by_sample: lists of tensors have one tensor per sample.
    """
    values: list[Any] = []
    own_structure = _describe(value, values)
    leaves = map_tensors(values, torch.Tensor.detach)
    if not by_sample and any(isinstance(leaf, list) and _has_tensors(leaf) for leaf in leaves):
        raise integration_error(
            "accelerator.gather of a list of tensors, which are values of all samples, or one for each sample",
            "a tuple in place of the list, or gather_for_metrics(values, use_gather_object=True) for one per sample",
        )
    packed = pack(leaves, torch.device("cpu"))
    unknown = next((tensor.path for tensor in packed.tensors if not tensor.dtype), None)
    if unknown is not None:
        raise integration_error(f"accelerator.gather of {unknown}", "a tensor, list, number, text or None")
    rows = all_gather([is_counted, own_structure, packed.structure, packed.tensors, packed.strides], world)
    data = all_gather(packed.data, world)
    for rank, (_, structure, *_) in enumerate(rows):
        if structure != rows[0][1]:
            raise integration_error(
                f"accelerator.gather of {structure} on rank {rank}, and of {rows[0][1]} on rank 0",
                "a list with one mapping per sample, or the same keys on every process",
            )
    counted = [
        unpack(Packed(structure, [TensorSpec(*spec) for spec in specs], strides, tensors))
        for (is_real, _, structure, specs, strides), tensors in zip(rows, data, strict=True)
        if is_real
    ]
    joined = map(_joined, zip(*counted, strict=True))
    return map_nested(value, lambda _: next(joined), _is_leaf)


def _describe(value: Any, leaves: list[Any]) -> Any:
    """Return keys and kinds of the values in nested tuples and mappings, as JSON, and append the values to `leaves`."""
    if isinstance(value, Mapping):
        return [[repr(key), _describe(item, leaves)] for key, item in value.items()]
    if isinstance(value, tuple):
        return [_describe(item, leaves) for item in value]
    leaves.append(value)
    return "tensor" if isinstance(value, torch.Tensor) else "list" if isinstance(value, list) else "value"


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, Mapping | tuple)


def _has_tensors(items: list[Any]) -> bool:
    return any(isinstance(item, torch.Tensor) for item in items)


def _joined(rows: tuple[Any, ...]) -> Any:
    """Return the values of one leaf on all ranks as one."""
    if isinstance(rows[0], torch.Tensor):
        return torch.stack(rows) if rows[0].dim() == 0 else torch.cat(rows)
    return [item for row in rows for item in row] if isinstance(rows[0], list) else list(rows)


def _after_loop_error(collective: str, place: str) -> InputError:
    """Return the error of a collective after a loop.

    The value can be a sum over the loop, which counts samples that were computed a second time.
    """
    return integration_error(
        f"accelerator.{collective} {place}",
        "accelerator.gather_for_metrics in the loop with the samples, or accelerate.utils.gather for other values",
    )
