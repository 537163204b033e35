"""State of a model as elements of the vector of a microbatch, and copies of tensors in memory that is used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from samestep.engine.buffer_values import Place, copies, flat, hash_of, size_of

_SUMMED = ("mean", "sum")


class Snapshot:
    """Contiguous copies of tensors; each update writes the same memory, with one call per type and device.

    Args:
        tensors: the first values, by name.

    Attributes:
        copies: by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.copies = dict(zip(tensors, copies(list(tensors.values())), strict=True))
        groups: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, tensor in tensors.items():
            groups.setdefault((tensor.dtype, tensor.device), []).append(name)
        self._groups = [(names, [self.copies[name] for name in names]) for names in groups.values()]

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors with the same names, shapes, types and devices as the first ones."""
        for names, targets in self._groups:
            with torch.no_grad():
                torch._foreach_copy_(targets, [tensors[name] for name in names])


class StateVector:
    """Arrangement of state in a float64 vector: hashes of what must be equal in all microbatches, then summands.

    Args:
        names: the state.
        places: rules by name.
        starts: values at the beginning of the step; their shapes, types and devices are those of all values.
        microbatches: number of microbatches of the step, each with a hash.
        device: of the vector.

    Attributes:
        hashes: number of hashes.
        length: number of elements.
        equal: names of the state that must be equal.
        last: names of the state that is that of the last microbatch.
    """

    def __init__(
        self,
        names: Sequence[str],
        places: Mapping[str, Place],
        starts: Mapping[str, torch.Tensor],
        microbatches: int,
        device: torch.device,
    ) -> None:
        self._starts, self._device = starts, device
        self.equal = [name for name in names if places[name].rule == "equal"]
        self.last = [name for name in names if places[name].rule == "last"]
        self.hashes = microbatches if self.equal else 0
        groups: dict[tuple[str, torch.dtype], list[str]] = {}  # one group is one kernel
        for name in names:
            if places[name].rule in _SUMMED:
                groups.setdefault((places[name].rule, starts[name].dtype), []).append(name)
        self._groups = [(rule == "mean", members) for (rule, _), members in groups.items()]
        self._sizes = [[size_of(starts[name]) for name in members] for _, members in self._groups]
        self._lengths = [sum(sizes) for sizes in self._sizes]
        self.length = self.hashes + sum(self._lengths)

    def encode(self, number: int, values: Mapping[str, torch.Tensor], control: int = 0) -> torch.Tensor:
        """Return the vector of a microbatch after `control` zeros.

        Args:
            number: the microbatch.
            values: those of this state, by name; others are ignored.
            control: number of further elements at the beginning.
        """
        vector = torch.zeros(control + self.length, dtype=torch.float64, device=self._device)
        if self.equal:
            own = hash_of([values[name] for name in self.equal])
            vector[control + number : control + number + 1].copy_(own)
        first = control + self.hashes
        for (is_mean, members), length in zip(self._groups, self._lengths, strict=True):
            summand = flat([values[name] for name in members])
            if not is_mean:
                summand = summand - flat([self._starts[name] for name in members])
            vector[first : first + length].copy_(summand)
            first += length
        return vector

    def decode(self, sums: torch.Tensor, filled: int) -> dict[str, torch.Tensor]:
        """Return means and sums of the state, by name.

        Args:
            sums: sum of the summands of all microbatches.
            filled: number of microbatches with samples.
        """
        results: dict[str, torch.Tensor] = {}
        parts = sums.split_with_sizes(self._lengths)
        for (is_mean, members), sizes, part in zip(self._groups, self._sizes, parts, strict=True):
            starts = [self._starts[name] for name in members]
            value = part / filled if is_mean else part + flat(starts).to(part.device)
            for name, start, piece in zip(members, starts, value.split_with_sizes(sizes), strict=True):
                if start.is_complex():
                    results[name] = torch.view_as_complex(piece.view(*start.shape, 2))
                else:
                    results[name] = piece if start.dim() == 1 else piece.view(start.shape)
        return results
