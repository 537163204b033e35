"""`samestep bench`: one recipe in the ways in which it can run on this machine, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli import layouts, member, options, ranks
from samestep.config import Recipe
from samestep.errors import EXIT_DONE, InputError
from samestep.recipes.parse import load_recipe, recipe_data, shipped_recipes
from samestep.record.events import several_lines

if TYPE_CHECKING:
    from samestep.tools.bench.comparison import Comparison
    from samestep.tools.bench.contenders import Absent, Contender


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "bench",
        help="compare ways to run a recipe on this machine",
        description="Train a recipe on one device, by nn.DataParallel's way and by DDP on several, with several shards "
        "a rank, in bf16, with compressed gradients, with sync batch norm and under any layout asked for; then time "
        "all of them in turn. What cannot run here is told with the reason.",
        epilog="example: samestep bench digits --devices 1,2 --layout fsdp --epochs 1 --rounds 2",
    )
    parser.add_argument("recipe", help=f"{', '.join(shipped_recipes())}, or a YAML file")
    options.add_set_option(parser)
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--devices", default="1,2,4", metavar="N,N,...", help="numbers of devices, a rank each (default 1,2,4)"
    )
    group.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="NAME[:AXIS=N,...]",
        help="one more strategy, such as fsdp or hsdp:shard=2 (docs/strategies.md); may be given several times",
    )
    group.add_argument(
        "--epochs",
        type=int,
        metavar="E",
        help="how long each is trained for its evaluation (default: the recipe's; 0: not)",
    )
    group = parser.add_argument_group("how it is timed")
    group.add_argument("--rounds", type=int, default=5, help="trials of each, in turn with the others (default 5)")
    group.add_argument("--steps", type=int, default=20, help="steps of a trial, after three to warm up (default 20)")
    group = parser.add_argument_group("machine")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where ranks compute")
    group.add_argument("--workers", type=int, metavar="N", help="loader processes a rank (default: what cores allow)")
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="where bench.json and bench.png go (default runs/bench-...)"
    )
    group.add_argument("--no-picture", action="store_true", help="bench.json alone")
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare and print."""
    # Imported here: the other commands have no use for them.
    from samestep.record.confusion import require_pictures
    from samestep.tools.bench import page
    from samestep.tools.bench.contenders import contenders

    member.refuse_launchers("bench")
    _check(arguments)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    asked = [layouts.strategy_of(text) for text in arguments.layout]
    if not arguments.no_picture:
        require_pictures("comparison")
    gpus = [] if arguments.device == "cpu" else ranks.gpu_names(ranks.EVALUATING)
    ways, absent = contenders(recipe, options.numbers("--devices", arguments.devices), asked, len(gpus) or None)
    with options.new_folder(arguments.out, f"bench-{Path(arguments.recipe).stem}") as folder:
        found = _compared(arguments, recipe, ways, absent, gpus)
        (folder / "bench.json").write_text(several_lines(found.as_data()), encoding="utf-8")
        if not arguments.no_picture:
            page.draw(found, folder / "bench.png")
    if arguments.json:
        options.print_json({**found.as_data(), "folder": str(folder)})
    else:
        page.show(found)
        print(f"written     {folder / 'bench.json'}{'' if arguments.no_picture else ', bench.png beside it'}")
    return EXIT_DONE


def _compared(
    arguments: argparse.Namespace, recipe: Recipe, ways: list[Contender], absent: list[Absent], gpus: list[str]
) -> Comparison:
    from rich.console import Console

    from samestep.tools.bench.comparison import Comparison, Plan, compare
    from samestep.tools.bench.machine import describe

    console = Console(stderr=True, quiet=arguments.json)
    plan = Plan(
        rounds=arguments.rounds,
        steps=arguments.steps,
        epochs=recipe.epochs if arguments.epochs is None else arguments.epochs,
        options=options.run_options(arguments),
        preload=ranks.EVALUATING,
    )
    machine = describe(gpus)  # before it is busy with this
    rows, more = compare(ways, plan, tell=lambda text: console.print(text, highlight=False, soft_wrap=True))
    return Comparison(Path(arguments.recipe).stem, recipe_data(recipe), machine, plan, rows, [*absent, *more])


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("rounds", 1), ("steps", 1), ("epochs", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise InputError(f"--{name} {value}", rule=f"at least {least}", do=f"leave --{name} out for its default")
