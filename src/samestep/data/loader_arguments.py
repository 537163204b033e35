"""Arguments of `samestep.loader`: names, defaults, and which of them fit together."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader

from samestep.errors import InputError

# Not from the signature of `DataLoader`: an argument that a later torch adds must be refused, not
# ignored.
_DEFAULTS: dict[str, Any] = {
    "batch_size": 1,
    "shuffle": None,
    "sampler": None,
    "batch_sampler": None,
    "num_workers": 0,
    "collate_fn": None,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "in_order": True,
    "seed": None,
    "lengths": None,
}


def loader_arguments(
    dataset: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments of `samestep.loader` by name.

    Args:
        dataset: data set, or a `DataLoader` of torch.
        arguments: positional arguments after it.
        options: keyword arguments.

    Raises:
        InputError: an argument is unknown or given twice, or belongs to the `DataLoader`.
    """
    # Not strict: most calls have fewer arguments, and surplus ones are refused below.
    by_position = dict(zip(_DEFAULTS, arguments, strict=False))
    named = {**by_position, **options}
    twice = [name for name in by_position if name in options]
    if twice:
        raise InputError(
            f"samestep.loader received {twice[0]} by position and by name",
            expected="each argument once",
            fix=f"leave {twice[0]}= out",
            code="E_LOADER",
        )
    unknown = [name for name in named if name not in _DEFAULTS]
    if len(arguments) > len(_DEFAULTS):
        unknown.append(f"number {len(arguments)}")
    if unknown:
        raise InputError(
            f"samestep.loader has no argument {unknown[0]}",
            expected=f"arguments of torch's DataLoader: {', '.join(_DEFAULTS)}",
            fix="leave it out",
            code="E_LOADER",
        )
    if named and isinstance(dataset, DataLoader):
        raise InputError(
            f"samestep.loader received a DataLoader and {next(iter(named))}",
            expected="a DataLoader alone, or a data set with arguments",
            fix="give the argument to the DataLoader",
            code="E_LOADER",
        )
    return {**_DEFAULTS, **named}


def require_compatible(dataset: Any, arguments: Mapping[str, Any]) -> None:
    """Require a dataset with an index, and arguments of a loader that fit together.

    Raises:
        InputError: they do not.
    """
    for name in ("sampler", "batch_sampler"):
        if arguments[name] is not None:
            raise InputError(
                f"samestep.loader received a {name} and a data set",
                "a data set with the order of samestep.loader, or a DataLoader with its sampler",
                f"samestep.loader(DataLoader(dataset, {name}=...)), whose order is that of torch",
                code="E_LOADER",
            )
    if not hasattr(dataset, "__len__"):
        raise InputError(
            f"the dataset {type(dataset).__name__} has no length and index",
            "a dataset with __len__ and __getitem__: order, augmentation and resumption are "
            "functions of the index",
            "samestep.loader(list(dataset), ...) if the samples fit into memory, or an index of "
            "files and offsets",
            code="E_LOADER",
        )
    if arguments["generator"] is not None and arguments["seed"] is not None:
        raise InputError(
            "generator and seed of a loader exclude each other",
            "one of them",
            "leave out seed",
            code="E_LOADER",
        )


def require_integer(
    name: str,
    value: Any,
    *,
    at_least: int,
    at_most: int | None = None,
    example: int,
) -> int:
    """Return an argument as an `int`, from any integer type, such as those of NumPy.

    The error names a valid value, `example`.

    Raises:
        InputError: the value is no integer, or outside of the range.
    """
    number: int | None = None
    if not isinstance(value, bool):  # `operator.index(True)` is 1
        with suppress(TypeError):
            number = operator.index(value)
    if number is None or number < at_least or (at_most is not None and number > at_most):
        limits = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise InputError(
            f"{name} is {value!r}",
            f"an integer {limits}",
            f"{name}={example}",
            code="E_VALUE",
        )
    return number
