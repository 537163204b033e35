"""Rules of buffers: places of buffers in a model, their arrangement in the vector of a microbatch, and errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from samestep.config.validation import match_patterns
from samestep.engine.tensor_bits import flat, hash_of, size_of
from samestep.errors import InputError

Kind = Literal["_buffers", "_parameters", "__dict__"]
Rule = Literal["mean", "equal", "last", "sum"]
_SUMMED = ("mean", "sum")
_MAX_LISTED = 5


@dataclass(frozen=True, eq=False)
class Place:
    """Place of a value among the buffers, parameters or attributes of a module."""

    module: torch.nn.Module
    path: str
    key: str
    kind: Kind
    rule: Rule
    is_persistent: bool = True

    def table(self, module: torch.nn.Module | None = None) -> dict[str, Any]:
        """Return the table of the module that holds the value."""
        table: dict[str, Any] = getattr(module or self.module, self.kind)
        return table

    def value(self, module: torch.nn.Module | None = None) -> Any:
        """Return the value in this module, or in a replica of it."""
        value = self.table(module).get(self.key)
        return value.data if self.kind == "_parameters" and value is not None else value

    def put(self, value: Any) -> None:
        """Set the value in this module."""
        if self.kind == "_parameters":
            self.table()[self.key].data = value
        elif self.table().get(self.key) is not value:
            self.table()[self.key] = value


def buffers_of(model: torch.nn.Module, *, persistent: bool = True) -> dict[str, torch.Tensor]:
    """Return the buffers of a model by name; all of them, or those that a checkpoint contains."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not persistent or name not in module._non_persistent_buffers_set
    }


def changed_state_error(names: Sequence[str]) -> InputError:
    """Return the error of a training forward that changes state for which there is no rule."""
    return InputError(
        f"the forward of a training step changed {listed(names)}",
        expected="a forward changes the values of buffers, not their shapes and types; it registers no buffers "
        "and writes no parameters",
        fix="write parameters after engine.step, or declare frozen ones, such as a key encoder: "
        "Engine(..., buffers={'key_encoder.*': 'last'}); register buffers with their final shape in __init__",
        code="E_BUFFER",
    )


def unequal_state_error(names: Sequence[str]) -> InputError:
    """Return the error of microbatches that end with different values of state that must be equal."""
    return InputError(
        f"microbatches of a step ended with different values of {listed(names)}",
        expected="integer and bool buffers, such as counters of steps, that are equal after every microbatch",
        fix=f'choose a rule: Engine(..., buffers={{"{names[0]}": "last"}}) for the value of the last microbatch, or '
        '"sum" for the sum of all changes',
        code="E_BUFFER",
    )


def listed(names: Sequence[str]) -> str:
    """Return some names as text."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def rules_of(tensors: Mapping[str, torch.Tensor], rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rule of each tensor that matches a pattern."""
    result: dict[str, Rule] = {}
    for pattern, rule in rules.items():
        if rule not in get_args(Rule):
            raise InputError(
                f"the rule for {pattern!r} in buffers is {rule!r}",
                expected=f"one of {', '.join(get_args(Rule))}",
                fix=f'buffers={{"{pattern}": "last"}}',
                code="E_BUFFER",
            )
        for name in match_patterns(tensors, [pattern], key="buffers", kind="buffer", example="*.queue"):
            dtype = tensors[name].dtype
            if (rule == "mean" and not dtype.is_floating_point and not dtype.is_complex) or (
                rule == "sum" and dtype == torch.bool
            ):
                raise InputError(
                    f"the rule for {name!r} in buffers is {rule!r}, and its type is {dtype}",
                    expected="mean for floating-point and complex values, sum for these and integers",
                    fix=f'buffers={{"{name}": "last"}}',
                    code="E_BUFFER",
                )
            result[name] = rule
    return result


def is_number(value: Any) -> bool:
    """Return whether an attribute is a number that float64 holds exactly."""
    return type(value) in (bool, float) or (type(value) is int and abs(value) < 2**53)


def as_tensor(value: Any) -> torch.Tensor | None:
    """Return a value as a tensor; None for anything but tensors and numbers."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(float(value), dtype=torch.float64) if is_number(value) else None


def as_number(value: float, before: bool | int | float) -> bool | int | float:
    """Return a value with the type of the value before, if this holds it exactly."""
    kind = type(before)
    return kind(value) if math.isfinite(value) and kind(value) == value else value


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
