"""`--pretrained`: what a file of weights is worth, without a run."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.cli import layouts, options
from samestep.cli.member import Plan
from samestep.errors import InputError
from samestep.recipes.parse import load_recipe


def add_options(parser: Any) -> None:
    """Describe the options."""
    options.add_set_option(parser)
    parser.add_argument(
        "--pretrained",
        metavar="FILE",
        help="evaluate these weights (.safetensors, .pth, .pdparams) with a recipe, named in place of RUN",
    )


def plan(arguments: argparse.Namespace) -> Plan | None:
    """What to evaluate where a file of weights is given; None where it is a run's checkpoint.

    Raises:
        InputError: there is no such recipe, or options of the two do not go together.
    """
    file = arguments.pretrained
    if file is None and arguments.overrides:
        raise InputError(
            f"--set {arguments.overrides[0]} with a run",
            rule="a run is evaluated with its own recipe",
            do="leave it out; or evaluate the weights with a recipe: samestep eval RECIPE --set ... --pretrained FILE",
        )
    if file is None:
        return None
    if arguments.checkpoint is not None:
        raise InputError(
            f"--checkpoint {arguments.checkpoint} with --pretrained {file}",
            rule="weights come from a run's checkpoint or from a file",
            do="leave one of them out",
        )
    recipe = load_recipe(str(arguments.folder), [*layouts.overrides(arguments), *arguments.overrides])
    # There is no run; the file stands in for its folder, and is none that a log could be written to.
    return Plan(replace(recipe, model=replace(recipe.model, pretrained=None)), Path(file), Path(file))
