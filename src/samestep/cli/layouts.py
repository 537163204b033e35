"""`--strategy` and `--mesh`: how a model lives on the ranks that a command starts."""

from __future__ import annotations

import argparse
import json
from typing import get_args

from samestep.config.layout import AXES
from samestep.config.strategy import Mesh, StrategyName, StrategyPart
from samestep.errors import InputError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    group = parser.add_argument_group("layout (results are equal, under ddp to the bit and else to rounding)")
    group.add_argument(
        "--strategy",
        choices=get_args(StrategyName),
        help="how the model lives on devices, in place of what the recipe says (docs/strategies.md)",
    )
    group.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help=f"sizes of the axes {', '.join(AXES)}; they multiply to the number of processes",
    )


def overrides(arguments: argparse.Namespace) -> list[str]:
    """The options as overrides of a recipe, before those of `--set`.

    Raises:
        InputError: the mesh cannot be read.
    """
    mesh = _sizes(arguments.mesh, f"--mesh {arguments.mesh}") if arguments.mesh is not None else {}
    if arguments.strategy is not None:
        # Whole: what a recipe says of another strategy has no meaning for this one.
        return [f"strategy={json.dumps({'name': arguments.strategy, 'mesh': mesh})}"]
    return [f"strategy.mesh={json.dumps(mesh)}"] if mesh else []


def strategy_of(text: str) -> StrategyPart:
    """What `NAME` or `NAME:AXIS=N,...` asks for.

    Raises:
        InputError: there is no such strategy or axis.
    """
    name, colon, sizes = text.partition(":")
    mesh = Mesh(**_sizes(sizes, f"--layout {text}")) if colon else Mesh()
    return StrategyPart(name=name, mesh=mesh)  # type: ignore[arg-type]


def _sizes(text: str, said: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or not (size.isascii() and size.isdigit()) or int(size) < 1 or axis in found:
            raise InputError(
                said,
                rule=f"AXIS=N with commas between, each axis once: {', '.join(AXES)}",
                do="--mesh replicate=2,tensor=2",
            )
        found[axis] = int(size)
    return found
