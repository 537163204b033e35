"""What is compared: one recipe, run in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from samestep.config import Recipe, StrategyPart, settle
from samestep.errors import InputError

SINGLE = "one device"
_SEVERAL = 4


@dataclass(frozen=True)
class Contender:
    """One way to run a recipe.

    Attributes:
        name: such as `ddp, bf16`.
        processes: number of ranks.
        devices: how many devices they compute on, all together.
        recipe: what they run.
    """

    name: str
    processes: int
    devices: int
    recipe: Recipe


@dataclass(frozen=True)
class Absent:
    """A way that cannot be run.

    Attributes:
        reason: why, and what to do about it.
    """

    name: str
    devices: int
    reason: str


# A way to change a recipe for so many ranks.
Change = Callable[[Recipe, int], Recipe]


def contenders(
    recipe: Recipe, devices: Sequence[int], layouts: Sequence[StrategyPart], available: int | None
) -> tuple[list[Contender], list[Absent]]:
    """Everything that is compared, and what of it cannot be.

    Args:
        devices: numbers of devices; one device is what others are compared with, named or not.
        layouts: further strategies that somebody asks for.
        available: how many devices there are; None where any number of ranks can share them, as on a CPU.
    """
    found: list[Contender] = []
    absent: list[Absent] = []
    for number in sorted({1, *devices}):
        for name, change in _ways(number, layouts, recipe.shards):
            try:
                if available is not None and number > available:
                    raise InputError(f"there are {available} devices", rule="a device a rank", do="leave it out")
                changed = change(recipe, number)
                processes = 1 if changed.strategy.name == "dp" else number
                settle(changed.strategy, processes, changed.shards)
            except InputError as error:
                absent.append(Absent(name, number, error.value))
            else:
                found.append(Contender(name, processes, number, changed))
    return found, absent


def _ways(number: int, layouts: Sequence[StrategyPart], shards: int) -> Iterator[tuple[str, Change]]:
    """Names and changes for so many devices, the plain one first.

    Args:
        shards: of the recipe as it is.
    """
    several = "" if number == 1 else "ddp, "
    yield SINGLE if number == 1 else "ddp", _plain
    yield f"{several}{shards} shards as in the recipe", lambda recipe, _: replace(recipe, strategy=StrategyPart())
    yield (
        f"{several}{_SEVERAL} shards a rank",
        lambda recipe, n: replace(_plain(recipe, n), shards=_SEVERAL * n),
    )
    yield f"{several}bf16", lambda recipe, n: _stepping(_plain(recipe, n), precision="bf16")
    yield f"{several}sync BN", lambda recipe, n: _stepping(_plain(recipe, n), batch_norm="sync")
    if number > 1:
        yield "ddp, fast sum", lambda recipe, n: _stepping(_plain(recipe, n), reduction="fast")
        yield "ddp, fp16 compression", _under(StrategyPart(name="ddp", hook="fp16"))
        yield "dp", _under(StrategyPart(name="dp", devices=number))
        for layout in layouts:
            yield _called(layout), _under(layout)


def _plain(recipe: Recipe, number: int) -> Recipe:
    """A shard a rank, which is what a step costs least with."""
    return replace(recipe, shards=number, strategy=StrategyPart())


def _stepping(recipe: Recipe, **rules: str) -> Recipe:
    return replace(recipe, step=replace(recipe.step, **rules))  # type: ignore[arg-type]


def _under(layout: StrategyPart) -> Change:
    return lambda recipe, number: replace(_plain(recipe, number), strategy=layout)


def _called(layout: StrategyPart) -> str:
    sizes = ", ".join(f"{axis} {size}" for axis, size in layout.mesh.given.items())
    return f"{layout.name} ({sizes})" if sizes else layout.name
